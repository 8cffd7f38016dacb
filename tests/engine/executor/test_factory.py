"""build_executor: the pool's size, the model's name and limits, and settings that contradict the model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFormatError
from engine.executor.base import LendingExecutor
from engine.executor.factory import build_executor, pool_pages
from engine.executor.manual import ManualDriver
from engine.executor.simulated import SimulatedExecutor
from engine.executor.torch_executor import TorchExecutor
from tests.engine.executor.tiny import CONFIG
from tests.engine.models.gguf_files import tiny_weights, write_gguf
from tests.engine.native.libraries import library


@pytest.fixture
def gguf_path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "Tiny-1M-Q8_0.gguf", tiny_weights())


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(path: Path, **sections: Any) -> EngineConfig:
    model = {"path": path} | sections.pop("model", {})
    return EngineConfig.model_validate({"model": model} | sections)


def test_a_gguf_file_becomes_an_executor_that_answers(gguf_path: Path) -> None:
    executor = build_executor(config(gguf_path, cache={"num_pages": 20}, executor={"dtype": "float32"}))
    info = executor.info()
    assert isinstance(executor, TorchExecutor)
    assert (info.model, info.num_pages, info.page_size, info.max_context_tokens) == ("Tiny-1M", 20, 16, 128)
    assert (info.attention_backend, info.dtype, info.eos_token_ids) == ("cpu", "float32", (2, 7))
    driver = ManualDriver(executor)
    sequence = driver.add("r", [5, 6, 7])
    driver.generate([sequence], 4)
    assert len(sequence.outputs) == 4


def test_settings_choose_backend_type_name_and_context(gguf_path: Path) -> None:
    info = build_executor(
        config(
            gguf_path,
            model={"name": "mine", "max_context_tokens": 50},
            executor={"attention_backend": "reference", "dtype": "bfloat16"},
            cache={"num_pages": 4, "page_size": 1},
        )
    ).info()
    assert (info.model, info.max_context_tokens, info.attention_backend) == ("mine", 50, "reference")
    assert (info.dtype, info.page_size) == ("bfloat16", 1)


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_memory_decides_the_number_of_pages(gguf_path: Path, dtype: str, itemsize: int) -> None:
    settings = config(gguf_path, cache={"memory_mib": 1}, executor={"dtype": dtype})
    executor = build_executor(settings)
    assert isinstance(executor, TorchExecutor)
    # 2 layers, K and V, 2 heads of 16.
    assert executor.info().num_pages == 1024 * 1024 // (2 * 2 * 2 * 16 * 16 * itemsize)
    assert executor.kv_cache.nbytes <= 1024 * 1024


def test_too_little_memory_names_both_settings() -> None:
    settings = EngineConfig.model_validate({"cache": {"memory_mib": 1, "page_size": 1024}})
    deep = dataclasses.replace(CONFIG, num_layers=8)
    with pytest.raises(ConfigError, match=r"cache.memory_mib=1 holds 1 pages of cache.page_size=1024 .* at least 2"):
        pool_pages(settings, deep, itemsize=4)


def test_a_pool_that_memory_does_not_hold_names_the_setting(gguf_path: Path) -> None:
    for setting, value in (("memory_mib", 2**40), ("num_pages", 2**24)):
        wanted = config(gguf_path, cache={setting: value, "page_size": 1024}, model={"max_context_tokens": 64})
        with pytest.raises(ConfigError, match=rf"cache\.{setting}={value} asks for [\d,]+ MiB of K/V memory"):
            build_executor(wanted)


def test_a_context_beyond_the_model_is_refused(gguf_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.max_context_tokens=129 is above the model's own limit, 128"):
        build_executor(config(gguf_path, model={"max_context_tokens": 129}))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"absent.gguf' does not exist"):
        build_executor(config(tmp_path / "absent.gguf"))


@pytest.mark.usefixtures("restore_threads")
def test_threads_are_set(gguf_path: Path) -> None:
    build_executor(config(gguf_path, executor={"threads": 1}, cache={"num_pages": 4}))
    assert torch.get_num_threads() == 1


def test_the_simulated_executor_needs_no_model() -> None:
    executor = build_executor(EngineConfig.model_validate({"executor": {"kind": "simulated"}}))
    assert isinstance(executor, SimulatedExecutor)


@pytest.mark.model
def test_the_default_model_is_the_packaged_one() -> None:
    info = build_executor(EngineConfig.model_validate({"cache": {"num_pages": 4}})).info()
    assert (info.model, info.vocab_size, info.max_context_tokens) == ("SmolLM2-135M-Instruct", 49_152, 8192)
    assert info.eos_token_ids == (2,)


def test_an_executor_lends_a_processor_where_its_threads_fill_them(
    restore_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library()  # skips where there are no kernels in C
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})

    def lends(**settings: Any) -> bool:
        executor = build_executor(EngineConfig.model_validate({"cache": {"num_pages": 4}, "executor": settings}))
        assert isinstance(executor, LendingExecutor)
        return executor.lend_core is not None

    assert lends(threads=2, kernels="native")
    assert not lends(threads=1, kernels="native")
    assert not lends(threads=2, kernels="torch")
