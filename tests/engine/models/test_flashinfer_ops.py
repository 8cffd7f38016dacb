"""The two tables of small operators: FlashInfer's by its contract, torch's beside it, and whole models with either."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.cpu import CpuBackend
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import TorchExecutor
from engine.models.flashinfer_ops import FlashInferOps
from engine.models.linear import Linear
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig, RopeScaling
from engine.models.ops import HeadNorms, MakeOps, Ops, TorchOps
from engine.models.rope import cos_sin_cache, rope_tables
from engine.models.weights import LlamaWeights
from tests.engine.attention.late_device import LateDevice, PoisonRead, poison
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.tiny import CONFIG, tiny_weights

HEADS, KV_HEADS, DIM = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
WIDTH = (HEADS + 2 * KV_HEADS) * DIM
TURNED = (HEADS + KV_HEADS) * DIM
BF16 = torch.bfloat16
SCALINGS = {
    "none": None,
    "linear": RopeScaling("linear", 4.0),
    "llama3": RopeScaling("llama3", 8.0, original_context=64),
    "yarn": RopeScaling("yarn", 4.0, original_context=64, magnitude=1.14),
    "factors": RopeScaling("factors", 2.0, factors=(1.0, 1.5, 2.0, 4.0)),
}


def flashinfer_ops(
    *, config: LlamaConfig = CONFIG, dtype: torch.dtype = BF16, device: LateDevice | None = None, positions: int = 64
) -> tuple[FlashInferOps, ShapedFlashInfer]:
    """FlashInfer's table over its shape; on a device that works at once where none is given."""
    module = ShapedFlashInfer(device or LateDevice(late=False))
    ops = FlashInferOps(config, torch.empty(0, dtype=dtype), kernels=module)
    ops.reserve_positions(positions)
    return ops, module


def torch_ops(dtype: torch.dtype = BF16) -> TorchOps:
    ops = TorchOps(CONFIG, torch.empty(0, dtype=dtype))
    ops.reserve_positions(64)
    return ops


def drawn(*size: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norms_of(dtype: torch.dtype = BF16) -> HeadNorms:
    q, k = 1 + drawn(DIM, dtype=dtype, seed=1), 1 + drawn(DIM, dtype=dtype, seed=2)
    return HeadNorms(q, k, torch.cat((q.expand(HEADS, -1), k.expand(KV_HEADS, -1))))


def is_rounded_once(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Is every element of `got`, in bfloat16, the nearest to `want` (float64), but for sums in float32."""
    return bool(((got.double() - want).abs() <= 2**-8 * want.abs() + 1e-5).all())


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps) * weight.double()


def test_a_norm_is_rounded_once_and_reads_only() -> None:
    ops, _ = flashinfer_ops()
    x, weight = drawn(9, CONFIG.hidden_size), 1 + drawn(CONFIG.hidden_size, seed=1)
    before = x.clone()
    got = ops.rms_norm(x, weight)
    assert is_rounded_once(got, exact_norm(x.double(), weight))
    assert torch.equal(x, before)


def test_a_residual_is_added_in_place_and_its_norm_is_of_the_sum_before_rounding() -> None:
    ops, module = flashinfer_ops()
    hidden, x = drawn(9, CONFIG.hidden_size) * 8, drawn(9, CONFIG.hidden_size, seed=1)
    weight = 1 + drawn(CONFIG.hidden_size, seed=2)
    product = Linear(drawn(CONFIG.hidden_size, CONFIG.hidden_size, seed=3), drawn(CONFIG.hidden_size, seed=4))
    total = hidden.double() + product(x).double()
    got, normed = ops.add_norm(hidden, product, x, weight)
    assert got is hidden
    assert is_rounded_once(hidden, total)
    assert is_rounded_once(normed, exact_norm(total, weight))
    assert not torch.equal(normed, ops.rms_norm(hidden, weight)), "of the rounded sum"
    assert normed is module.named("fused_add_rmsnorm")[0]["input"]


def test_heads_are_turned_in_place_by_the_table_and_v_keeps_its_bits() -> None:
    ops, module = flashinfer_ops()
    qkv, positions = drawn(5, WIDTH), torch.tensor([0, 63, 7, 7, 1])
    before = qkv.clone()
    q, k = ops.turned(qkv, None, ops.angles(positions))
    assert torch.equal(qkv[:, TURNED:], before[:, TURNED:])
    assert torch.equal(torch.cat((q, k), 1).flatten(1), qkv[:, :TURNED]), "views of the same rows"
    cos, sin = rope_tables(CONFIG, 64, torch.float64)
    heads = before[:, :TURNED].double().view(5, -1, DIM)
    want = heads * cos[positions] + heads.roll(DIM // 2, -1) * sin[positions]
    assert is_rounded_once(torch.cat((q, k), 1), want)
    (call,) = module.named("apply_rope_with_cos_sin_cache_inplace")
    assert call["cos_sin_cache"].dtype is torch.float32
    assert call["positions"] is positions


def test_each_kind_of_heads_is_normalised_by_its_own_weight_before_it_is_turned() -> None:
    ops, module = flashinfer_ops()
    qkv, norms = drawn(5, WIDTH), norms_of()
    before = qkv.clone()
    q, k = ops.turned(qkv, norms, ops.angles(torch.zeros(5, dtype=torch.int64)))
    heads = before.double().view(5, -1, DIM)
    assert is_rounded_once(q, exact_norm(heads[:, :HEADS], norms.q))
    assert is_rounded_once(k, exact_norm(heads[:, HEADS : HEADS + KV_HEADS], norms.k))
    assert torch.equal(qkv, before)
    assert [call["input"].shape[1] for call in module.named("rmsnorm")] == [HEADS, KV_HEADS]


def test_the_activation_is_rounded_once_gate_first() -> None:
    ops, _ = flashinfer_ops()
    gate_up = drawn(9, 2 * CONFIG.intermediate_size) * 3
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert is_rounded_once(ops.silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up)


def answers(ops: Ops, dtype: torch.dtype) -> list[torch.Tensor]:
    """What a table makes of the same rows."""
    hidden, x = drawn(7, CONFIG.hidden_size, dtype=dtype), drawn(7, CONFIG.hidden_size, dtype=dtype, seed=1)
    weight = 1 + drawn(CONFIG.hidden_size, dtype=dtype, seed=2)
    product = Linear(drawn(CONFIG.hidden_size, CONFIG.hidden_size, dtype=dtype, seed=3))
    angles = ops.angles(torch.arange(7) * 9)
    return [
        ops.rms_norm(hidden, weight),
        *ops.add_norm(hidden.clone(), product, x, weight),
        *ops.turned(drawn(7, WIDTH, dtype=dtype, seed=4), None, angles),
        *ops.turned(drawn(7, WIDTH, dtype=dtype, seed=5), norms_of(dtype), angles),
        ops.silu_and_mul(drawn(7, 2 * CONFIG.intermediate_size, dtype=dtype, seed=6)),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_the_tables_differ_by_rounding_only(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    pairs = zip(answers(flashinfer_ops(dtype=dtype)[0], dtype), answers(torch_ops(dtype), dtype), strict=True)
    for got, want in pairs:
        assert got.dtype is want.dtype is dtype
        torch.testing.assert_close(got, want, rtol=2 * step, atol=4 * step)


@pytest.mark.parametrize("name", SCALINGS)
def test_flashinfers_table_has_the_angles_of_torchs(name: str) -> None:
    config = dataclasses.replace(CONFIG, rope_scaling=SCALINGS[name])
    table = cos_sin_cache(config, 50)
    cos, sin = rope_tables(config, 50, torch.float32)
    assert table.shape == (50, DIM)
    assert torch.equal(table[:, : DIM // 2], cos[:, 0, : DIM // 2])
    assert torch.equal(table[:, DIM // 2 :], sin[:, 0, DIM // 2 :])


@pytest.mark.parametrize("make_ops", [TorchOps, partial(FlashInferOps, kernels=ShapedFlashInfer(LateDevice()))])
def test_tables_of_positions_only_grow_and_those_that_were_replaced_stay(make_ops: MakeOps) -> None:
    ops: Any = make_ops(CONFIG, torch.empty(0, dtype=BF16))
    ops.reserve_positions(10)
    first = ops.angles(torch.arange(10))
    memory = [weakref.ref(table) for table in ops._tables.now]
    ops.reserve_positions(9)
    assert all(ref() is table for ref, table in zip(memory, ops._tables.now, strict=True))
    ops.reserve_positions(30)
    assert len(ops._tables.now[0]) == 30
    assert all(torch.equal(old[:10], new[:10]) for old, new in zip(first, ops.angles(torch.arange(10)), strict=True))
    del first
    gc.collect()
    assert all(ref() is not None for ref in memory), "a graph captured before reads them where they lie"


def test_a_captured_layer_answers_for_what_lies_in_its_inputs_when_it_is_replayed() -> None:
    device = LateDevice(late=False)
    ops, _ = flashinfer_ops(device=device)
    hidden, weight = drawn(3, CONFIG.hidden_size), 1 + drawn(CONFIG.hidden_size, seed=1)
    qkv = Linear(drawn(WIDTH, CONFIG.hidden_size, seed=2))
    out = Linear(drawn(CONFIG.hidden_size, HEADS * DIM, seed=3))
    positions, norms = torch.tensor([1, 2, 3]), norms_of()

    def layer() -> list[torch.Tensor]:
        # The stream is written over: as in a model, where an embedding makes it anew each time.
        stream = hidden.clone()
        q, k = ops.turned(qkv(ops.rms_norm(stream, weight)), norms, ops.angles(positions))
        return [k, *ops.add_norm(stream, out, q.flatten(1), weight)]

    made: list[torch.Tensor] = []

    def work() -> None:
        made[:] = layer()

    graph = device.capture(work)
    captured = list(made)
    for step in range(3):
        hidden.copy_(drawn(3, CONFIG.hidden_size, seed=10 + step))
        positions.copy_(torch.tensor([40, 5, 20]) + step)
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(captured, layer(), strict=True))


def test_positions_that_the_host_wrote_over_too_early_are_seen() -> None:
    device = LateDevice()
    ops, _ = flashinfer_ops(device=device)
    positions = torch.tensor([0, poison(torch.int64)])
    ops.turned(drawn(2, WIDTH), None, ops.angles(positions))
    with pytest.raises(PoisonRead):
        device.synchronize()


def test_the_double_refuses_what_the_kernels_would_misread() -> None:
    ops, _ = flashinfer_ops()
    x, weight = drawn(2, CONFIG.hidden_size), drawn(CONFIG.hidden_size)
    with pytest.raises(AssertionError, match=r"no kernel of rmsnorm takes torch.float32"):
        ops.rms_norm(x.float(), weight.float())
    with pytest.raises(AssertionError, match="as if it were of the input's type"):
        ops.rms_norm(x, weight.float())
    with pytest.raises(TypeError, match="made_up"):
        ops._module.rmsnorm(x, weight, made_up=1)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"biases": True},
    "head norms": {"head_norms": True},
    "windows": {"windows": (5, 0)},
    **{f"RoPE {name}": {"rope_scaling": scaling} for name, scaling in SCALINGS.items() if scaling is not None},
    "everything": {"biases": True, "head_norms": True, "rope_scaling": SCALINGS["yarn"], "windows": (0, 6)},
}


def weights_and_config(
    *, dtype: torch.dtype, biases: bool = False, head_norms: bool = False, **facts: Any
) -> tuple[LlamaConfig, LlamaWeights]:
    """The same numbers, those of bfloat16, in any type."""
    config = dataclasses.replace(CONFIG, **facts)
    weights = tiny_weights(config, dtype=BF16)
    for number, layer in enumerate(weights.layers):
        if biases:
            for name in ("qkv", "attention_out", "gate_up", "down"):
                setattr(layer, f"{name}_bias", drawn(len(getattr(layer, name)), seed=number) * 0.3)
        if head_norms:
            layer.q_norm, layer.k_norm = 1 + drawn(DIM, seed=number) * 0.3, 1 + drawn(DIM, seed=9 + number) * 0.3
    is_tied = weights.lm_head is weights.embedding
    weights.embedding, weights.final_norm = weights.embedding.to(dtype), weights.final_norm.to(dtype)
    weights.lm_head = weights.embedding if is_tied else weights.lm_head.to(dtype)
    for layer in weights.layers:
        for field in dataclasses.fields(layer):
            if (tensor := getattr(layer, field.name)) is not None:
                setattr(layer, field.name, tensor.to(dtype))
    return config, weights


def executor_of(make_ops: MakeOps, dtype: torch.dtype, variant: dict[str, Any]) -> TorchExecutor:
    config, weights = weights_and_config(dtype=dtype, **variant)
    return TorchExecutor(
        LlamaModel(config, weights, make_ops=make_ops),
        name="tiny",
        page_size=16,
        num_pages=32,
        attention=CpuBackend(dtype=dtype, windows=config.windows),
        secret=b"fixed for tests",
    )


def shaped_ops(*types: torch.dtype) -> MakeOps:
    return partial(FlashInferOps, kernels=ShapedFlashInfer(LateDevice(late=False), operator_types=types))


PROMPTS = [np.random.default_rng(i).integers(0, CONFIG.vocab_size, length).tolist() for i, length in enumerate((33, 7))]


def logits_of(executor: TorchExecutor, *, cut: int = 1000, every: bool = True) -> torch.Tensor:
    """Logits behind the prompts, computed in pieces of at most `cut` tokens; of all last rows, or of those asked."""
    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    while any(s.missing_len > 1 for s in sequences):
        driver.step([(s, min(cut, s.missing_len - 1)) for s in sequences if s.missing_len > 1])
    batch = driver.batch([(s, 1) for s in sequences])
    return executor.forward(batch, rows=[0, 1] if every else [1])


def every_row(executor: TorchExecutor) -> torch.Tensor:
    """Logits behind every token of the prompts."""
    driver = ManualDriver(executor)
    batch = driver.batch([(driver.add(f"r{i}", prompt), len(prompt)) for i, prompt in enumerate(PROMPTS)])
    return executor.forward(batch, rows=list(range(batch.metadata.num_rows)))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_with_flashinfers_table_answers_as_with_torchs(name: str) -> None:
    """In float32, where neither rounds: any difference but one of sums would be another arithmetic."""
    want = logits_of(executor_of(TorchOps, torch.float32, VARIANTS[name]))
    executor = executor_of(shaped_ops(torch.float32), torch.float32, VARIANTS[name])
    torch.testing.assert_close(logits_of(executor), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(executor, cut=5), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(executor, every=False), want[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
def test_in_bfloat16_it_is_as_near_to_float32_as_torchs_is(name: str) -> None:
    want = every_row(executor_of(TorchOps, torch.float32, VARIANTS[name]))
    errors = [
        float((every_row(executor_of(make_ops, BF16, VARIANTS[name])).float() - want).square().mean().sqrt())
        for make_ops in (shaped_ops(BF16), TorchOps)
    ]
    assert errors[0] <= 1.1 * errors[1]
    assert errors[1] <= 0.05 * float(want.square().mean().sqrt()), "both are near it"


def test_a_layer_is_four_calls_and_two_more_with_head_norms() -> None:
    for variant, of_each in (("plain", 0), ("head norms", 2)):
        module = ShapedFlashInfer(LateDevice(late=False))
        executor = executor_of(partial(FlashInferOps, kernels=module), BF16, VARIANTS[variant])
        driver = ManualDriver(executor)
        driver.step([(sequence := driver.add("r", PROMPTS[0]), sequence.missing_len)])
        layers = CONFIG.num_layers
        assert len(module.named("fused_add_rmsnorm")) == 2 * layers
        assert len(module.named("apply_rope_with_cos_sin_cache_inplace")) == len(module.named("silu_and_mul")) == layers
        assert len(module.named("rmsnorm")) == 1 + of_each * layers
        assert len({id(call["cos_sin_cache"]) for call in module.named("apply_rope_with_cos_sin_cache_inplace")}) == 1


def test_what_computes_is_said() -> None:
    assert executor_of(TorchOps, BF16, {}).info().kernels == "torch's kernels"
    said = executor_of(shaped_ops(BF16), BF16, {}).info().kernels
    assert said == "torch's products, FlashInfer's norms, RoPE and activation"
