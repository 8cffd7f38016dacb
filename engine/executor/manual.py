"""ManualDriver. Owns: driving an executor by hand, without a scheduler, for benches, tests and numerical checks.

It hands out pages in a given order, builds the batches that a scheduler would ask for, and appends sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.attention.metadata import PagedMetadata
from engine.executor.base import Executor, ForwardBatch, SampledToken, SamplingRow
from engine.sampling_params import SamplingParams

GREEDY = SamplingParams(max_new_tokens=1 << 20, temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class ManualSequence:
    """One request under manual control. `computed_len` tokens of `tokens` have K/V in `pages`."""

    rid: str
    tokens: list[int]
    params: SamplingParams
    prompt_len: int
    pages: list[int] = field(default_factory=list)
    computed_len: int = 0
    sampled: list[SampledToken] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        """The tokens sampled so far."""
        return self.tokens[self.prompt_len :]

    @property
    def missing_len(self) -> int:
        """Tokens without K/V: a prompt's rest, or 1 while decoding."""
        return len(self.tokens) - self.computed_len


class ManualDriver:
    """Builds batches for one executor. `page_order`: the order in which pages are handed out; None: ascending."""

    def __init__(self, executor: Executor, *, page_order: Iterable[int] | None = None) -> None:
        info = executor.info()
        self.executor = executor
        self._page_size = info.page_size
        order = range(info.num_pages) if page_order is None else page_order
        self._free = list(order)[::-1]
        self._step = 0

    def add(
        self,
        rid: str,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        cached: ManualSequence | None = None,
        cached_pages: int = 0,
    ) -> ManualSequence:
        """A new sequence; its first `cached_pages` pages are those of `cached`, whose tokens there must be equal."""
        sequence = ManualSequence(rid=rid, tokens=list(prompt), params=params, prompt_len=len(prompt))
        if cached is not None:
            end = cached_pages * self._page_size
            assert end < len(prompt), "at least one token must be left to compute"
            assert end <= cached.computed_len, "only computed pages can be shared"
            assert sequence.tokens[:end] == cached.tokens[:end], "a shared page must hold the same tokens"
            sequence.pages = cached.pages[:cached_pages]
            sequence.computed_len = end
        return sequence

    def batch(self, work: Sequence[tuple[ManualSequence, int]]) -> ForwardBatch:
        """One batch that computes the next `n` tokens of each (sequence, n); gives sequences the pages they lack."""
        page = self._page_size
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        qo_indptr, kv_indptr, kv_indices, last = [0], [0], [], []
        sampling = []
        for sequence, count in work:
            start, end = sequence.computed_len, sequence.computed_len + count
            assert 0 < count <= sequence.missing_len, f"{sequence.rid}: {count} of {sequence.missing_len} tokens"
            while len(sequence.pages) * page < end:
                sequence.pages.append(self._free.pop())
            pages = sequence.pages[: -(-end // page)]
            token_ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [pages[i // page] * page + i % page for i in range(start, end)]
            qo_indptr.append(len(token_ids))
            kv_indices += pages
            kv_indptr.append(len(kv_indices))
            last.append((end - 1) % page + 1)
            if end == len(sequence.tokens):
                sampling.append(
                    SamplingRow(
                        rid=sequence.rid,
                        row=len(token_ids) - 1,
                        position=end,
                        output_index=len(sequence.outputs),
                        params=sequence.params,
                        history=np.array(sequence.tokens, dtype=np.int64) if sequence.params.shapes_logits else None,
                    )
                )
        metadata = PagedMetadata(
            qo_indptr=np.array(qo_indptr, dtype=np.int32),
            kv_indptr=np.array(kv_indptr, dtype=np.int32),
            kv_indices=np.array(kv_indices, dtype=np.int32),
            last_page_len=np.array(last, dtype=np.int32),
            out_slots=np.array(slots, dtype=np.int64),
            positions=np.array(positions, dtype=np.int32),
            page_size=page,
        )
        return ForwardBatch(
            step=self._step,
            rids=tuple(sequence.rid for sequence, _ in work),
            token_ids=np.array(token_ids, dtype=np.int64),
            metadata=metadata,
            sampling=tuple(sampling),
        )

    def step(self, work: Sequence[tuple[ManualSequence, int]]) -> None:
        """Execute one batch and append what it sampled to its sequences."""
        result = self.executor.execute(self.batch(work))
        self._step += 1
        by_rid = {token.rid: token for token in result.tokens}
        for sequence, count in work:
            sequence.computed_len += count
            if (token := by_rid.get(sequence.rid)) is not None:
                sequence.sampled.append(token)
                sequence.tokens.append(token.token_id)

    def generate(self, sequences: Sequence[ManualSequence], count: int) -> None:
        """Prefill what is missing in one step, then decode all together until each has `count` outputs."""
        while pending := [s for s in sequences if len(s.outputs) < count]:
            self.step([(s, s.missing_len) for s in pending])

    def release(self, sequence: ManualSequence, *, keep_pages: int = 0) -> None:
        """Give the pages of `sequence` back, but the first `keep_pages`. The sequence is over."""
        self._free += sequence.pages[keep_pages:][::-1]
        sequence.pages = []
