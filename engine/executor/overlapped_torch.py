"""OverlappedTorchExecutor. Owns: a model on a GPU that is handed a batch while it computes the one before.

One stream keeps the order: a batch's kernels, then the copy of its tokens to the host, then the next batch's kernels.
So the host waits for an event behind that copy, not for the device; and a decode row whose token the host does not have
yet takes it on the device, from where the batch before left it. Two pinned buffers take turns, as at most two batches
are in flight.

That works for rows that a GPU chooses without the host: greedy ones, and drawn ones with their filters, forbidden ends
and log-probabilities (`engine.executor.device_sampler`). A batch with a row that has a penalty, a bias or a grammar is
sampled when it is collected, and the next one is launched after that.

Tested with a double of the device; the hardware has not run it yet.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.device import DeviceRuntime
from engine.attention.staging import SETS, Rotation, Staging
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.device_sampler import DeviceSampler, answers, is_chosen_on_device
from engine.executor.torch_executor import TorchExecutor


class TokenReturn:
    """Pinned memory for what one batch chose, and the event behind the copies to it."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._arrived = runtime.event()
        self._integers = runtime.pinned(0, torch.int64)
        self._floats = runtime.pinned(0, torch.float32)
        self._counts = (0, 0)

    def send(self, integers: torch.Tensor, floats: torch.Tensor) -> None:
        """Start the copies. integers [I] int64, floats [F] float32, both on the device."""
        self._counts = len(integers), len(floats)
        if len(integers) > len(self._integers):
            self._integers = self._runtime.pinned(2 * len(integers), torch.int64)
        if len(floats) > len(self._floats):
            self._floats = self._runtime.pinned(2 * len(floats), torch.float32)
        if len(integers):
            self._runtime.fetch(self._integers[: len(integers)], integers)
            self._runtime.fetch(self._floats[: len(floats)], floats)
        self._arrived.record()

    def take(self) -> tuple[list[int], list[float]]:
        """What was sent, once it is there."""
        self._arrived.wait()
        integers, floats = self._counts
        return self._integers[:integers].tolist(), self._floats[:floats].tolist()


class _Launched(NamedTuple):
    """A batch on its way: its tokens come back, or `logits` [S, vocab] are sampled when it is collected."""

    batch: ForwardBatch
    coming: TokenReturn | None
    logits: torch.Tensor | None


class OverlappedTorchExecutor(TorchExecutor):
    """See TorchExecutor; `gpu` must be given. `execute` does one batch, and nothing may be in flight then."""

    def __init__(self, *args: Any, returns: int = SETS, **kwargs: Any) -> None:
        """`returns`: pinned buffers for tokens; fewer than two are a fault, for a test that sees it."""
        super().__init__(*args, **kwargs)
        runtime = self._runtime
        assert runtime is not None, "steps overlap on a GPU"
        self._chooser = DeviceSampler(self._sampler, runtime)
        self._returns = Rotation(lambda: TokenReturn(runtime), returns)
        self._carriers = Rotation(lambda: Staging(runtime, torch.int64), SETS)
        self._launched: deque[_Launched] = deque()
        #: [S] int64 on the device: tokens of the last batch that was launched, in the order of its sampling.
        self._last: torch.Tensor | None = None

    def execute(self, batch: ForwardBatch) -> StepResult:
        """As launched and collected: what is compiled, and what memory it takes, is the same."""
        self.launch(batch)
        return self.collect()

    def allows_next(self, batch: ForwardBatch) -> bool:
        """Whether its tokens are chosen without the host."""
        return all(map(is_chosen_on_device, batch.sampling))

    def launch(self, batch: ForwardBatch) -> None:
        """Start forward pass, sampling and the copy of the tokens. Raises as `forward` does, with nothing started."""
        logits = self.forward(batch, rows=[row.row for row in batch.sampling])
        if not self.allows_next(batch):
            self._last = None
            self._launched.append(_Launched(batch, None, logits))
            return
        with torch.inference_mode():
            chosen = self._chooser.choose(logits, batch.sampling)
            coming = self._returns.next()
            coming.send(chosen.integers, chosen.floats)
        self._last = chosen.tokens
        self._launched.append(_Launched(batch, coming, None))

    def collect(self) -> StepResult:
        """Wait for the oldest batch. Raises NonFiniteLogits, and what the device reports late."""
        batch, coming, logits = self._launched.popleft()
        if coming is None:
            assert logits is not None, "either tokens come or logits are sampled"
            with torch.inference_mode():
                return StepResult(step=batch.step, tokens=self._sampler.sample(logits, batch.sampling))
        with torch.inference_mode():
            integers, floats = coming.take()
        return StepResult(step=batch.step, tokens=answers(batch.sampling, integers, floats))

    def _take_over(self, batch: ForwardBatch, token_ids: torch.Tensor) -> None:
        """Put tokens of the batch before into `token_ids`, on the device."""
        if not batch.carried:
            return
        assert self._last is not None, "tokens are carried over from a batch whose tokens are on the device"
        carrier = self._carriers.next()
        carrier.pack([np.array(pairs, dtype=np.int64) for pairs in zip(*batch.carried, strict=True)])
        rows, places = carrier.upload()
        carrier.sent()
        token_ids.index_copy_(0, rows, self._last.index_select(0, places))
