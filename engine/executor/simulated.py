"""SimulatedExecutor. Owns: made-up tokens under the real scheduler and cache; no model, no torch.

Not a mock: policies, what-if and invariant work need nothing else. A token is a hash of (seed or rid, position), so
the same request gets the same tokens whatever else is in the batch.
"""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Final

from engine.config import EngineConfig
from engine.executor.base import ExecutorInfo, ForwardBatch, SampledToken, SamplingRow, StepResult, TokenLogprobs

_VOCAB: Final = 512
_EOS: Final = 0
_DEFAULT_PAGES: Final = 1024


class SimulatedExecutor:
    """Answers printable byte tokens (ids 32 to 126), and the end token about once in 64 unless EOS is ignored."""

    def __init__(self, config: EngineConfig) -> None:
        self._step_s = config.executor.simulated_step_ms / 1e3
        self._info = ExecutorInfo(
            model=config.model.name or "simulated",
            vocab_size=_VOCAB,
            max_context_tokens=config.model.max_context_tokens or 8192,
            page_size=config.cache.page_size,
            num_pages=config.cache.num_pages or _DEFAULT_PAGES,
            attention_backend="simulated",
            device="none",
            dtype="none",
            eos_token_ids=(_EOS,),
        )

    def info(self) -> ExecutorInfo:
        return self._info

    def execute(self, batch: ForwardBatch) -> StepResult:
        """One token per sampling row; sleeps `executor.simulated_step_ms`."""
        if self._step_s:
            time.sleep(self._step_s)
        return StepResult(batch.step, tuple(_sample(row) for row in batch.sampling))

    def close(self) -> None:
        """Holds nothing."""


def _sample(row: SamplingRow) -> SampledToken:
    key = row.rid if row.params.seed is None else str(row.params.seed)
    digest = blake2b(f"{key}:{row.output_index}".encode(), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    token = 32 + value % 95
    if not row.params.ignore_eos and row.output_index + 1 > row.params.min_new_tokens and (value >> 32) % 64 == 0:
        token = _EOS
    logprobs = None
    if row.params.logprobs is not None:
        top = tuple((32 + (value + index) % 95, -1.0 - index) for index in range(row.params.logprobs))
        logprobs = TokenLogprobs(token, -1.0, top)
    return SampledToken(row.rid, token, logprobs)
