"""Exact prices are recomputed from events: each wrong price, promise or cut is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.scheduler.accounting import Opening
from engine.scheduler.exact import ExactAccounting
from engine.scheduler.ledgers import Cost
from invariants import InvariantChecker
from tests.builders import CoreRun, engine_config


def run_it() -> InvariantChecker:
    checker = InvariantChecker(on_violation="record")
    config = engine_config(num_pages=40, chunked_prefill_size=50, kv_accounting="exact", enable_mixed_chunk=True)
    run = CoreRun(config, checker, after_step=checker.audit)
    for index in range(6):
        run.add(f"r{index}", 90, 20)
        run.step()
    run.run()
    assert checker.internal_errors == 0
    return checker


def costing(**change: Callable[[Cost], float]) -> Callable[..., Cost]:
    original = ExactAccounting.price

    def price(self: ExactAccounting, *args: Any, **kwargs: Any) -> Cost:
        cost = original(self, *args, **kwargs)
        return msgspec.structs.replace(cost, **{name: value(cost) for name, value in change.items()})

    return price


def test_an_honest_run_breaks_no_law() -> None:
    assert run_it().total_violations == 0


@pytest.mark.parametrize(
    ("method", "wrong", "law"),
    [
        ("price", costing(current=lambda cost: cost.current + 16), "INV-BUDGET-03"),
        ("price", costing(total=lambda cost: cost.total - 16), "INV-BUDGET-03"),
        ("price", costing(compute=lambda cost: 0), "INV-BUDGET-03"),
        ("reserved", lambda self, request, *, is_cut: 0, "INV-BUDGET-03"),
        ("running_growth", lambda self, request, ratio: 0, "INV-BUDGET-04"),
        ("continuation_promise", lambda self, request: 0, "INV-BUDGET-04"),
        ("opening", lambda self, riding, promised: Opening(0, promised), "INV-BUDGET-02"),
        ("continue_by", lambda self, request, budget, *, cap, unit: 1, "INV-CHUNK-05"),
    ],
)
def test_each_fault_is_noticed(monkeypatch: pytest.MonkeyPatch, method: str, wrong: Any, law: str) -> None:
    monkeypatch.setattr(ExactAccounting, method, wrong)
    assert run_it().violations_by_id[law] > 0
