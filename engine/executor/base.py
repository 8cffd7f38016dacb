"""Executor protocol. Owns: the contract between the engine loop and whatever computes tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.attention.metadata import PagedMetadata
from engine.sampling_params import SamplingParams

#: Called with nanoseconds, by any thread; see LendingExecutor.
LendCore = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor offers. `num_pages` excludes any dummy page of its own; `kernels` is for people to read."""

    model: str
    vocab_size: int
    max_context_tokens: int
    page_size: int
    num_pages: int
    attention_backend: str
    device: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    kernels: str = ""


class GrammarState(Protocol):
    """Where one request's output stands in its grammar."""

    def allowed(self) -> NDArray[np.int32]:
        """One bit for each token of the vocabulary, lowest bit first: may it come next."""
        ...


class SamplingRow(msgspec.Struct, frozen=True, gc=False):
    """How to sample one row.

    row        index of the flattened query row whose logits are sampled
    position   index of the new token in its sequence (prompt_len + outputs so far): feeds the seeded hash
    history    [position] int64 prompt and outputs so far, valid until the step is settled; None unless
               `params.shapes_logits`
    grammar    what `params.grammar` allows next
    """

    rid: str
    row: int
    position: int
    output_index: int
    params: SamplingParams
    history: NDArray[np.int64] | None = None
    grammar: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One flattened batch: prompt pieces first, then decode rows (queries of length one).

    rids        [B] request ids in `metadata` order
    token_ids   [R] int64 input token of each row
    sampling    the rows that yield a token, in plan.sampling order
    carried     (row, place) of decode rows whose input token the batch launched before brings, and the host does not
                know yet: the token at `place` in the sampling of that batch. `token_ids` holds 0 there
    """

    step: int
    rids: tuple[str, ...]
    token_ids: NDArray[np.int64]
    metadata: PagedMetadata
    sampling: tuple[SamplingRow, ...]
    carried: tuple[tuple[int, int], ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probability (natural log, after temperature 1, before filtering) of a token and of the best ones.

    top   (token_id, logprob), best first
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(msgspec.Struct, frozen=True):
    """One output token of one request."""

    rid: str
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Exactly one token per sampling row, in that order."""

    step: int
    tokens: tuple[SampledToken, ...]


class Executor(Protocol):
    """Computes one batch at a time. Owns the K/V memory; page ids come from the scheduler."""

    def info(self) -> ExecutorInfo: ...

    def execute(self, batch: ForwardBatch) -> StepResult:
        """Write K/V of every row, run the model, sample `batch.sampling`. May raise; the step then fails whole."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class LendingExecutor(Executor, Protocol):
    """An executor on a CPU. Where it computes with a thread on each of the process's processors, it can leave one of
    them to others for a moment: whoever runs there anyway would put a thread aside in the middle of its task.

    lend_core   for as many nanoseconds from now one thread fewer computes; 0: all do again, at once. None: there is a
                processor to spare, or nothing that can be left
    """

    lend_core: LendCore | None


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """An executor that can be handed a batch while it computes another. It does them in the order of their launches."""

    def allows_next(self, batch: ForwardBatch) -> bool:
        """Whether the batch behind this one may be launched before this one was collected."""
        ...

    def launch(self, batch: ForwardBatch) -> None:
        """Start a batch behind those that were launched before. May raise; then nothing of it is started."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest batch that was launched and not collected. May raise; that step then fails whole."""
        ...
