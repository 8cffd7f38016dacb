"""executor.dtype=auto: bfloat16 where it is fast and keeps its promises, float32 elsewhere and where nobody says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig, ExecutorConfig
from engine.executor import numeric_type
from engine.executor.manual import ManualDriver
from engine.executor.numeric_type import multiplies_bfloat16
from engine.models import linear
from tests.engine.executor.tiny import CONFIG, tiny_executor


@pytest.fixture
def amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with matrix units, in every respect that is looked at; the file is its /proc/cpuinfo."""
    facts = tmp_path / "cpuinfo"
    facts.write_text("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n")
    monkeypatch.setattr(numeric_type, "_CPU_FACTS", facts)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    monkeypatch.setattr(numeric_type, "packs", lambda _: True)
    return facts


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"quantization": "int8"}, torch.float32),
        ({"quantization": "int8", "dtype": "bfloat16"}, torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("amx")
def test_matrix_units_choose_bfloat16_and_a_setting_comes_first(settings: dict[str, Any], chosen: torch.dtype) -> None:
    assert numeric_type.numeric_type(ExecutorConfig.model_validate(settings)) is chosen


def test_without_flag_permission_packing_or_file_it_is_float32(amx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert multiplies_bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert not multiplies_bfloat16()
    with monkeypatch.context() as patch:
        patch.delattr(torch.cpu, "_is_amx_tile_supported")
        assert not multiplies_bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(numeric_type, "packs", lambda _: False)
        assert not multiplies_bfloat16()
    amx.write_text("flags\t\t: fpu avx512_bf16\n")
    assert not multiplies_bfloat16()
    amx.unlink()
    assert not multiplies_bfloat16()
    assert numeric_type.numeric_type(ExecutorConfig()) is torch.float32


def test_a_gpu_is_given_bfloat16_by_itself() -> None:
    config = EngineConfig.model_validate({"executor": {"device": "cuda", "attention_backend": "flashinfer"}})
    assert numeric_type.numeric_type(config.executor) is torch.bfloat16


def test_a_request_in_bfloat16_is_the_same_bits_alone_and_in_company() -> None:
    """Whole prompts and decode rows: embedding, norms, products, attention and head."""
    if not linear.packs(torch.bfloat16):
        pytest.skip("this build of torch packs no weights")
    rng = np.random.default_rng(6)
    prompts = [rng.integers(10, CONFIG.vocab_size, length).tolist() for length in (40, 3, 70, 129, 17, 64)]
    executor = tiny_executor(dtype=torch.bfloat16, num_pages=80)
    seen: list[list[torch.Tensor]] = []
    for company in ([prompts[0]], prompts):
        driver = ManualDriver(executor)
        sequences = [driver.add(f"r{i}", prompt) for i, prompt in enumerate(company)]
        rows = []
        for _ in range(30):
            batch = driver.batch([(sequence, sequence.missing_len) for sequence in sequences])
            rows.append(executor.forward(batch, rows=[int(batch.metadata.qo_indptr[1]) - 1]).clone())
            driver.step([(sequence, sequence.missing_len) for sequence in sequences])
        seen.append(rows)
    for alone, together in zip(*seen, strict=True):
        assert torch.equal(alone, together)
