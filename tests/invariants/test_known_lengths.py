"""Requests of known length (`ignore_eos`) without a prefix tree: where the reference's own walk would break laws."""

from __future__ import annotations

from invariants import InvariantChecker
from tests.builders import CoreRun, engine_config


def test_a_clamped_request_runs_alone() -> None:
    checker = InvariantChecker(progress_steps=8)
    run = CoreRun(engine_config(num_pages=9, enable_radix=False), checker, after_step=checker.audit)
    run.add("clamped", 20, 1000, ignore_eos=True)
    run.run(500)


def test_only_one_request_is_cut() -> None:
    checker = InvariantChecker()
    config = engine_config(enable_radix=False, chunked_prefill_size=64, max_prefill_tokens=512)
    run = CoreRun(config, checker, after_step=checker.audit)
    for index in range(6):
        run.add(f"plain{index}", 100, 10)
        run.add(f"known{index}", 90, 30, ignore_eos=True)
    run.run(500)
