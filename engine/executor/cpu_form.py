"""CPU form. Owns: the choice between kernels in C and torch's operations, and of the numeric form that goes with it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.config import ExecutorConfig
from engine.errors import ConfigError
from engine.native.compiler import Build, NativeUnavailableError

if TYPE_CHECKING:
    import torch

    from engine.models.quantized import Quantization
    from engine.native.library import Library


@dataclass(frozen=True, slots=True)
class CpuForm:
    """How a model is computed on this CPU.

    library   the kernels in C; None: torch's operations
    why       why it is torch, in words; empty where nobody has to be told
    """

    dtype: torch.dtype
    quantization: Quantization
    library: Library | None = None
    why: str = ""


class CpuFormChoice:
    """The choice for one configuration. Made in two parts, so that a compiler runs while torch is imported."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Starts the compiler where kernels are wanted and not there yet."""
        self._config = config
        self._build: Build | None = None
        self._why = ""
        if config.kernels == "torch" or not _fits(config):
            return
        try:
            self._build = Build(float32=config.dtype == "float32")
        except NativeUnavailableError as error:
            self._missing(str(error))
            return
        # Threads of torch's own operations wait for more by turning in circles, for milliseconds, on the cores that the
        # kernels' threads need by then. Read once, when torch is imported; both names are of GNU's OpenMP.
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")

    def form(self) -> CpuForm:
        """The form. Raises ConfigError where `executor.kernels=native` cannot be."""
        config, build = self._config, self._build
        if build is None:
            return self.torch_form(self._why)
        quantization: Quantization = "int8" if config.quantization == "int8" else "none"
        if config.quantization == "auto" and config.dtype == "auto":
            quantization = "int8"
        try:
            library = _library(build)
        except NativeUnavailableError as error:
            self._missing(str(error))
            return self.torch_form(self._why)
        return CpuForm(library.dtype, quantization, library)

    def instead(self, form: CpuForm, why: str, *, bfloat16_fits: bool) -> CpuForm:
        """The form for a model that the kernels of `form` cannot run, because of `why`."""
        chosen = form.quantization == "int8" and self._config.quantization == "auto"
        if bfloat16_fits and chosen and form.library is not None:
            return replace(form, quantization="none")
        return self.torch_form(why)

    def torch_form(self, why: str) -> CpuForm:
        """The form without kernels in C, because of `why`. Raises ConfigError where they were asked for."""
        from engine.executor.numeric_type import numeric_type

        if why:
            self._missing(why)
        quantization = "none" if self._config.quantization == "auto" else self._config.quantization
        return CpuForm(numeric_type(self._config), quantization, why=why)

    def _missing(self, why: str) -> None:
        if self._config.kernels == "native":
            raise ConfigError(f"executor.kernels=native cannot be: {why}")
        self._why = why


def _library(build: Build) -> Library:
    """The kernels. Raises NativeUnavailableError. A kept file that a crash has damaged is made anew."""
    from engine.native.library import Library

    path = build.wait()
    try:
        return Library(path)
    except NativeUnavailableError:
        if not build.is_kept:
            raise
    build.discard()
    return Library(Build(float32=build.is_float32).wait())


def _fits(config: ExecutorConfig) -> bool:
    """Whether the kernels have what is asked for."""
    is_plain = config.device == "cpu" and config.attention_backend == "cpu"
    return is_plain and config.quantization != "int8-fast"
