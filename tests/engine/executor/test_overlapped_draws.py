"""Drawn rows that overlap, on a device that computes nothing before the host waits for it: the same answers, token by
token and bit by bit, whatever is in flight when it happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.llm_engine import EngineRequest
from engine.sampling_params import GrammarSpec, SamplingParams
from telemetry.journal import JournalSink
from telemetry.replay import replay
from tests.engine.executor.overlapped_runs import LateExecutor, prompt, run, successors

ASKED = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7]),
        "top_p": st.sampled_from([0.5, 0.95, 1.0]),
        "top_k": st.sampled_from([0, 1, 7, 50]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.one_of(st.none(), st.integers(0, 5)),
        "logprobs": st.sampled_from([None, None, 0, 2]),
        "min_new_tokens": st.sampled_from([0, 4]),
        "max_new_tokens": st.integers(1, 14),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), tuple(range(0, 320, 9))]),
    }
)


def requests_of(asked: list[dict[str, Any]]) -> list[EngineRequest]:
    return [
        EngineRequest(rid=f"r{at}", prompt_ids=prompt(5 + 9 * (at % 4), at % 3), params=SamplingParams(**one))
        for at, one in enumerate(asked)
    ]


DRAWN = requests_of(
    [
        {"max_new_tokens": 30, "temperature": 1.0, "top_p": 0.9, "seed": 1, "ignore_eos": True},
        {"max_new_tokens": 30, "temperature": 0.7, "top_k": 20, "logprobs": 2, "ignore_eos": True},
        {"max_new_tokens": 30, "temperature": 0.0, "ignore_eos": True},
        {"max_new_tokens": 30, "temperature": 1.3, "min_p": 0.02, "seed": 9, "min_new_tokens": 8},
        {"max_new_tokens": 30, "temperature": 1.0, "ignore_eos": True},
        {"max_new_tokens": 30, "temperature": 0.5, "top_p": 0.8, "top_k": 300, "stop_token_ids": (0, 40, 80, 120, 160)},
    ]
)


@given(asked=st.lists(ASKED, min_size=1, max_size=7), mixed=st.booleans())
@settings(max_examples=15, deadline=None)
def test_drawn_mixtures_answer_as_without_overlap(asked: list[dict[str, Any]], mixed: bool) -> None:
    requests = requests_of(asked)
    want = run(successors(), requests, overlap=False, enable_mixed_chunk=mixed)
    found = run(LateExecutor(), requests, overlap=True, enable_mixed_chunk=mixed)
    assert found[:3] == want[:3]
    assert want.ahead == 0


def test_drawn_rows_are_planned_ahead() -> None:
    found = run(LateExecutor(), DRAWN, overlap=True)
    assert found.ahead > len(found.plans) * 0.8


@pytest.mark.parametrize("turn", range(2, 20, 3))
def test_who_is_given_up_while_his_row_is_in_flight_has_the_beginning_of_his_answer(turn: int) -> None:
    want = run(successors(), DRAWN, overlap=False)
    given_up = "r0"
    found = run(LateExecutor(), DRAWN, overlap=True, aborts={turn: given_up})
    assert found.ends.pop(given_up) == "abort"
    tokens = found.tokens.pop(given_up)
    assert tokens == want.tokens[given_up][: len(tokens)]
    assert len(tokens) < 30
    assert found.tokens == {rid: said for rid, said in want.tokens.items() if rid != given_up}


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_who_is_pushed_back_draws_the_same_tokens_again(policy: str) -> None:
    want = run(successors(), DRAWN, overlap=False)
    settings = {"num_pages": 24, "schedule_conservativeness": 0.02, "clip_max_new_tokens": 2, "schedule_policy": policy}
    found = run(LateExecutor(num_pages=24), DRAWN, overlap=True, **settings)
    assert any(plan.retractions for plan in found.plans), "the pool must be too small"
    assert found[:3] == want[:3]


def test_penalties_and_grammars_beside_drawn_rows_are_waited_for() -> None:
    others = requests_of(
        [
            {"max_new_tokens": 9, "temperature": 1.0, "top_p": 0.9},
            {"max_new_tokens": 9, "temperature": 0.8, "repetition_penalty": 1.4, "seed": 3},
            {"max_new_tokens": 9, "temperature": 1.0, "grammar": GrammarSpec("regex", "odd"), "logprobs": 1},
            {"max_new_tokens": 9, "temperature": 0.9, "logit_bias": ((7, 5.0),), "top_k": 30},
        ]
    )
    want = run(successors(), others, overlap=False)
    found = run(LateExecutor(), others, overlap=True)
    assert found[:3] == want[:3]


def test_the_record_of_drawn_rows_that_overlap_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    journals: list[JournalSink] = []

    def sinks(clock: Any) -> list[JournalSink]:
        journals.append(JournalSink(path, clock=clock))
        return journals

    found = run(LateExecutor(num_pages=24), DRAWN, overlap=True, num_pages=24, clip_max_new_tokens=2, sinks=sinks)
    journals[0].close()
    assert found.ahead > 5
    assert replay(path).verdict == "identical"


class Faulty(LateExecutor):
    """Reads the tokens of a batch right after it was launched."""

    def launch(self, batch: Any) -> None:
        with self._operators:
            OverlappedTorchExecutor.launch(self, batch)
            self._last.tolist()  # type: ignore[union-attr]  # every batch here is chosen on the device
            int(self._last[0])  # type: ignore[index]  # likewise


def test_sabotage_a_launch_that_waits_is_seen() -> None:
    with pytest.raises(AssertionError, match=r"DataDependent|_local_scalar_dense"):
        run(Faulty(), DRAWN, overlap=True)


@pytest.mark.parametrize("fault", [{"returns": 1}, {"deaf": True}], ids=["one buffer", "no wait"])
def test_sabotage_of_the_way_back_is_seen(fault: dict[str, Any]) -> None:
    want = run(successors(), DRAWN, overlap=False)
    try:
        found = run(LateExecutor(**fault), DRAWN, overlap=True)
    except (AssertionError, IndexError):
        return
    assert found.tokens != want.tokens
