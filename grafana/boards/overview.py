"""The overview. Owns: the first look: health, who waits for what, what users see."""

from __future__ import annotations

from typing import Final

from grafana.boards.shared import (
    FIRING,
    GENERATION,
    HEALTH,
    HIT_SHARE,
    LIVE,
    PAGES,
    TBT_QUANTILES,
    TTFT_QUANTILES,
    TTFT_STACK,
    WAITING_BY_BLOCKER,
)
from grafana.panel import Board, Row

OVERVIEW: Final = Board(
    "admitscope-overview",
    "admitscope: overview",
    "Is this engine well, who waits and for what, and who owns the memory?",
    (
        HEALTH,
        Row("Right now", (LIVE, WAITING_BY_BLOCKER, PAGES)),
        Row("What users see", (TTFT_QUANTILES, TTFT_STACK, TBT_QUANTILES, GENERATION, HIT_SHARE, FIRING)),
    ),
)
