"""executor.kernels: what `auto` takes, what `native` refuses, and what is told where torch's operations remain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from engine.config import EngineConfig, ExecutorConfig
from engine.errors import ConfigError
from engine.executor import cpu_form, numeric_type
from engine.executor.cpu_form import CpuForm, CpuFormChoice
from engine.executor.factory import build_torch_executor
from engine.native.compiler import Build, NativeUnavailableError
from tests.engine.native.libraries import library


def form(**settings: Any) -> CpuForm:
    return CpuFormChoice(ExecutorConfig.model_validate(settings)).form()


@pytest.mark.parametrize(
    ("settings", "dtype", "quantization"),
    [
        ({}, torch.bfloat16, "int8"),
        ({"kernels": "native"}, torch.bfloat16, "int8"),
        ({"dtype": "bfloat16"}, torch.bfloat16, "none"),
        ({"quantization": "none"}, torch.bfloat16, "none"),
        ({"quantization": "int8", "dtype": "bfloat16"}, torch.bfloat16, "int8"),
        ({"dtype": "float32"}, torch.float32, "none"),
        ({"dtype": "float32", "kernels": "native"}, torch.float32, "none"),
        ({"dtype": "float32", "quantization": "int8"}, torch.float32, "int8"),
    ],
)
def test_kernels_in_c_where_they_can_be(settings: dict[str, Any], dtype: torch.dtype, quantization: str) -> None:
    library()  # skips where they cannot
    got = form(**settings)
    assert (got.dtype, got.quantization, got.why) == (dtype, quantization, "")
    assert got.library is not None
    assert got.library.dtype is dtype


@pytest.mark.parametrize(
    ("settings", "quantization"),
    [
        ({"kernels": "torch", "dtype": "float32"}, "none"),
        ({"kernels": "torch"}, "none"),
        ({"attention_backend": "reference"}, "none"),
        ({"quantization": "int8-fast"}, "int8-fast"),
        ({"kernels": "torch", "quantization": "int8"}, "int8"),
    ],
)
def test_torch_where_it_is_asked_for_and_nobody_has_to_be_told(settings: dict[str, Any], quantization: str) -> None:
    got = form(**settings)
    assert (got.library, got.quantization, got.why) == (None, quantization, "")
    assert got.dtype is numeric_type.numeric_type(ExecutorConfig.model_validate(settings))


@pytest.fixture
def unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**_: Any) -> None:
        raise NativeUnavailableError("there is no C compiler")

    monkeypatch.setattr(cpu_form, "Build", build)


@pytest.mark.usefixtures("unavailable")
def test_torch_with_a_reason_where_they_cannot_be() -> None:
    got = form()
    assert (got.library, got.quantization, got.why) == (None, "none", "there is no C compiler")


@pytest.mark.usefixtures("unavailable")
def test_native_says_why_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"executor\.kernels=native cannot be: there is no C compiler"):
        form(kernels="native")


def test_a_damaged_library_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library()
    path = tmp_path / "admitscope" / Build().wait().name
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"\x7fELF and nothing else")
    assert form().library is not None
    assert path.stat().st_size > 1000


def test_a_compiler_that_makes_nothing_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "true")
    for _ in range(2):
        assert "cannot be used" in form().why


def test_a_compiler_that_fails_later_is_no_less_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        has_tiles = True

        def __init__(self, **_: Any) -> None:
            """Begun."""

        def wait(self) -> None:
            raise NativeUnavailableError("the C compiler failed: no space left")

    monkeypatch.setattr(cpu_form, "Build", Failing)
    assert form().why == "the C compiler failed: no space left"
    with pytest.raises(ConfigError, match="no space left"):
        form(kernels="native")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "int8-fast"}, "executor.quantization=int8-fast: use int8"),
        ({"attention_backend": "reference"}, "executor.attention_backend=reference: use cpu"),
    ],
)
def test_contradictions_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=f"executor.kernels=native contradicts {words}"):
        ExecutorConfig.model_validate(settings | {"kernels": "native"})


def test_the_packaged_model_is_computed_in_c_and_says_so() -> None:
    library()
    info = build_torch_executor(EngineConfig.model_validate({"cache": {"num_pages": 4}})).info()
    assert (info.dtype, info.attention_backend) == ("bfloat16, weights int8", "native")
    assert info.kernels == ("kernels in C" if library().has_tiles else "kernels in C, without AMX")


def test_a_model_that_int8_does_not_fit_is_computed_in_bfloat16_unless_int8_was_asked_for() -> None:
    library()  # skips where they cannot
    for settings, quantization, why in (
        ({}, "none", ""),
        ({"quantization": "int8"}, "int8", "hidden_size 96"),
    ):
        choice = CpuFormChoice(ExecutorConfig.model_validate(settings))
        got = choice.instead(choice.form(), "hidden_size 96", bfloat16_fits=True)
        assert (got.quantization, got.why) == (quantization, why)
        assert (got.library is None) == bool(why)
    choice = CpuFormChoice(ExecutorConfig())
    assert choice.instead(choice.form(), "head_dim 8", bfloat16_fits=False).library is None
