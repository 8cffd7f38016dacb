"""The boards, in the order that they are read. Owns: the list."""

from typing import Final

from grafana.boards.admission import ADMISSION
from grafana.boards.fleet import FLEET
from grafana.boards.latency import LATENCY
from grafana.boards.memory import MEMORY
from grafana.boards.overview import OVERVIEW
from grafana.boards.watch import WATCH
from grafana.panel import Board

BOARDS: Final[tuple[Board, ...]] = (OVERVIEW, ADMISSION, LATENCY, MEMORY, WATCH, FLEET)
