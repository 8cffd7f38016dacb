"""What the page's tests share: an engine made up by `fake_engine.py`, and its server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine, FakeServer


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that has run 300 steps under load and now stands still."""
    made = FakeEngine()
    for _ in range(300):
        made.tick()
    return made


@pytest.fixture
def server(engine: FakeEngine) -> Iterator[FakeServer]:
    """The same, behind HTTP."""
    with FakeServer(engine) as running:
        yield running
