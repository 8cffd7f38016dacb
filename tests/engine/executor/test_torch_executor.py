"""TorchExecutor: how a request is cut into steps, what rides along and which pages it gets never changes its numbers.

All K/V memory is NaN until written, so a slot that is read too early shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.metadata import MetadataError
from engine.attention.torch_reference import TorchReferenceBackend
from engine.executor.base import ForwardBatch, SamplingRow
from engine.executor.manual import GREEDY, ManualDriver
from engine.executor.sampler import NonFiniteLogits
from engine.executor.torch_executor import BatchError, TorchExecutor
from engine.sampling_params import SamplingParams
from tests.engine.executor.tiny import CONFIG, tiny_executor

PAGES = pytest.mark.parametrize("page", [1, 16])
SEEDED = SamplingParams(max_new_tokens=64, temperature=0.9, top_p=0.95, seed=1234, ignore_eos=True)
PENALISED = SamplingParams(
    max_new_tokens=64,
    temperature=0.0,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((7, 1.5), (300, -100.0)),
    ignore_eos=True,
)
ALL_AT_ONCE = msgspec.structs.replace(PENALISED, temperature=0.8, min_p=0.05, top_k=40, top_p=0.9, seed=77)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


def last_logits(executor: TorchExecutor, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits of the last token of `tokens`, prefilled in pieces of the given lengths. [vocab]"""
    driver = ManualDriver(executor)
    sequence = driver.add("r", tokens)
    for cut in cuts[:-1]:
        driver.step([(sequence, cut)])
    return executor.forward(driver.batch([(sequence, cuts[-1])]), rows=[cuts[-1] - 1])[0]


def whole_logits(tokens: list[int], **settings: object) -> torch.Tensor:
    """[len(tokens), vocab] from one prefill with the readable backend in float64 arithmetic."""
    executor = tiny_executor(attention=TorchReferenceBackend(compute_dtype=torch.float64), **settings)
    driver = ManualDriver(executor)
    sequence = driver.add("r", tokens)
    return executor.forward(driver.batch([(sequence, len(tokens))]), rows=list(range(len(tokens))))


@PAGES
def test_fr_08_a_chunked_prompt_never_reads_slots_that_are_not_written_yet(page: int) -> None:
    """FR-08: prompt of 100, pieces of 32, all free slots poisoned; first-token logits equal the unchunked run's."""
    tokens = prompt(100)
    chunked = last_logits(tiny_executor(page_size=page, num_pages=128), tokens, [32, 32, 32, 4])
    whole = last_logits(tiny_executor(page_size=page, num_pages=128), tokens, [100])
    assert torch.isfinite(chunked).all()
    assert torch.allclose(chunked, whole, atol=1e-4)
    assert torch.allclose(whole, whole_logits(tokens)[-1], atol=1e-4)


def test_the_poison_would_be_seen() -> None:
    """Sabotage of the test above: an attention length of the whole prompt in the first piece reads NaN."""
    executor = tiny_executor()
    driver = ManualDriver(executor)
    sequence = driver.add("r", prompt(100))
    first_piece = driver.batch([(sequence, 20)])
    meta = first_piece.metadata
    too_long = dataclasses.replace(
        meta,
        last_page_len=np.array([16], dtype=np.int32),
        positions=meta.positions + 12,
        out_slots=meta.out_slots + 12,
    )
    row = SamplingRow(rid="r", row=19, position=20, output_index=0, params=GREEDY)
    with pytest.raises(NonFiniteLogits, match=r"request r, position 20: the best logit is nan"):
        executor.execute(dataclasses.replace(first_piece, metadata=too_long, sampling=(row,)))


@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6), page=st.sampled_from([1, 4, 16]))
@settings(max_examples=25)
def test_fr_08_any_cutting_of_a_prompt_gives_the_same_first_token(cuts: list[int], page: int) -> None:
    tokens = prompt(sum(cuts), seed=sum(cuts))
    executor = tiny_executor(page_size=page, num_pages=256)
    got = last_logits(executor, tokens, cuts)
    assert torch.allclose(got, whole_logits(tokens, num_pages=256)[-1], atol=1e-4)


@PAGES
@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, PENALISED, ALL_AT_ONCE], ids=["greedy", "seeded", "penalised", "all at once"]
)
def test_mixed_steps_equal_separate_steps(page: int, params: SamplingParams) -> None:
    """Decodes that ride with the pieces of a long prompt, and that prompt, all answer as if alone."""

    def alone(seed: int, length: int) -> list[int]:
        driver = ManualDriver(tiny_executor(page_size=page, num_pages=400))
        sequence = driver.add(f"r{seed}", prompt(length, seed), params)
        driver.generate([sequence], 12)
        return sequence.outputs

    order = np.random.default_rng(7).permutation(400).tolist()
    driver = ManualDriver(tiny_executor(page_size=page, num_pages=400), page_order=order)
    decoding = [driver.add(f"r{i}", prompt(10 + 9 * i, i), params) for i in range(3)]
    driver.step([(s, s.missing_len) for s in decoding])
    late = driver.add("r9", prompt(90, 9), params)
    while late.missing_len > 1:
        driver.step([(late, min(40, late.missing_len)), *((s, 1) for s in decoding)])
    driver.generate([*decoding, late], 12)
    for i, sequence in enumerate(decoding):
        assert sequence.outputs[:12] == alone(i, 10 + 9 * i)
    assert late.outputs == alone(9, 90)


@PAGES
def test_a_cached_prefix_equals_a_cold_start(page: int) -> None:
    common, executor = prompt(48, 1), tiny_executor(page_size=page, num_pages=300)
    driver = ManualDriver(executor)
    first = driver.add("first", common + prompt(5, 2))
    driver.generate([first], 6)
    warm = driver.add("warm", common + prompt(9, 3), cached=first, cached_pages=48 // page)
    assert warm.computed_len == 48
    driver.generate([warm, first], 12)
    cold_driver = ManualDriver(tiny_executor(page_size=page, num_pages=300))
    cold = cold_driver.add("cold", common + prompt(9, 3))
    cold_driver.generate([cold], 12)
    assert warm.outputs == cold.outputs


@pytest.mark.parametrize("params", [SEEDED, PENALISED, ALL_AT_ONCE], ids=["seeded", "penalised", "all at once"])
def test_a_request_recomputed_after_a_retraction_goes_on_with_the_same_tokens(params: SamplingParams) -> None:
    """Prompt and outputs prefilled anew, elsewhere in the pool, with the seed's noise at the same positions."""
    driver = ManualDriver(tiny_executor())
    straight = driver.add("r", prompt(30), params)
    driver.generate([straight], 16)
    interrupted = driver.add("r", prompt(30), params)
    driver.generate([interrupted], 7)
    driver.release(interrupted)
    interrupted.computed_len = 0
    driver.generate([interrupted], 16)
    assert interrupted.outputs == straight.outputs


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    def tokens_with(peers: int, *, place: int) -> list[int]:
        driver = ManualDriver(tiny_executor(num_pages=200, secret=bytes([peers] * 8)))
        others = [driver.add(f"p{i}", prompt(5 + i, 50 + i), SamplingParams(temperature=1.3)) for i in range(peers)]
        mine = driver.add(f"mine-{peers}", prompt(20), SEEDED)
        driver.generate([*others[:place], mine, *others[place:]], 20)
        return mine.outputs

    alone = tokens_with(0, place=0)
    assert tokens_with(5, place=0) == tokens_with(5, place=3) == tokens_with(11, place=11) == alone
    assert len(set(alone)) > 3


def test_fr_26_logprobs_in_mixed_steps_are_those_of_the_request_alone() -> None:
    asking = SamplingParams(max_new_tokens=9, temperature=0.8, seed=5, logprobs=3, ignore_eos=True)
    driver = ManualDriver(tiny_executor(num_pages=200))
    decoding = [driver.add(f"d{i}", prompt(12 + i, i), asking if i != 1 else GREEDY) for i in range(3)]
    driver.step([(s, s.missing_len) for s in decoding])
    late = driver.add("late", prompt(50, 8), asking)
    driver.step([(late, 20), *((s, 1) for s in decoding)])
    driver.step([(late, 30), *((s, 1) for s in decoding)])
    driver.step([(s, 1) for s in (*decoding, late)])
    assert all(token.logprobs is None for token in decoding[1].sampled)
    for sequence in (decoding[0], decoding[2], late):
        # Row p of a prefill of everything predicts token p + 1.
        whole = whole_logits(sequence.tokens[:-1]).log_softmax(-1)
        assert len(sequence.sampled) == len(sequence.outputs) > 1
        for index, token in enumerate(sequence.sampled):
            want = whole[sequence.prompt_len + index - 1]
            best = want.topk(3)
            assert token.logprobs is not None
            assert token.logprobs.token_id == token.token_id
            assert token.logprobs.logprob == pytest.approx(want[token.token_id].item(), abs=1e-4)
            assert [i for i, _ in token.logprobs.top] == best.indices.tolist()
            assert [p for _, p in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_pages_outside_the_batch_are_not_touched() -> None:
    executor = tiny_executor(poison=False, num_pages=12)
    executor.kv_cache.copy_(torch.randn(executor.kv_cache.shape))
    before = executor.kv_cache.clone()
    driver = ManualDriver(executor, page_order=[7, 2, 9])
    driver.generate([driver.add("r", prompt(20))], 6)
    untouched = [p for p in range(12) if p not in {7, 2}]
    assert torch.equal(executor.kv_cache[:, :, untouched], before[:, :, untouched])
    written = executor.kv_cache[:, :, 2, : (20 + 5) % 16]
    assert (written != before[:, :, 2, : (20 + 5) % 16]).all()
    assert torch.equal(executor.kv_cache[:, :, 2, 25 % 16 :], before[:, :, 2, 25 % 16 :])


def test_a_middle_piece_samples_nothing_and_the_last_one_token() -> None:
    executor = tiny_executor()
    driver = ManualDriver(executor)
    sequence = driver.add("r", prompt(40))
    assert executor.execute(driver.batch([(sequence, 30)])).tokens == ()
    assert executor.forward(driver.batch([(sequence, 30)]), rows=[]).shape == (0, CONFIG.vocab_size)
    sequence.computed_len = 30
    result = executor.execute(driver.batch([(sequence, 10)]))
    assert [token.rid for token in result.tokens] == ["r"]


def test_results_come_in_sampling_order() -> None:
    driver = ManualDriver(tiny_executor())
    sequences = [driver.add(f"r{i}", prompt(4 + i, i)) for i in range(5)]
    batch = driver.batch([(s, s.missing_len) for s in sequences])
    forward = driver.executor.execute(batch)
    backward = driver.executor.execute(dataclasses.replace(batch, step=3, sampling=batch.sampling[::-1]))
    assert forward.tokens == backward.tokens[::-1]
    assert backward.step == 3


def test_bfloat16_stays_near_float32() -> None:
    tokens = prompt(60)
    coarse = last_logits(tiny_executor(dtype=torch.bfloat16), tokens, [33, 27]).float()
    exact = whole_logits(tokens)[-1]
    assert (coarse - exact).norm() / exact.norm() < 0.05


def test_the_cache_starts_as_zeros_in_the_agreed_layout() -> None:
    executor = tiny_executor(poison=False, num_pages=10, page_size=4)
    assert executor.kv_cache.shape == (CONFIG.num_layers, 2, 10, 4, CONFIG.num_kv_heads, CONFIG.head_dim)
    assert not executor.kv_cache.any()


def test_info_states_the_facts() -> None:
    info = tiny_executor(max_context_tokens=100).info()
    assert dataclasses.asdict(info) == {
        "model": "tiny", "vocab_size": 320, "max_context_tokens": 100, "page_size": 16, "num_pages": 64,
        "attention_backend": "cpu", "device": "cpu", "dtype": "float32", "eos_token_ids": (2, 9),
        "kernels": "torch's kernels",
    }  # fmt: skip
    assert tiny_executor().info().max_context_tokens == 400


def test_read_only_arrays_are_accepted() -> None:
    driver = ManualDriver(tiny_executor())
    batch = driver.batch([(driver.add("r", prompt(5)), 5)])
    for array in (batch.token_ids, batch.metadata.out_slots, batch.metadata.positions, batch.metadata.kv_indices):
        array.flags.writeable = False
    assert len(driver.executor.execute(batch).tokens) == 1


def with_tokens(value: int) -> Callable[[ForwardBatch], ForwardBatch]:
    return lambda b: dataclasses.replace(b, token_ids=np.full_like(b.token_ids, value))


def with_row(row: int) -> Callable[[ForwardBatch], ForwardBatch]:
    return lambda b: dataclasses.replace(b, sampling=(msgspec.structs.replace(b.sampling[0], row=row),))


BAD_BATCHES: dict[str, tuple[Callable[[ForwardBatch], ForwardBatch], str]] = {
    "token too large": (with_tokens(320), r"token_ids spans 320 to 320; the vocabulary has ids 0 to 319"),
    "token negative": (with_tokens(-1), r"token_ids spans -1 to -1"),
    "token missing": (lambda b: dataclasses.replace(b, token_ids=b.token_ids[1:]), r"token_ids has 119 entries"),
    "row outside": (with_row(120), r"sampling rows span 120 to 120; the batch has 120 rows"),
    "row negative": (with_row(-1), r"sampling rows span -1 to -1"),
    "other page size": (
        lambda b: dataclasses.replace(b, metadata=dataclasses.replace(b.metadata, page_size=8)),
        r"metadata.page_size is 8; this executor has pages of 16",
    ),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches_are_refused_before_anything_is_written(case: str) -> None:
    change, message = BAD_BATCHES[case]
    executor = tiny_executor()
    driver = ManualDriver(executor)
    batch = driver.batch([(driver.add("r", prompt(120)), 120)])
    with pytest.raises(BatchError, match=message):
        executor.execute(change(batch))
    assert executor.kv_cache.isnan().all()


def test_positions_beyond_the_context_and_broken_metadata_are_refused() -> None:
    executor = tiny_executor(max_context_tokens=30)
    driver = ManualDriver(executor)
    sequence = driver.add("r", prompt(31))
    with pytest.raises(BatchError, match=r"position 30 is beyond the context of 30 tokens"):
        executor.execute(driver.batch([(sequence, 31)]))
    batch = driver.batch([(sequence, 20)])
    batch.metadata.kv_indices[0] = 64
    with pytest.raises(MetadataError, match=r"is page 64; the pool has pages 0 to 63"):
        executor.execute(batch)


def test_close_gives_the_memory_back() -> None:
    executor = tiny_executor()
    executor.close()
    assert executor.kv_cache.numel() == 0
