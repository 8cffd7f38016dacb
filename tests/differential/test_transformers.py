"""The executor against `transformers` on the same weights: logits to float32 rounding, 64 greedy tokens exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accuracy
import pytest
import torch

from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import TorchExecutor
from engine.models.packaged import packaged_gguf_path
from tests.engine.models.gguf_files import gguf_of
from tests.engine.native.libraries import library

#: transformers and torch warn of their own internals, which nobody here can mend.
pytestmark = pytest.mark.filterwarnings("default")

#: float32 sums of a few hundred products, 30 layers deep, come out near 1e-6; a wrong constant gives 1e-2 or more.
RELATIVE_ERROR = 5e-6


def check(result: accuracy.Agreement) -> None:
    print(result)
    assert result.relative < RELATIVE_ERROR
    assert result.top1_equal == result.rows
    assert result.greedy_equal == result.greedy_total


@pytest.mark.parametrize("shard_size", [None, "100KB"], ids=["one-file", "sharded"])
def test_tiny_llama_from_a_folder(tmp_path: Path, shard_size: str | None) -> None:
    oracle = accuracy.tiny_model(tmp_path, shard_size=shard_size)
    files = len(list(tmp_path.glob("*.safetensors")))
    assert files == 1 if shard_size is None else files > 1
    executor = accuracy.executor_for(tmp_path, page_size=1, pages=700)
    prompts = accuracy.random_prompts(512, count=3, length=30)
    check(accuracy.compare(executor, oracle, prompts, new_tokens=64))


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def stretched(kind: str, **more: Any) -> dict[str, Any]:
    return rope(kind, factor=8.0, original_max_position_embeddings=32, **more)


#: Family and the settings in which it differs from the smallest model of it.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "own head size": ("llama", {"head_dim": 24}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "linear rope": ("llama", rope("linear", factor=4.0)),
    "dynamic rope": ("llama", rope("dynamic", factor=4.0)),
    "llama3 rope": ("llama", stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "yarn rope": ("llama", stretched("yarn", beta_fast=8.0)),
    "yarn rope, uncut bounds and own scale": ("llama", stretched("yarn", truncate=False, attention_factor=1.3)),
    "yarn rope, two weights": ("llama", stretched("yarn", mscale=1.2, mscale_all_dim=0.7)),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with a window": ("mistral", {"sliding_window": 19}),
    "mistral, two tokens wide": ("mistral", {"sliding_window": 2}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows in late layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen2 with yarn": ("qwen2", stretched("yarn")),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 with biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 with windows": (
        "qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_family(tmp_path: Path, variant: str) -> None:
    family, settings = VARIANTS[variant]
    agree(tmp_path, accuracy.tiny_model(tmp_path, family, **settings), kernels="torch")


#: Those whose heads fit the kernels in C, when the model is twice as wide.
FITTING = [name for name, (_, settings) in VARIANTS.items() if settings.get("head_dim", 32) % 32 == 0]


@pytest.mark.parametrize("variant", FITTING)
def test_variants_of_the_family_by_kernels_in_c(tmp_path: Path, variant: str) -> None:
    library("float32")  # skips where there are none
    family, settings = VARIANTS[variant]
    agree(tmp_path, accuracy.tiny_model(tmp_path, family, hidden_size=128, **settings), kernels="native")


def agree(path: Path, oracle: Any, *, kernels: str) -> None:
    """Logits and greedy tokens are the oracle's, of prompts at once and in pieces."""
    executor = accuracy.executor_for(path, kernels=kernels, pages=40)
    prompts = accuracy.random_prompts(512, count=2, length=50)
    check(accuracy.compare(executor, oracle, prompts, new_tokens=24))
    in_pieces(executor, oracle, prompts)


def in_pieces(executor: TorchExecutor, oracle: Any, prompts: list[list[int]]) -> None:
    """The same prompts in pieces of 7 and 13 tokens, the second beside decodes of the first, over scattered pages."""
    executor.kv_cache.fill_(float("nan"))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    driver = ManualDriver(executor, page_order=order)
    first, late = driver.add("first", prompts[0]), driver.add("late", prompts[1])
    while first.missing_len > 1:
        driver.step([(first, min(7, first.missing_len))])
    while late.missing_len > 1:
        driver.step([(late, min(13, late.missing_len)), (first, 1)])
    driver.generate([first, late], 12)
    for sequence, prompt in ((first, prompts[0]), (late, prompts[1])):
        assert sequence.outputs[:12] == accuracy.greedy(oracle, prompt, 12)


#: Family and settings of what goes through a GGUF file, and the metadata that says the same.
GGUF_VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "llama, tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, {}),
    "llama3 rope as factors": ("llama", stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0), {}),
    "linear rope": ("llama", rope("linear", factor=4.0), {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "mistral with a window": ("mistral", {"sliding_window": 19}, {"attention.sliding_window": 19}),
    "qwen2": ("qwen2", {}, {}),
    "qwen2 with yarn": (
        "qwen2",
        stretched("yarn"),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 8.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}, {}),
}


@pytest.mark.parametrize("variant", GGUF_VARIANTS)
def test_variants_from_gguf_files(tmp_path: Path, variant: str) -> None:
    family, settings, facts = GGUF_VARIANTS[variant]
    oracle = accuracy.tiny_model(tmp_path / "folder", family, **settings)
    path = gguf_of(oracle, tmp_path / "model.gguf", **facts)
    executor = accuracy.executor_for(path, pages=40)
    prompts = accuracy.random_prompts(512, count=2, length=50)
    check(accuracy.compare(executor, oracle, prompts, new_tokens=16))


def test_a_model_with_other_weights_would_be_noticed(tmp_path: Path) -> None:
    """Sabotage: the same shapes from another seed do not pass the comparison."""
    accuracy.tiny_model(tmp_path, seed=1)
    other = accuracy.tiny_model(tmp_path / "other", seed=2)
    executor = accuracy.executor_for(tmp_path, pages=40)
    result = accuracy.compare(executor, other, accuracy.random_prompts(512, count=1, length=20), new_tokens=4)
    assert result.relative > 0.1
    assert result.greedy_equal < result.greedy_total


@pytest.mark.model
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_smollm2_from_gguf_in_chunks_and_company(kernels: str) -> None:
    """The packaged model; its prompts then run again in pieces, mixed with decodes, and must answer the same."""
    if kernels == "native":
        library("float32")  # skips where there are none
    oracle = accuracy.smollm2_oracle(packaged_gguf_path())
    executor = accuracy.executor_for(None, kernels=kernels, pages=64)
    prompts = accuracy.random_prompts(49_152, count=2, length=40)
    check(accuracy.compare(executor, oracle, prompts, new_tokens=64))
    executor.kv_cache.fill_(float("nan"))
    driver = ManualDriver(executor, page_order=torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist())
    first, late = driver.add("first", prompts[0]), driver.add("late", prompts[1])
    driver.step([(first, len(prompts[0]))])
    while late.missing_len > 1:
        driver.step([(late, min(16, late.missing_len)), (first, 1)])
    driver.generate([first, late], 20)
    for sequence, prompt in ((first, prompts[0]), (late, prompts[1])):
        assert sequence.outputs[:20] == accuracy.greedy(oracle, prompt, 20)
