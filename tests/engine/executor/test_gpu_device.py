"""TorchExecutor on a device that is not the CPU: fake tensors refuse operators over two devices, as a GPU does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.attention.metadata import PagedMetadata
from engine.attention.staging import Staging
from engine.executor import decode_graphs, device_sampler, overlapped_torch, torch_executor
from engine.executor.manual import ManualDriver
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from engine.executor.torch_executor import Gpu, TorchExecutor
from engine.models.llama import LlamaModel
from engine.models.weights import move
from engine.sampling_params import SamplingParams
from tests.engine.executor.tiny import CONFIG, tiny_weights

META = torch.device("meta")


class ShapeDevice:
    """Has shapes only."""

    device = META

    def __init__(self) -> None:
        self.captured = 0

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device="cpu")

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert (target.device.type, source.device) == ("cpu", META)
        assert (target.shape, target.dtype) == (source.shape, source.dtype)

    def event(self) -> ShapeDevice:
        return self

    def record(self) -> None: ...

    def wait(self) -> None: ...

    def capture(self, work: Callable[[], None]) -> ShapeDevice:
        work()
        self.captured += 1
        return self

    def replay(self) -> None: ...


class ShapeStaging(Staging):
    """Keeps places and sends nothing: a fake tensor has no memory that a host could write to."""

    def pack(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        ends = np.cumsum([len(array) for array in arrays]).tolist()
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        assert ends[-1] <= len(self._device)
        return []

    def upload(self) -> list[torch.Tensor]:
        return [self._device[first:end] for first, end in self._bounds]

    def _reserve(self, count: int) -> None:
        self._device = torch.empty(count, dtype=self._dtype, device=META)


class ShapeAttention:
    """Answers where q is."""

    name = "shapes"

    def prepare(self, metadata: PagedMetadata) -> None: ...

    def reserve_captured(self, size: int, *, max_indices: int) -> None: ...

    def prepare_captured(self, metadata: PagedMetadata) -> None: ...

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int) -> torch.Tensor:
        assert {q.device, k_cache.device, v_cache.device} == {META}
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@pytest.fixture(autouse=True)
def _fake_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (torch_executor, decode_graphs, overlapped_torch, device_sampler):
        monkeypatch.setattr(module, "Staging", ShapeStaging)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.parametrize("graph_rows", [0, 3])
def test_a_step_has_every_tensor_on_the_device(graph_rows: int) -> None:
    weights = tiny_weights()
    move(weights, META)
    device = ShapeDevice()
    executor = TorchExecutor(
        LlamaModel(CONFIG, weights), name="tiny", page_size=16, num_pages=20, attention=ShapeAttention(),
        gpu=Gpu(device, graph_rows=graph_rows),
    )  # fmt: skip
    assert executor.info().device == "meta"
    assert executor.kv_cache.device == META
    driver = ManualDriver(executor)
    sequences = [driver.add(f"r{i}", list(range(9 + i))) for i in range(2)]
    for work in ([(s, s.missing_len - 1) for s in sequences], [(s, 1) for s in sequences]):
        batch = driver.batch(work)
        logits = executor.forward(batch, rows=[1, 0])
        assert logits.device == META
        assert logits.shape == (2, CONFIG.vocab_size)
        for sequence, count in work:
            sequence.computed_len += count
    assert device.captured == (3 if graph_rows else 0)


@pytest.mark.parametrize("graph_rows", [0, 3])
def test_a_launch_chooses_and_carries_over_on_the_device_alone(graph_rows: int) -> None:
    """Fake tensors know no values, either: whatever asked for one between two launches would raise."""
    weights = tiny_weights()
    move(weights, META)
    executor = OverlappedTorchExecutor(
        LlamaModel(CONFIG, weights), name="tiny", page_size=16, num_pages=20, attention=ShapeAttention(),
        gpu=Gpu(ShapeDevice(), graph_rows=graph_rows),
    )  # fmt: skip
    driver = ManualDriver(executor)
    asked = [
        SamplingParams(temperature=0.0, min_new_tokens=3),
        SamplingParams(temperature=0.7, top_p=0.9, seed=4, logprobs=2),
        SamplingParams(temperature=0.7, top_k=5, min_p=0.1),
    ]
    sequences = [driver.add(f"r{i}", list(range(9 + i)), params) for i, params in enumerate(asked)]
    executor.launch(driver.batch([(sequence, sequence.missing_len) for sequence in sequences]))
    for sequence in sequences:
        sequence.computed_len = len(sequence.tokens)
        sequence.tokens.append(0)
    batch = driver.batch([(sequence, 1) for sequence in sequences])
    executor.launch(replace(batch, carried=((0, 0), (1, 1), (2, 2))))
    chosen = executor._last
    assert chosen is not None
    assert (chosen.device, tuple(chosen.shape), chosen.dtype) == (META, (3,), torch.int64)
