"""The decoder in C against the one in torch, on tiny random weights: whole, in pieces, with all parts models have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.attention.cpu import CpuBackend
from engine.attention.native import NativeBackend
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import TorchExecutor
from engine.models.decoder import Decoder, LayerCache
from engine.models.llama import LlamaModel
from engine.models.llama_config import LlamaConfig
from engine.models.native_llama import NativeLlama, misfit
from engine.models.quantized import Quantization
from engine.models.weights import LlamaWeights
from tests.engine.executor.tiny import CONFIG, tiny_weights
from tests.engine.native.libraries import DTYPE, EACH, Kernels, library

#: As tiny as the kernels take it.
SMALL = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=32)
PIECES = [[37], [16, 21], [1, 1, 33, 2]]
#: Shares of the logits that may be lost against float32 in torch; in int8 half a step may be rounded the other way.
ROOM = {
    (torch.bfloat16, "none"): 0.03,
    (torch.bfloat16, "int8"): 0.03,
    (torch.float32, "none"): 1e-5,
    (torch.float32, "int8"): 1e-3,
}


def weights_of(config: LlamaConfig, dtype: torch.dtype = torch.bfloat16) -> LlamaWeights:
    """The same numbers in any type: those that bfloat16 holds. Biases and head norms where `config` has them."""
    weights = tiny_weights(config, seed=3)
    generator = torch.Generator().manual_seed(4)

    def vector(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator) * 0.3

    for layer in weights.layers:
        # Small enough for values to stay near 1 through the layers.
        for name in ("qkv", "attention_out", "gate_up", "down"):
            setattr(layer, name, getattr(layer, name) * 0.3)
        if config.qkv_bias:
            layer.qkv_bias = vector(len(layer.qkv))
            layer.attention_out_bias = vector(len(layer.attention_out))
        if config.mlp_bias:
            layer.gate_up_bias, layer.down_bias = vector(len(layer.gate_up)), vector(len(layer.down))
        if config.qk_norm:
            layer.q_norm, layer.k_norm = 1 + vector(config.head_dim), 1 + vector(config.head_dim)
        for field in dataclasses.fields(layer):
            if (tensor := getattr(layer, field.name)) is not None:
                setattr(layer, field.name, tensor.bfloat16().to(dtype))
    table = weights.embedding.bfloat16().to(dtype)
    return dataclasses.replace(
        weights, embedding=table, lm_head=table, final_norm=weights.final_norm.bfloat16().to(dtype)
    )


def native(
    config: LlamaConfig,
    *,
    kernels: Kernels | None = None,
    quantization: Quantization = "none",
    page_size: int = 16,
    num_pages: int = 64,
) -> TorchExecutor:
    compiled = library(kernels)
    model: Decoder = NativeLlama(config, weights_of(config, compiled.dtype), compiled, quantization=quantization)
    attention = NativeBackend(compiled, windows=config.windows)
    return TorchExecutor(model, name="tiny", page_size=page_size, num_pages=num_pages, attention=attention)


def exact(config: LlamaConfig, quantization: Quantization = "none") -> TorchExecutor:
    """The same weights in float32, activations too."""
    model = LlamaModel(config, weights_of(config, torch.float32), quantization=quantization)
    return TorchExecutor(model, name="tiny", page_size=16, num_pages=64, attention=CpuBackend(windows=config.windows))


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(10, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def last_logits(executor: TorchExecutor, tokens: list[int], pieces: list[int]) -> torch.Tensor:
    """Logits of the last token, after the prompt was computed in `pieces`."""
    driver = ManualDriver(executor)
    sequence = driver.add("r", tokens)
    for piece in pieces[:-1]:
        driver.step([(sequence, piece)])
    return executor.forward(driver.batch([(sequence, pieces[-1])]), rows=[pieces[-1] - 1])[0]


VARIANTS = {
    "llama": SMALL,
    "biases": dataclasses.replace(SMALL, qkv_bias=True, attention_out_bias=True, mlp_bias=True),
    "head norms": dataclasses.replace(SMALL, qk_norm=True),
    "windows": dataclasses.replace(SMALL, windows=(9, 0)),
    "all heads their own": dataclasses.replace(SMALL, num_kv_heads=4),
    "heads wider than hidden": dataclasses.replace(SMALL, head_dim=64),
}


@EACH
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_near_those_of_float32(kernels: Kernels, quantization: Quantization, variant: str) -> None:
    config = VARIANTS[variant]
    for pieces in PIECES:
        want = last_logits(exact(config, quantization), prompt(37), pieces)
        got = last_logits(native(config, kernels=kernels, quantization=quantization), prompt(37), pieces)
        assert got.dtype is torch.float32
        assert float((got - want).norm() / want.norm()) < ROOM[DTYPE[kernels], quantization]


@EACH
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_request_is_the_same_bits_alone_and_in_company(kernels: Kernels, quantization: Quantization) -> None:
    prompts = [prompt(n, seed=n) for n in (5, 16, 40, 61)]

    def logits(company: list[list[int]]) -> list[torch.Tensor]:
        """Of the last prompt token and of two decode steps, for the first of `company`."""
        driver = ManualDriver(native(SMALL, kernels=kernels, quantization=quantization))
        sequences = [driver.add(f"r{i}", tokens) for i, tokens in enumerate(company)]
        found = []
        for _ in range(3):
            work = [(sequence, sequence.missing_len) for sequence in sequences]
            found.append(driver.executor.forward(driver.batch(work), rows=[work[0][1] - 1])[0])
            driver.step(work)
        return found

    for i, tokens in enumerate(prompts):
        others = prompts[:i] + prompts[i + 1 :]
        for one, other in zip(logits([tokens]), logits([tokens, *others]), strict=True):
            assert torch.equal(one, other)


@EACH
@pytest.mark.parametrize("variant", ["llama", "head norms", "windows"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_prompt_has_the_same_bits_in_any_pieces_and_as_decode_rows(
    kernels: Kernels, quantization: Quantization, variant: str
) -> None:
    """Logits and K/V: what a request is after a retraction, a cached prefix or other chunks is what it was."""
    config, found = VARIANTS[variant], []
    for pieces in ([150], [1] * 150, [16, 134], [149, 1], [64, 64, 22], [3, 1, 1, 100, 45]):
        executor = native(config, kernels=kernels, quantization=quantization)
        found.append((last_logits(executor, prompt(150), pieces), executor.kv_cache))
    for logits, cache in found[1:]:
        assert torch.equal(logits, found[0][0])
        assert torch.equal(cache, found[0][1])


class Elsewhere:
    """The backend as one that the kernels know nothing of: asked for each layer."""

    name = "elsewhere"

    def __init__(self, backend: NativeBackend) -> None:
        self.prepare, self.run = backend.prepare, backend.run


@EACH
@pytest.mark.parametrize("variant", ["llama", "windows"])
def test_layers_in_one_call_and_one_by_one_are_the_same_bits(kernels: Kernels, variant: str) -> None:
    config, found = VARIANTS[variant], []
    for is_within in (True, False):
        executor = native(config, kernels=kernels)
        if not is_within:
            executor._attention = Elsewhere(NativeBackend(library(kernels), windows=config.windows))
        found.append((last_logits(executor, prompt(150), [16, 1, 133]), executor.kv_cache))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_model_finds_the_memory_of_each_executor_it_serves() -> None:
    first = native(SMALL)
    second = TorchExecutor(first.model, name="tiny", page_size=16, num_pages=32, attention=NativeBackend(library()))
    want = last_logits(native(SMALL), prompt(37), [37])
    for executor in (first, second, first):
        executor.kv_cache.zero_()
        assert torch.equal(last_logits(executor, prompt(37), [37]), want)
        assert executor.kv_cache.any()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_finds_memory_of_another_size_that_begins_where_the_old_one_began(layers: int) -> None:
    """As when an executor is closed and a smaller one made: the old places would be beyond its end."""
    config = dataclasses.replace(SMALL, num_layers=layers)
    executor = native(config)
    memory = executor.kv_cache.flatten()
    for pages in (executor.info().num_pages, 8):
        smaller = memory.zero_()[: len(memory) * pages // executor.info().num_pages]
        executor.kv_cache = smaller.view(layers, 2, pages, *executor.kv_cache.shape[3:])
        executor._layer_caches = [
            LayerCache(k=k, v=v, k_slots=k.flatten(0, 1), v_slots=v.flatten(0, 1)) for k, v in executor.kv_cache
        ]
        driver = ManualDriver(executor)
        driver.step([(driver.add("r", prompt(37)), 37)])
        assert executor.kv_cache[:, :, :2].count_nonzero() > 0.99 * executor.kv_cache[:, :, :2].numel()
        assert not memory[len(smaller) :].any()


def test_rows_that_nobody_wants_cost_no_logits_and_write_the_same_cache() -> None:
    executors = [native(SMALL) for _ in range(3)]
    for executor, rows in zip(executors, ([], [3, 36], list(range(37))), strict=True):
        driver = ManualDriver(executor)
        got = executor.forward(driver.batch([(driver.add("r", prompt(37)), 37)]), rows=rows)
        assert got.shape == (len(rows), SMALL.vocab_size)
    first, *others = (executor.kv_cache for executor in executors)
    assert all(torch.equal(first, other) for other in others)


def test_a_row_may_be_wanted_more_often_than_there_are_rows() -> None:
    driver = ManualDriver(native(SMALL))
    sequence = driver.add("r", prompt(20))
    driver.step([(sequence, 20)])
    got = driver.executor.forward(driver.batch([(sequence, 1)]), rows=[0] * 200)
    assert torch.equal(got, got[:1].expand(200, -1))


def test_slots_that_are_a_view_with_steps_are_read_right() -> None:
    plain, stepping = native(SMALL), native(SMALL)
    for executor, is_stepping in ((plain, False), (stepping, True)):
        driver = ManualDriver(executor)
        batch = driver.batch([(driver.add("r", prompt(20)), 20)])
        if is_stepping:
            slots = np.stack((batch.metadata.out_slots, np.zeros(20, dtype=np.int64)), axis=1)[:, 0]
            batch = dataclasses.replace(batch, metadata=dataclasses.replace(batch.metadata, out_slots=slots))
        executor.forward(batch, rows=[19])
    assert torch.equal(plain.kv_cache, stepping.kv_cache)


def test_logits_of_one_step_outlive_the_next() -> None:
    driver = ManualDriver(native(SMALL))
    sequence = driver.add("r", prompt(20))
    batch = driver.batch([(sequence, 20)])
    first = driver.executor.forward(batch, rows=[19])
    kept = first.clone()
    driver.step([(sequence, 20)])
    driver.executor.forward(driver.batch([(sequence, 1)]), rows=[0])
    assert torch.equal(first, kept)


@pytest.mark.parametrize(
    ("change", "quantization", "words"),
    [
        ({}, "none", None),
        ({}, "int8", None),
        ({"hidden_size": 48}, "none", "hidden_size 48 is no multiple of 32"),
        ({"hidden_size": 96}, "none", None),
        ({"hidden_size": 96}, "int8", "hidden_size 96 is no multiple of 64"),
        ({"intermediate_size": 200}, "none", "intermediate_size 200 is no multiple of 32"),
        ({"head_dim": 8}, "none", "head_dim 8 is no multiple of 32"),
        ({"head_dim": 288}, "none", "head_dim 288 is above 256"),
        ({"num_heads": 3, "num_kv_heads": 1}, "int8", "attention width 96 is no multiple of 64"),
        ({}, "int8-fast", "executor.quantization=int8-fast"),
    ],
)
def test_shapes_that_do_not_fit_are_told(change: dict[str, int], quantization: Quantization, words: str | None) -> None:
    assert misfit(dataclasses.replace(SMALL, **change), quantization) == words
