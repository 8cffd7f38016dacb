"""Logit shaping: penalties and biases against plain definitions, and through a whole engine that retracts."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.events import RecordingSink, StepPlanned
from engine.executor.base import SamplingRow
from engine.executor.shaping import shape
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from engine.scheduler.plan import StepKind
from tests.engine.executor.tiny import CONFIG, tiny_executor

VOCAB = 24
EOS = (2, 5)


def row(params: SamplingParams, history: list[int], outputs: int) -> SamplingRow:
    kept = np.array(history, dtype=np.int64) if params.shapes_logits else None
    return SamplingRow(rid="r", row=0, position=len(history), output_index=outputs, params=params, history=kept)


def plain(logits: list[float], params: SamplingParams, history: list[int], outputs: int) -> list[float]:
    """The definition, one token at a time."""
    said = Counter(history[len(history) - outputs :])
    bias = dict(params.logit_bias)
    shaped = []
    for token, logit in enumerate(logits):
        value = logit
        if token in history:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token in said:
            value -= params.presence_penalty + params.frequency_penalty * said[token]
        value += bias.get(token, 0.0)
        if outputs < params.min_new_tokens and token in EOS and not params.ignore_eos:
            value = -math.inf
        shaped.append(value)
    return shaped


PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 2.0, -2.0, 0.3]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -0.7]),
    logit_bias=st.lists(
        st.tuples(st.integers(0, VOCAB - 1), st.floats(-100, 100)), max_size=4, unique_by=lambda b: b[0]
    ).map(tuple),
    min_new_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.booleans(),
)
HISTORY = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30).flatmap(
    lambda history: st.tuples(st.just(history), st.integers(0, len(history) - 1))
)


@given(rows=st.lists(st.tuples(PARAMS, HISTORY), min_size=1, max_size=4), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_each_row_equals_the_plain_definition(
    rows: list[tuple[SamplingParams, tuple[list[int], int]]], seed: int
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    got = shape(logits, [row(params, *history) for params, history in rows], EOS)
    for values, raw, (params, history) in zip(got.tolist(), before.tolist(), rows, strict=True):
        assert values == pytest.approx(plain(raw, params, *history), abs=1e-4)
    assert torch.equal(logits, before)


def test_rows_that_ask_for_nothing_cost_no_copy() -> None:
    logits = torch.randn(2, VOCAB)
    assert shape(logits, [row(SamplingParams(), [1, 2], 1)] * 2, EOS) is logits


def test_a_penalty_is_finer_than_the_type_of_the_model() -> None:
    logits = torch.tensor([[8.0] * VOCAB]).bfloat16()
    shaped = shape(logits, [row(SamplingParams(presence_penalty=0.01), [3, 4], 1)], EOS)
    assert shaped[0, 4] < shaped[0, 3] == 8.0


# -- through a whole engine --------------------------------------------------------------------------------------------

PENALISED = SamplingParams(
    max_new_tokens=40, temperature=0.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3,
    logit_bias=((11, 0.5),), min_new_tokens=40,
)  # fmt: skip
REQUESTS = {
    "plain": SamplingParams(max_new_tokens=40, temperature=0.0, min_new_tokens=40),
    "penalised": PENALISED,
    "drawn": msgspec.structs.replace(PENALISED, temperature=0.9, min_p=0.02, seed=3),
    "frequent": SamplingParams(max_new_tokens=40, temperature=0.0, frequency_penalty=1.0, min_new_tokens=40),
}


def outputs(names: list[str], *, num_pages: int) -> tuple[dict[str, list[int]], RecordingSink]:
    """The answers of REQUESTS `names`, which arrive two steps apart and share a batch."""
    config = EngineConfig.model_validate(
        {
            "scheduler": {"chunked_prefill_size": 16, "max_running_requests": 8, "schedule_conservativeness": 0.02},
            "cache": {"page_size": 4, "num_pages": num_pages},
        }
    )
    sink = RecordingSink()
    executor = tiny_executor(page_size=4, num_pages=num_pages)
    engine = LLMEngine(config, executor=executor, clock=VirtualClock(), sink=sink)
    answers: dict[str, list[int]] = {name: [] for name in names}
    waiting = list(names)
    while waiting or engine.has_work:
        if waiting and engine.steps_done % 2 == 0:
            name = waiting.pop(0)
            prompt = np.random.default_rng(list(REQUESTS).index(name)).integers(10, CONFIG.vocab_size, 37).tolist()
            engine.add_request(EngineRequest(rid=name, prompt_ids=tuple(prompt), params=REQUESTS[name]))
        for output in engine.step():
            if output.token_id is not None:
                answers[output.rid].append(output.token_id)
    return answers, sink


def test_answers_are_the_same_alone_in_company_and_after_retractions() -> None:
    crowded, sink = outputs(list(REQUESTS), num_pages=44)
    plans = [event for event in sink.events if isinstance(event, StepPlanned)]
    retracted = {victim.rid for plan in plans for victim in plan.retractions}
    assert retracted & {"penalised", "drawn", "frequent"}, "the pool must be too small for all"
    assert any(plan.kind is StepKind.MIXED for plan in plans)
    for name in REQUESTS:
        alone, _ = outputs([name], num_pages=200)
        assert crowded[name] == alone[name], name
        assert len(alone[name]) == 40


def test_the_penalties_do_something() -> None:
    answers, _ = outputs(list(REQUESTS), num_pages=200)
    # Each answer of its own prompt: tokens that come again are what penalties are against.
    assert len(set(answers["penalised"])) > len(set(answers["plain"]))
    assert max(Counter(answers["frequent"]).values()) < max(Counter(answers["plain"]).values())
