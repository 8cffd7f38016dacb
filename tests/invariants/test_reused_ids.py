"""An id may be used again once its request has ended; in the core even within the same step (FR-25)."""

from __future__ import annotations

import pytest

from engine.clock import VirtualClock
from engine.errors import RequestRefused
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from invariants import InvariantChecker
from tests.builders import CoreRun, engine_config


def test_an_id_used_again_at_once_after_an_abort_is_a_new_request() -> None:
    checker = InvariantChecker(on_violation="raise")
    run = CoreRun(engine_config(page_size=4, num_pages=32), checker, after_step=checker.audit)
    run.add("r", 3, 5, ignore_eos=True)
    run.step()
    assert run.abort("r")
    run.add("r", 5, 5, ignore_eos=True)
    run.run()
    assert checker.total_violations == 0


def test_the_engine_keeps_an_id_until_its_end_is_handed_out() -> None:
    config = engine_config(page_size=4, num_pages=32)
    checker = InvariantChecker(on_violation="raise")
    engine = LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=checker)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    second = EngineRequest(rid="r", prompt_ids=(4, 5, 6, 7, 8), params=params)
    engine.add_request(EngineRequest(rid="r", prompt_ids=(1, 2, 3), params=params))
    engine.step()
    assert engine.abort_request("r")
    with pytest.raises(RequestRefused, match="'r'"):
        engine.add_request(second)
    ends = [output.finish for output in engine.step() if output.finish is not None]
    engine.add_request(second)
    while engine.has_work:
        ends += [output.finish for output in engine.step() if output.finish is not None]
    assert ends == [FinishReason.ABORT, FinishReason.LENGTH]
    assert checker.total_violations == 0
