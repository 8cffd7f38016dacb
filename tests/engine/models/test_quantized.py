"""int8 layers: close to what they stand for, outliers or not; the same bits alone and in company; whole models too."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.cpu import CpuBackend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.executor.manual import ManualDriver
from engine.executor.torch_executor import TorchExecutor
from engine.models import quantized
from engine.models.llama import LlamaModel
from engine.models.quantized import Quantization, QuantizedLinear
from engine.models.weights import LlamaWeights
from tests.engine.executor.tiny import CONFIG, tiny_weights

TWO_ROWS = pytest.mark.parametrize("two_rows", [True, False])


def layer(two_rows: bool, *, out: int = 96, inner: int = 64, bias: bool = False, seed: int = 0) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inner, generator=generator) * 0.1
    return QuantizedLinear(weight, torch.randn(out, generator=generator) if bias else None, two_rows=two_rows)


def exact(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """With the same int8 weights and unrounded activations, in float64."""
    return x.double() @ rounded(weight).double().t()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    out=st.integers(1, 70),
    inner=st.integers(1, 90),
    outlier=st.sampled_from([1.0, 50.0, 1e4]),
    size=st.sampled_from([1e-6, 1.0, 1e6]),
    seed=st.integers(0, 9),
)
def test_two_rows_keep_sixteen_bits(rows: int, out: int, inner: int, outlier: float, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inner, generator=generator)
    x = torch.randn(rows, inner, generator=generator) * size
    x[:, 0] *= outlier
    got = QuantizedLinear(weight, two_rows=True)(x).double()
    want = exact(weight, x)
    # Each value is off by at most half a step of the second row, so a sum by that times the weights' sum.
    step = x.abs().amax(1, keepdim=True).double() / 127 / 254
    bound = 0.51 * step * weight.abs().double().sum(1) * 1.01 + 1e-5 * (x.abs().double() @ weight.abs().double().t())
    assert bool(((got - want).abs() <= bound + 1e-30).all())


@TWO_ROWS
def test_a_row_is_the_same_bits_alone_and_in_company(two_rows: bool) -> None:
    linear = layer(two_rows, bias=True)
    x = torch.randn(70, 64)
    whole = linear(x)
    for count in (1, 2, 3, 16, 33):
        assert torch.equal(linear(x[:count]), whole[:count])
        assert torch.equal(linear(x[-count:]), whole[-count:])


@TWO_ROWS
def test_zeros_stay_zeros_and_nothing_is_written_into_the_input(two_rows: bool) -> None:
    linear = layer(two_rows)
    x = torch.cat((torch.zeros(2, 64), torch.ones(1, 64)))
    before = x.clone()
    y = linear(x)
    assert torch.equal(x, before)
    assert not y[:2].any()
    assert y[2].any()
    assert not QuantizedLinear(torch.zeros(4, 8), two_rows=two_rows)(torch.ones(3, 8)).any()


@TWO_ROWS
def test_what_is_no_number_stays_none(two_rows: bool) -> None:
    x = torch.ones(3, 64)
    x[1, 7] = float("nan")
    y = layer(two_rows)(x)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_adding_to_a_base_and_other_types() -> None:
    linear = layer(True, bias=True)
    x, base = torch.randn(5, 64), torch.randn(5, 96)
    want = base + linear(x)
    assert torch.equal(linear.add_to(base, x), want)
    assert linear(x.bfloat16()).dtype is torch.bfloat16


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """The weight as int8 with one scale per output says it, in float32."""
    scales = (weight.abs().amax(1) / 127)[:, None]
    return (weight / scales).round() * scales


def executor(quantization: Quantization, weights: LlamaWeights | None = None) -> TorchExecutor:
    model = LlamaModel(CONFIG, weights or tiny_weights(), quantization=quantization)
    return TorchExecutor(model, name="tiny", page_size=4, num_pages=64, attention=CpuBackend())


def logits(made: TorchExecutor, prompt: list[int]) -> torch.Tensor:
    driver = ManualDriver(made)
    return made.forward(driver.batch([(driver.add("r", prompt), len(prompt))]), rows=list(range(len(prompt))))


def test_a_model_in_int8_is_close_and_says_what_it_is() -> None:
    prompt = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 29).tolist()
    weights = tiny_weights()
    weights.lm_head = rounded(weights.lm_head)
    for layer in weights.layers:
        for name in ("qkv", "attention_out", "gate_up", "down"):
            setattr(layer, name, rounded(getattr(layer, name)))
    same_weights = logits(executor("none", weights), prompt)
    two, one = (logits(executor(mode), prompt) for mode in ("int8", "int8-fast"))
    errors = [float((other - same_weights).norm() / same_weights.norm()) for other in (two, one)]
    assert errors[0] < 0.001, "the activations are as good as unrounded"
    assert errors[0] < errors[1] < 0.2
    assert executor("int8").info().dtype == "float32, weights int8"


def test_chunked_is_whole_in_int8() -> None:
    prompt = np.random.default_rng(4).integers(0, CONFIG.vocab_size, 23).tolist()
    made = executor("int8")
    driver = ManualDriver(made)
    whole, pieces = driver.add("whole", prompt), driver.add("pieces", prompt)
    driver.step([(whole, len(prompt))])
    for length in (8, 8, 7):
        driver.step([(pieces, length)])
    driver.generate([whole, pieces], 8)
    assert whole.outputs == pieces.outputs


def test_a_build_without_int8_layers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        def __getattr__(self, name: str) -> object:
            raise AttributeError(name)

    monkeypatch.setattr(quantized.torch, "ops", Without())
    with pytest.raises(ConfigError, match=r"executor\.quantization=int8 .* lacks \(AttributeError\)"):
        QuantizedLinear(torch.ones(4, 8), two_rows=True)


def test_a_processor_that_loses_sums_is_refused() -> None:
    """oneDNN with the instructions of before VNNI, in a process of its own: it reads the limit once."""
    code = (
        "import torch\nfrom engine.errors import ConfigError\nfrom engine.models.quantized import QuantizedLinear\n"
        "try:\n    QuantizedLinear(torch.ones(4, 8), two_rows=True)\nexcept ConfigError as error:\n    print(error)"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "sums int8 products exactly" in told.stdout


def test_the_setting_is_checked() -> None:
    assert EngineConfig().executor.quantization == "auto"
    with pytest.raises(ValueError, match="int8-fast"):
        EngineConfig.model_validate({"executor": {"quantization": "int4"}})


_EACH_MODE = """
import torch
from engine.models.quantized import QuantizedLinear
for two_rows in (False, True):
    layer = QuantizedLinear(torch.randn(96, 64), two_rows=two_rows)
    for rows in (1, 7, 64):
        layer(torch.randn(rows, 64))
"""


def test_products_run_by_a_kernel_of_this_processor() -> None:
    """oneDNN takes what it has no kernel for as well: one by one, hundreds of times as slowly, and says nothing."""
    made = subprocess.run(
        [sys.executable, "-c", _EACH_MODE],
        env=os.environ | {"ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    used = [line.split(",")[6] for line in made.stdout.splitlines() if ",exec,cpu,matmul," in line]
    assert used, made.stdout
    assert not [kernel for kernel in used if kernel.startswith("ref")]
