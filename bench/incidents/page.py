"""docs/debugging.md. Owns: the blocks of it that a run printed, between markers; the words around them are by hand.

A block is `<!-- NAME STAGE -->`, a fence with the lines, `<!-- end -->`. Nothing else of the page is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.incidents.diagnosis import STAGES, Diagnosis

_END: Final = "<!-- end -->"
ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "debugging.md"
IMAGES: Final = ROOT / "docs" / "img"


def with_blocks(text: str, name: str, stages: Mapping[str, Sequence[str]]) -> str:
    """`text` with the blocks of `name` as its run printed them. Raises LookupError where a marker is missing."""
    for stage in STAGES:
        marker = f"<!-- {name} {stage} -->"
        block = "\n".join([marker, "```text", *stages[stage], "```", _END])
        before, found, rest = text.partition(marker + "\n")
        _, closed, after = rest.partition(_END)
        if not found or not closed or marker in after:
            raise LookupError(f"docs/debugging.md has not exactly one block {marker} … {_END}")
        text = before + block + after
    return text


def image(name: str) -> Path:
    """Where the plot of an incident is kept for the page."""
    return IMAGES / f"incident-{name}.svg"


def write(told: Diagnosis, document: str) -> None:
    """Put the run's blocks into the page, and its plot beside it."""
    name = told.incident.name
    PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), name, told.stages), encoding="utf-8")
    image(name).write_text(document, encoding="utf-8")
