"""Scenarios that once failed, as small as they became: each was a fault of the engine, or of a law, and is mended.

cap_below_alignment   INV-FLAG-04 held a continuation to its cap where an alignment allows no piece that short
starved_in_a_fallen_clock   after a fall the longest waiting is not the earliest entry, and INV-REQ-03 says so
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.scenario import load
from tests.simulation.simulate import simulate

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_found_once_stays_mended(path: Path) -> None:
    assert simulate(load(path)).failure is None


def test_each_has_its_story() -> None:
    assert FOUND
    assert all(path.stem in (__doc__ or "") for path in FOUND)
