"""OverlappedTorchExecutor. Owns: a model on a GPU that is handed a batch while it computes the one before.

One stream keeps the order: a batch's kernels, then the copy of its tokens to the host, then the next batch's kernels.
So the host waits for an event behind that copy, not for the device; and a decode row whose token the host does not have
yet takes it on the device, from where the batch before left it. Two pinned buffers take turns, as at most two batches
are in flight.

That works for greedy rows, which a GPU chooses without the host. Drawing at a temperature, filters and
log-probabilities ask the host in between; a batch with such rows is sampled when it is collected, and the next one is
launched after that.

Tested with a double of the device; the hardware has not run it yet.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.device import DeviceRuntime
from engine.attention.staging import SETS, Rotation, Staging
from engine.executor.base import ForwardBatch, SampledToken, SamplingRow, StepResult
from engine.executor.sampler import NonFiniteLogits
from engine.executor.torch_executor import TorchExecutor


class TokenReturn:
    """Pinned memory for the tokens of one batch and their logits, and the event behind the copies to it."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._arrived = runtime.event()
        self._tokens = runtime.pinned(0, torch.int64)
        self._logits = runtime.pinned(0, torch.float32)

    def send(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Start the copies. tokens [S] int64, logits [S] float32, both on the device."""
        count = len(tokens)
        if count > len(self._tokens):
            self._tokens = self._runtime.pinned(2 * count, torch.int64)
            self._logits = self._runtime.pinned(2 * count, torch.float32)
        if count:
            self._runtime.fetch(self._tokens[:count], tokens)
            self._runtime.fetch(self._logits[:count], logits)
        self._arrived.record()

    def take(self, count: int) -> tuple[list[int], list[float]]:
        """The first `count` tokens and logits, once they are there."""
        self._arrived.wait()
        return self._tokens[:count].tolist(), self._logits[:count].tolist()


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
        self._returns = Rotation(lambda: TokenReturn(runtime), returns)
        self._carriers = Rotation(lambda: Staging(runtime, torch.int64), SETS)
        self._launched: deque[_Launched] = deque()
        #: [S] int64 on the device: tokens of the last batch that was launched, in the order of its sampling.
        self._last: torch.Tensor | None = None

    def allows_next(self, batch: ForwardBatch) -> bool:
        """Whether its tokens are chosen without the host."""
        return all(map(_is_chosen_alone, batch.sampling))

    def launch(self, batch: ForwardBatch) -> None:
        """Start forward pass, sampling and the copy of the tokens. Raises as `forward` does, with nothing started."""
        logits = self.forward(batch, rows=[row.row for row in batch.sampling])
        if not self.allows_next(batch):
            self._last = None
            self._launched.append(_Launched(batch, None, logits))
            return
        with torch.inference_mode():
            tokens, best = self._sampler.largest(logits)
            coming = self._returns.next()
            coming.send(tokens, best.float())
        self._last = tokens
        self._launched.append(_Launched(batch, coming, None))

    def collect(self) -> StepResult:
        """Wait for the oldest batch. Raises NonFiniteLogits, and what the device reports late."""
        batch, coming, logits = self._launched.popleft()
        if coming is None:
            assert logits is not None, "either tokens come or logits are sampled"
            with torch.inference_mode():
                return StepResult(step=batch.step, tokens=self._sampler.sample(logits, batch.sampling))
        with torch.inference_mode():
            tokens, best = coming.take(len(batch.sampling))
        for row, logit in zip(batch.sampling, best, strict=True):
            if not np.isfinite(logit):
                where = f"request {row.rid}, position {row.position}"
                raise NonFiniteLogits(f"{where}: the best logit is {logit}; a finite number is needed")
        return StepResult(
            step=batch.step,
            tokens=tuple(SampledToken(row.rid, token) for row, token in zip(batch.sampling, tokens, strict=True)),
        )

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


def _is_chosen_alone(row: SamplingRow) -> bool:
    """Whether the largest logit is the answer, and nothing else is asked for."""
    params = row.params
    is_plain = row.history is None and row.grammar is None and row.output_index >= params.min_new_tokens
    return is_plain and params.is_greedy and params.logprobs is None
