"""The executor against `transformers` on the same weights: logits to float32 rounding, 64 greedy tokens exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accuracy
import pytest
import torch

from engine.executor.manual import ManualDriver
from engine.models.packaged import packaged_gguf_path

#: float32 sums of a few hundred products, 30 layers deep, come out near 1e-6; a wrong constant gives 1e-2 or more.
RELATIVE_ERROR = 5e-6


def check(result: accuracy.Agreement) -> None:
    print(result)
    assert result.relative < RELATIVE_ERROR
    assert result.top1_equal == result.rows
    assert result.greedy_equal == result.greedy_total


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shard_size", [None, "100KB"], ids=["one-file", "sharded"])
def test_tiny_llama_from_a_folder(tmp_path: Path, shard_size: str | None) -> None:
    oracle = accuracy.tiny_llama(tmp_path, shard_size=shard_size)
    files = len(list(tmp_path.glob("*.safetensors")))
    assert files == 1 if shard_size is None else files > 1
    executor = accuracy.executor_for(tmp_path, page_size=1, pages=700)
    prompts = accuracy.random_prompts(512, count=3, length=30)
    check(accuracy.compare(executor, oracle, prompts, new_tokens=64))


VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads": {"num_key_value_heads": 4},
    "own head size": {"head_dim": 24},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_family(tmp_path: Path, variant: str) -> None:
    oracle = accuracy.tiny_llama(tmp_path, **VARIANTS[variant])
    executor = accuracy.executor_for(tmp_path, pages=40)
    prompts = accuracy.random_prompts(512, count=2, length=50)
    check(accuracy.compare(executor, oracle, prompts, new_tokens=24))


@pytest.mark.filterwarnings("default")
def test_a_model_with_other_weights_would_be_noticed(tmp_path: Path) -> None:
    """Sabotage: the same shapes from another seed do not pass the comparison."""
    accuracy.tiny_llama(tmp_path, seed=1)
    other = accuracy.tiny_llama(tmp_path / "other", seed=2)
    executor = accuracy.executor_for(tmp_path, pages=40)
    result = accuracy.compare(executor, other, accuracy.random_prompts(512, count=1, length=20), new_tokens=4)
    assert result.relative > 0.1
    assert result.greedy_equal < result.greedy_total


@pytest.mark.model
@pytest.mark.filterwarnings("default")
def test_smollm2_from_gguf_in_chunks_and_company() -> None:
    """The packaged model; its prompts then run again in pieces, mixed with decodes, and must answer the same."""
    oracle = accuracy.smollm2_oracle(packaged_gguf_path())
    executor = accuracy.executor_for(None, pages=64)
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
