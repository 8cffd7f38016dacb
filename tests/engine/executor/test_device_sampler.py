"""DeviceSampler: the tokens of Sampler for the same logits, with nothing read back from the device in between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from engine.executor import device_sampler as module
from engine.executor.base import SampledToken, SamplingRow
from engine.executor.device_sampler import DeviceSampler, answers, is_chosen_on_device, limited_floors, nucleus_floors
from engine.executor.sampler import BLOCK, NonFiniteLogits, Sampler, _floors, in_blocks
from engine.sampling_params import SamplingParams
from tests.engine.attention.late_device import LateDevice
from tests.engine.executor.late_operators import HostData, LateOperators, LateStream
from tests.engine.executor.test_sampler import plain_survivors

VOCAB = 700
EOS = (2, 300)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([0.013, 0.317, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 300, VOCAB, 767, 768, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.one_of(st.none(), st.integers(-(2**70), 2**70)),
    logprobs=st.sampled_from([None, 0, 2, 20]),
    min_new_tokens=st.sampled_from([0, 3]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (5, 699, 700)]),
)


def sampler(**settings: Any) -> Sampler:
    return Sampler(vocab_size=VOCAB, eos_token_ids=EOS, secret=b"secret", **settings)


def row(params: SamplingParams, at: int = 0) -> SamplingRow:
    return SamplingRow(rid=f"r{at}", row=at, position=7 * at + 3, output_index=at % 5, params=params)


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    """Eighths, so that some tie; rows from nearly flat to steep."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) * 8
    return (torch.randn(rows, VOCAB, generator=generator) * spread).round() / 8


def on_device(chooser: DeviceSampler, logits: torch.Tensor, rows: list[SamplingRow]) -> tuple[SampledToken, ...]:
    chosen = chooser.choose(logits, rows)
    return answers(rows, chosen.integers.tolist(), chosen.floats.tolist())


@given(params=st.lists(PARAMS, min_size=1, max_size=7), seed=st.integers(0, 1000), bfloat16=st.booleans())
@settings(max_examples=300, deadline=None)
def test_tokens_and_log_probabilities_are_those_of_the_sampler(
    params: list[SamplingParams], seed: int, bfloat16: bool
) -> None:
    logits = random_logits(len(params), seed)
    if bfloat16:
        logits = logits.bfloat16()
    before = logits.clone()
    rows = [row(one, at) for at, one in enumerate(params)]
    got = on_device(DeviceSampler(sampler(), LateDevice(late=False)), logits, rows)
    assert got == sampler().sample(logits, rows)
    assert torch.equal(logits, before)


@given(mine=PARAMS, others=st.lists(PARAMS, max_size=5), place=st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_a_row_is_chosen_the_same_in_any_batch(mine: SamplingParams, others: list[SamplingParams], place: int) -> None:
    place = min(place, len(others))
    logits = random_logits(1 + len(others), len(others))
    chooser = DeviceSampler(sampler(), LateDevice(late=False))
    crowd = [row(one, at) for at, one in enumerate([*others[:place], mine, *others[place:]])]
    (alone,) = on_device(chooser, logits[place : place + 1], [crowd[place]])
    assert on_device(chooser, logits, crowd)[place].token_id == alone.token_id


def test_more_rows_than_are_searched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUCLEUS_ROWS", 3)
    rows = [row(SamplingParams(temperature=1.0, top_p=0.8, seed=at), at) for at in range(8)]
    logits = random_logits(8)
    got = on_device(DeviceSampler(sampler(), LateDevice(late=False)), logits, rows)
    assert got == sampler().sample(logits, rows)


def test_no_rows_choose_nothing() -> None:
    assert on_device(DeviceSampler(sampler(), LateDevice(late=False)), torch.empty(0, VOCAB), []) == ()


def test_greedy_rows_send_nothing_to_the_device() -> None:
    device = LateDevice(late=False)
    on_device(DeviceSampler(sampler(), device), random_logits(2), [row(SamplingParams(temperature=0.0))] * 2)
    assert device.log == []


def test_what_hangs_on_tokens_is_not_chosen_on_the_device() -> None:
    assert is_chosen_on_device(row(SamplingParams(top_p=0.5, min_new_tokens=9, logprobs=3)))
    shaped = SamplingParams(repetition_penalty=1.1)
    history = np.zeros(3, dtype=np.int64)
    assert not is_chosen_on_device(
        SamplingRow(rid="r", row=0, position=3, output_index=1, params=shaped, history=history)
    )


#: Multiples of 1/8, and what logits can be at their ends.
VALUES = st.one_of(
    st.integers(-40, 40).map(lambda n: n / 8), st.sampled_from([0.0, -0.0, -1e-45, 1e-45, -3e38, -math.inf])
)
ROWS = st.integers(2, 40).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=4))


@given(rows=ROWS, share=st.sampled_from([0.013, 0.317, 0.771, 0.953, 1 - 1e-9]), offset=st.sampled_from([0.0, 9.0]))
@settings(max_examples=300, deadline=None)
def test_nuclei_are_those_of_the_plain_definition_and_of_the_sampler(
    rows: list[list[float]], share: float, offset: float
) -> None:
    # One logit at least is one: a row of nothing but -inf is refused before.
    logits = torch.tensor(rows)
    logits[:, 0] = logits[:, 0].clamp(min=-5.0)
    logits -= offset
    shares = torch.full((len(rows),), share, dtype=torch.float64)
    blocks = in_blocks(logits)
    floors = nucleus_floors(blocks, shares).tolist()
    searched = _floors(blocks.view(len(rows), -1), [0] * len(rows), [share] * len(rows)).tolist()
    for values, floor, other in zip(logits.tolist(), floors, searched, strict=True):
        survivors = {at for at, value in enumerate(values) if value >= floor}
        assert survivors == {at for at, value in enumerate(values) if value >= other}
        if share < 0.99:
            assert survivors == plain_survivors(values, 0, share)


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 2.0, 9.0]), ulps=st.integers(-2, 2))
@settings(max_examples=200, deadline=None)
def test_where_a_share_is_met_within_a_rounding_both_nuclei_are_right(seed: int, spread: float, ulps: int) -> None:
    """There, and only there, the two may differ: their sums are of another order."""
    generator = torch.Generator().manual_seed(seed)
    logits = in_blocks(torch.randn(1, VOCAB, generator=generator) * spread).view(1, -1)
    best = logits.sort(descending=True).values[0]
    reach = (best - best[0]).double().exp().cumsum(0)
    total = (logits - best[0]).exp_().sum(dim=-1, dtype=torch.float64)[0]
    share = float(reach[seed % VOCAB] / total)
    for _ in range(abs(ulps)):
        share = math.nextafter(share, math.copysign(math.inf, ulps))
    share = min(share, math.nextafter(1.0, 0.0))
    device = nucleus_floors(logits.view(1, -1, BLOCK), torch.tensor([share], dtype=torch.float64))[0]
    host = _floors(logits, [0], [share])[0]
    for floor in (device, host):
        kept, above = int((best >= floor).sum()), int((best > floor).sum())
        if floor > -math.inf:
            assert reach[kept - 1] >= share * total * (1 - 1e-12)
        if above:
            assert reach[min(above, VOCAB) - 1] <= share * total * (1 + 1e-12) or floor == -math.inf


@given(rows=ROWS, top_k=st.integers(1, 40), share=st.sampled_from([0.013, 0.771, 1.0]))
@settings(max_examples=100, deadline=None)
def test_limits_are_those_of_the_sampler(rows: list[list[float]], top_k: int, share: float) -> None:
    logits = torch.tensor(rows)
    logits[:, 0] = 5.0
    limit = min(top_k, logits.shape[1])
    found = limited_floors(
        logits.topk(min(limit + 3, logits.shape[1]), dim=-1).values,
        torch.full((len(rows),), limit),
        torch.full((len(rows),), share, dtype=torch.float64),
    )
    if limit < logits.shape[1]:
        assert found.tolist() == _floors(logits, [limit] * len(rows), [share] * len(rows)).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_p=0.9, min_p=0.1, logprobs=2),
        SamplingParams(seed=1, top_k=7, top_p=0.9),
    ],
    ids=["greedy", "plain", "nucleus", "limited"],
)
def test_logits_that_are_not_finite_are_told_by_request_and_choose_a_token_that_exists(
    bad: float, params: SamplingParams
) -> None:
    """The next batch is launched with that token before anybody knows: it must not point outside."""
    logits = random_logits(3)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 640] = bad
    rows = [row(params, at) for at in range(3)]
    chosen = DeviceSampler(sampler(), LateDevice(late=False)).choose(logits, rows)
    assert all(0 <= token < VOCAB for token in chosen.tokens.tolist())
    with pytest.raises(NonFiniteLogits, match=r"request r1, position 10: the best logit is"):
        answers(rows, chosen.integers.tolist(), chosen.floats.tolist())


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_k=9, logprobs=4),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9),
    SamplingParams(temperature=1.1, min_p=0.1, min_new_tokens=9),
    SamplingParams(temperature=0.0, logprobs=1, min_new_tokens=9),
]


def test_on_a_device_that_computes_nothing_before_it_is_waited_for() -> None:
    """Five batches one after the other, each with other parameters, and none waited for."""
    stream = LateStream()
    chooser, late = DeviceSampler(sampler(), stream), LateOperators(stream)
    batches = [[row(one, at + turn) for at, one in enumerate(MIXED[turn:] + MIXED[:turn])] for turn in range(5)]
    logits = [random_logits(len(MIXED), turn) for turn in range(5)]
    with torch.inference_mode(), late:
        chosen = [chooser.choose(some, rows) for some, rows in zip(logits, batches, strict=True)]
    assert stream.waiting, "nothing waits: the device is not late"
    stream.synchronize()
    for one, some, rows in zip(chosen, logits, batches, strict=True):
        assert answers(rows, one.integers.tolist(), one.floats.tolist()) == sampler().sample(some, rows)


@pytest.mark.parametrize("sets", [1, 2])
def test_parameters_that_are_overwritten_before_they_are_copied_are_seen(sets: int) -> None:
    """Who does not wait needs more sets than he is steps ahead: three batches, of which nobody waits for one."""
    stream = LateStream(deaf=True)
    chooser, late = DeviceSampler(sampler(), stream, sets=sets), LateOperators(stream)
    rows = [[row(one, at + turn) for at, one in enumerate(MIXED)] for turn in range(3)]
    logits = random_logits(len(MIXED))
    with torch.inference_mode(), late:
        chosen = [chooser.choose(logits, one) for one in rows]
    with pytest.raises(IndexError, match="index"):
        stream.synchronize()
    assert len(chosen) == 3


class Reads(DeviceSampler):
    """Asks the device in between, in some way."""

    def __init__(self, how: Any) -> None:
        self.stream = LateStream()
        super().__init__(sampler(), self.stream)
        self._how = how

    def choose(self, logits: torch.Tensor, rows: Any) -> Any:
        chosen = super().choose(logits, rows)
        self._how(chosen, logits)
        return chosen


@pytest.mark.parametrize(
    ("how", "refused"),
    [
        (lambda chosen, _: chosen.tokens[0].item(), DataDependentOutputException),
        (lambda chosen, _: bool((chosen.floats > 0).all()), DataDependentOutputException),
        (lambda chosen, _: (chosen.floats > 0).nonzero(), DynamicOutputShapeException),
        (lambda chosen, _: chosen.tokens[chosen.tokens > 3], DynamicOutputShapeException),
        (lambda _, logits: _floors(logits, [0] * 6, [0.9] * 6), (HostData, DataDependentOutputException)),
        (lambda _, logits: logits[torch.tensor([1, 2])], HostData),
    ],
    ids=["item", "bool", "nonzero", "mask", "the sampler's floors", "a list of places"],
)
def test_sabotage_a_host_that_waits_is_refused(how: Any, refused: Any) -> None:
    chooser = Reads(how)
    rows = [row(one, at) for at, one in enumerate(MIXED)]
    with torch.inference_mode(), LateOperators(chooser.stream), pytest.raises(refused):
        chooser.choose(random_logits(len(MIXED)), rows)


class ShapeStream:
    """Has shapes only: copies bring nothing."""

    device = torch.device("meta")

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        assert target.device == self.device

    def event(self) -> ShapeStream:
        return self

    def record(self) -> None: ...

    def wait(self) -> None: ...


@pytest.mark.parametrize("params", [[one] for one in MIXED] + [MIXED], ids=[*map(str, range(len(MIXED))), "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_operator_stays_on_one_device(params: list[SamplingParams], dtype: torch.dtype) -> None:
    """Fake tensors refuse operators over two devices, and know no values that could be read."""
    stream = ShapeStream()
    chooser = DeviceSampler(sampler(device=stream.device), stream)  # type: ignore[arg-type]  # what it is asked for
    rows = [row(one, at) for at, one in enumerate(params)]
    with FakeTensorMode(allow_non_fake_inputs=True):
        chosen = chooser.choose(torch.zeros(len(params), VOCAB, dtype=dtype, device="meta"), rows)
    asking = [one.logprobs for one in params if one.logprobs is not None]
    ids = len(asking) * max(asking, default=0)
    assert [part.device.type for part in chosen] == ["meta"] * 3
    assert [len(part) for part in chosen] == [len(params), len(params) + ids, len(params) + len(asking) + ids]
    assert [part.dtype for part in chosen] == [torch.int64, torch.int64, torch.float32]
