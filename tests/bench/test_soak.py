"""The soak in small: a thousand requests, a third of them cut short, leave nothing; and its verdict can be bad."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from bench.soak import Report, soak
from bench.soak_load import LEAVING, Leave, Outcome, plan
from bench.tiny_server import Held

NOTHING = Held(0, 0, 0, 9, 0, 0)


def test_a_thousand_requests_leave_nothing(tmp_path: Path) -> None:
    report = soak(tmp_path, requests=1000)
    assert report.faults(most_growth=None) == []
    assert report.outcome.total() == 1000
    for leave in LEAVING:
        assert report.outcome.total(leave, "left") > 30
    assert report.outcome.total(Leave.STAYS, "answered") > 600
    # Caches and rings still fill in so short a run; a leak per request would show all the same.
    assert report.growth < 0.10


def test_the_verdict_names_what_is_left() -> None:
    outcome = Outcome(Counter({(Leave.STAYS, "answered"): 7, (Leave.BEFORE, "left"): 3}))
    good = Report(10, 1.0, outcome, 9, NOTHING, 100.0, 101.0)
    assert good.faults() == []
    bad = dataclasses.replace(
        good,
        held=Held(1, 2, 3, 13, 4, 5),
        rss_end=103.0,
        outcome=Outcome(Counter({(Leave.STAYS, "incomplete"): 2, (Leave.STAYS, "429"): 1, (Leave.STAYS, "500"): 1})),
    )
    assert bad.faults() == [
        "1 requests live",
        "2 pages owned",
        "3 pages locked",
        "4 files more than before",
        "4 laws broken",
        "5 events lost or listeners failed",
        "2 patient clients got incomplete",
        "1 patient clients got 500",
        "memory grew by 3.0%; 2% is allowed",
    ]


def test_a_seed_is_a_run() -> None:
    asks = [plan(index, 3, 0.3, "m") for index in range(400)]
    assert asks == [plan(index, 3, 0.3, "m") for index in range(400)]
    assert asks != [plan(index, 4, 0.3, "m") for index in range(400)]
    leaving = sum(ask.leave is not Leave.STAYS for ask in asks) / len(asks)
    assert 0.2 < leaving < 0.4
