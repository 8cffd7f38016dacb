"""Sampler: filters against plain definitions, frequencies against softmax, seeds against company."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.executor import sampler as module
from engine.executor.base import SamplingRow
from engine.executor.noise import GOLDEN, MASK64, gumbel, mix, mix_int, row_key, signed, token_keys
from engine.executor.sampler import NonFiniteLogits, Sampler, _floors
from engine.sampling_params import SamplingParams

VOCAB = 64


def row(params: SamplingParams, *, rid: str = "r", position: int = 10, output_index: int = 0) -> SamplingRow:
    history = None
    if params.shapes_logits:
        history = np.random.default_rng(position % 1000).integers(0, VOCAB, min(position, 30))
    return SamplingRow(rid=rid, row=0, position=position, output_index=output_index, params=params, history=history)


def sampler(vocab: int = VOCAB, *, secret: bytes = b"secret") -> Sampler:
    return Sampler(vocab_size=vocab, eos_token_ids=(2, 5), secret=secret)


def random_logits(rows: int, *, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: torch.Tensor, params: SamplingParams, count: int, **settings: object) -> Counter[int]:
    """Tokens drawn at `count` positions from the same logits [vocab]."""
    chooser = sampler(len(logits), **settings)
    rows = [row(params, position=position) for position in range(count)]
    return Counter(token.token_id for token in chooser.sample(logits.expand(count, -1), rows))


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [9.0, 3.0, 1.0, 3.0]])
    tokens = sampler(4).sample(logits, [row(SamplingParams(temperature=0.0), rid=rid) for rid in "ab"])
    assert [(t.rid, t.token_id, t.logprobs) for t in tokens] == [("a", 1, None), ("b", 0, None)]
    assert sampler(4).sample(logits[:0], []) == ()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits, count = random_logits(1, vocab=12, spread=1.0)[0], 20_000
    drawn = draw(logits, SamplingParams(temperature=temperature, seed=3), count)
    want = (logits / temperature).softmax(-1).tolist()
    # Chi-square with 11 degrees of freedom: 31.3 is passed once in a thousand; the seed is fixed.
    chi_square = sum((drawn[i] - count * p) ** 2 / (count * p) for i, p in enumerate(want))
    assert chi_square < 31.3


def test_frequencies_over_seeds_and_over_requests_without_seed() -> None:
    """Not only positions: the noise must also differ from seed to seed and from request to request."""
    logits, count = torch.zeros(8), 8_000
    chooser = sampler(8)
    seeded = [row(SamplingParams(seed=s)) for s in range(count)]
    unseeded = [row(SamplingParams(), rid=f"r{i}") for i in range(count)]
    for rows in (seeded, unseeded):
        drawn = Counter(t.token_id for t in chooser.sample(logits.expand(count, -1), rows))
        assert sum((drawn[i] - count / 8) ** 2 / (count / 8) for i in range(8)) < 24.3


def test_noise_is_gumbel_and_not_correlated_along_any_axis() -> None:
    row_keys = [row_key(seed, position) for seed in (0, 1) for position in range(40)]
    noise = gumbel(token_keys(4096), torch.tensor(row_keys)[:, None])
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    centred = noise - noise.mean()
    for one, other in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1]), (centred[:40], centred[40:])):
        assert abs((one * other).mean().item()) < 0.02


def test_tensor_and_integer_finalisers_are_the_same_function() -> None:
    values = [0, 1, 12345, (1 << 63) - 1, (1 << 64) - 1, 0xDEADBEEFCAFEF00D]
    stepped = [(v + GOLDEN) & MASK64 for v in values]
    got = mix(torch.tensor([signed(v) for v in stepped])).tolist()
    assert got == [signed(mix_int(v)) for v in values]


PARAMS = st.builds(
    SamplingParams,
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 1.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.sampled_from([(), ((3, 2.5), (VOCAB - 1, -100.0))]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 1000]),
    seed=st.one_of(st.none(), st.integers(-(2**70), 2**70)),
    logprobs=st.sampled_from([None, 0, 2]),
)


@given(mine=PARAMS, others=st.lists(PARAMS, max_size=5), place=st.integers(0, 5), position=st.integers(0, 1 << 40))
@settings(max_examples=150)
def test_a_row_is_sampled_the_same_in_any_batch(
    mine: SamplingParams, others: list[SamplingParams], place: int, position: int
) -> None:
    logits = random_logits(1 + len(others), seed=len(others))
    place = min(place, len(others))
    rows = [row(params, rid=f"other-{i}", position=i) for i, params in enumerate(others)]
    asked = row(mine, rid="mine", position=position)
    (alone,) = sampler().sample(logits[place : place + 1], [asked])
    crowd = sampler().sample(logits, [*rows[:place], asked, *rows[place:]])
    # The log-probability itself may differ in the last bit between one row and many.
    assert crowd[place].token_id == alone.token_id
    if alone.logprobs is not None and crowd[place].logprobs is not None:
        assert crowd[place].logprobs.logprob == pytest.approx(alone.logprobs.logprob, abs=1e-5)


def test_seed_decides_alone_but_without_one_rid_and_process_decide() -> None:
    flat = torch.zeros(1, VOCAB)

    def tokens(params: SamplingParams, *, rid: str = "a", secret: bytes = b"one") -> list[int]:
        chooser = sampler(secret=secret)
        return [chooser.sample(flat, [row(params, rid=rid, position=p)])[0].token_id for p in range(12)]

    seeded, free = SamplingParams(seed=7), SamplingParams()
    assert tokens(seeded) == tokens(seeded, rid="b", secret=b"two")
    assert tokens(seeded) != tokens(SamplingParams(seed=8))
    assert tokens(free) == tokens(free)
    assert tokens(free) != tokens(free, rid="b")
    assert tokens(free) != tokens(free, secret=b"two")


def test_two_samplers_without_a_given_secret_differ() -> None:
    flat = torch.zeros(20, VOCAB)
    rows = [row(SamplingParams(), position=p) for p in range(20)]
    one, two = (Sampler(vocab_size=VOCAB, eos_token_ids=()).sample(flat, rows) for _ in range(2))
    assert one != two


def plain_survivors(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """The definition in plain Python: the k best, of those the fewest that reach top_p; ties of the last stay."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[:top_k] if top_k else order
    total = math.fsum(math.exp(logits[i]) for i in kept)
    reached, last = 0.0, kept[-1]
    for i in kept if top_p < 1.0 else ():
        reached += math.exp(logits[i]) / total
        if reached >= top_p:
            last = i
            break
    return {i for i in order if logits[i] >= logits[last]}


#: Multiples of 1/8: ties are frequent, and sums far enough from top_p not to hang on rounding.
VALUES = st.integers(-40, 40).map(lambda n: n / 8)
ROWS = st.integers(2, 40).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=4))


@given(
    rows=ROWS,
    top_k=st.lists(st.integers(0, 45), min_size=4, max_size=4),
    top_p=st.lists(st.sampled_from([0.013, 0.317, 0.771, 0.953, 1.0]), min_size=4, max_size=4),
    nucleus=st.sampled_from([1, 3, 512]),
)
@settings(max_examples=200)
def test_survivors_equal_the_plain_definition(
    rows: list[list[float]], top_k: list[int], top_p: list[float], nucleus: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUCLEUS", nucleus)
        floors = _floors(torch.tensor(rows), top_k[: len(rows)], top_p[: len(rows)]).tolist()
    for values, k, p, floor in zip(rows, top_k, top_p, floors, strict=False):
        assert {i for i, value in enumerate(values) if value >= floor} == plain_survivors(values, k, p)


def test_only_survivors_are_drawn_and_all_of_them() -> None:
    logits = torch.arange(20.0) / 4
    assert set(draw(logits, SamplingParams(top_k=4, seed=1), 400)) == {16, 17, 18, 19}
    nucleus = plain_survivors(logits.tolist(), 0, 0.6)
    assert set(draw(logits, SamplingParams(top_p=0.6, seed=1), 400)) == nucleus
    assert set(draw(logits, SamplingParams(top_p=1e-9, seed=1), 50)) == {19}
    assert set(draw(logits, SamplingParams(top_k=1, temperature=2.0), 50)) == {19}


@given(values=st.lists(VALUES, min_size=2, max_size=40), min_p=st.sampled_from([0.013, 0.317, 0.771, 1.0]))
def test_min_p_keeps_what_is_probable_enough_beside_the_best(values: list[float], min_p: float) -> None:
    logits = torch.tensor(values)
    want = {i for i, value in enumerate(values) if math.exp(value - max(values)) >= min_p}
    drawn = set(draw(logits, SamplingParams(min_p=min_p, seed=1), 60))
    assert drawn <= want
    if len(want) == 1:
        assert drawn == want


def test_min_p_counts_after_temperature_and_beside_the_other_filters() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert set(draw(logits, SamplingParams(min_p=0.2, seed=1), 300)) == {0, 1}
    assert set(draw(logits, SamplingParams(min_p=0.2, temperature=2.0, seed=1), 300)) == {0, 1, 2, 3}
    assert set(draw(logits, SamplingParams(min_p=0.01, top_k=2, seed=1), 300)) == {0, 1}
    assert set(draw(logits, SamplingParams(min_p=0.2, top_p=0.999, seed=1), 300)) == {0, 1}


def test_a_nucleus_wider_than_the_first_look_is_found() -> None:
    logits = torch.cat((torch.arange(6000.0) / -6000, torch.full((4000,), -30.0)))
    order = plain_survivors(logits.tolist(), 0, 0.9)
    (floor,) = _floors(logits[None], [0], [0.9]).tolist()
    assert 5000 < len(order) < 6000
    assert {i for i, value in enumerate(logits.tolist()) if value >= floor} == order


def test_blocks_are_drawn_by_their_weight() -> None:
    """Across the two steps: a vocabulary of several blocks, the last one not full, and few likely tokens in each."""
    logits = torch.full((700,), -20.0)
    likely = {3: 1.0, 255: 2.0, 256: 0.5, 511: 1.5, 512: 1.0, 699: 2.0}
    for token_id, logit in likely.items():
        logits[token_id] = logit
    count = 20_000
    drawn = draw(logits, SamplingParams(seed=11), count)
    want = {token_id: count * float(logits.softmax(-1)[token_id]) for token_id in likely}
    assert set(drawn) <= set(likely)
    # Five degrees of freedom: 20.5 is passed once in a thousand.
    assert sum((drawn[i] - n) ** 2 / n for i, n in want.items()) < 20.5


def test_the_largest_of_a_wide_vocabulary_is_the_first_one() -> None:
    logits = torch.zeros(2, 700)
    logits[0, [300, 301, 699]] = 4.0
    logits[1, 699] = 1.0
    tokens = sampler(700).sample(logits, [row(SamplingParams(temperature=0.0))] * 2)
    assert [t.token_id for t in tokens] == [300, 699]


def test_end_tokens_wait_for_min_new_tokens() -> None:
    logits = torch.zeros(1, 8)
    logits[0, [2, 5, 7]] = torch.tensor([9.0, 8.0, 7.0])
    greedy = {"temperature": 0.0, "min_new_tokens": 3}

    def token(output_index: int, **extra: object) -> int:
        params = SamplingParams(**greedy, **extra)
        return sampler(8).sample(logits, [row(params, output_index=output_index)])[0].token_id

    assert [token(i) for i in range(5)] == [7, 7, 7, 2, 2]
    assert token(0, stop_token_ids=(7, 900)) == 0
    assert token(0, ignore_eos=True) == 2
    assert token(0, ignore_eos=True, stop_token_ids=(2,)) == 5


def test_forbidden_ends_are_never_drawn_and_peers_are_not_touched() -> None:
    logits = torch.zeros(2, 8)
    before = logits.clone()
    rows = [row(SamplingParams(min_new_tokens=1, seed=1), rid="held"), row(SamplingParams(seed=1), rid="free")]
    seen: dict[str, set[int]] = {"held": set(), "free": set()}
    for position in range(300):
        at = [SamplingRow(rid=r.rid, row=0, position=position, output_index=0, params=r.params) for r in rows]
        for token in sampler(8).sample(logits, at):
            seen[token.rid].add(token.token_id)
    assert seen == {"held": {0, 1, 3, 4, 6, 7}, "free": set(range(8))}
    assert torch.equal(logits, before)


@given(seed=st.integers(0, 200), wanted=st.integers(0, 5), temperature=st.sampled_from([0.0, 0.6, 1.8]))
@settings(max_examples=40)
def test_logprobs_are_of_the_raw_logits(seed: int, wanted: int, temperature: float) -> None:
    """Whatever temperature, filter or forbidden end the row has."""
    logits = random_logits(3, seed=seed)
    asking = SamplingParams(temperature=temperature, top_k=3, logprobs=wanted, seed=seed, min_new_tokens=5)
    tokens = sampler().sample(logits, [row(SamplingParams()), row(asking), row(SamplingParams(logprobs=1))])
    assert tokens[0].logprobs is None
    got, want = tokens[1].logprobs, logits[1].double().log_softmax(-1)
    assert got is not None
    assert got.token_id == tokens[1].token_id
    assert got.logprob == pytest.approx(want[got.token_id].item(), abs=1e-5)
    assert len(got.top) == wanted
    assert [p for _, p in got.top] == pytest.approx(want.topk(wanted).values.tolist(), abs=1e-5)
    assert all(p == pytest.approx(want[i].item(), abs=1e-5) for i, p in got.top)


def test_more_logprobs_than_tokens_gives_all() -> None:
    (token,) = sampler(4).sample(torch.zeros(1, 4), [row(SamplingParams(logprobs=20))])
    assert token.logprobs is not None
    assert len(token.logprobs.top) == 4


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=1)])
def test_logits_that_are_not_finite_are_refused_by_request(bad: float, params: SamplingParams) -> None:
    logits = random_logits(3)
    logits[1, 40] = bad
    rows = [row(params, rid=rid, position=33) for rid in ("a", "b", "c")]
    with pytest.raises(NonFiniteLogits, match="request b, position 33"):
        sampler().sample(logits, rows)


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    logits = random_logits(2).bfloat16()
    rows = [row(SamplingParams(seed=4, logprobs=1)), row(SamplingParams(temperature=0.0))]
    same = sampler().sample(logits.float(), rows)
    assert sampler().sample(logits, rows) == same
