"""Decode graphs. Owns: a captured forward pass for each of some batch sizes, and its replay for batches of decode rows.

A step of few rows on a GPU is bound by starting its kernels one by one; a graph starts them all at once. What a graph
reads has to lie where it lay when it was captured: rows are packed into a buffer of its size, filled up with padded
ones. The head is inside, sampling is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import CapturableAttention
from engine.attention.device import DeviceRuntime, Graph
from engine.attention.metadata import PagedMetadata
from engine.attention.padding import all_padding, captured_sizes, padded, smallest_fit
from engine.attention.staging import Staging
from engine.executor.base import ForwardBatch
from engine.models.decoder import Decoder, LayerCache


@dataclass(slots=True)
class _Captured:
    """logits [size, vocab], written by each replay."""

    staging: Staging
    graph: Graph
    logits: torch.Tensor


class DecodeGraphs:
    """Graphs for batches of up to `largest` decode rows.

    caches       of a pool whose page `spare_page` belongs to nobody
    max_pages    pages of the longest request
    """

    def __init__(
        self,
        model: Decoder,
        attention: CapturableAttention,
        runtime: DeviceRuntime,
        *,
        caches: list[LayerCache],
        largest: int,
        page_size: int,
        spare_page: int,
        max_pages: int,
    ) -> None:
        self._model = model
        self._attention = attention
        self._runtime = runtime
        self._caches = caches
        self._spare_page = spare_page
        self._max_pages = max_pages
        self._sizes = captured_sizes(largest)
        # From the largest on: the smaller ones find its memory in the pool they share.
        self._captured = {size: self._capture(size, page_size) for size in reversed(self._sizes)}

    def forward(
        self, batch: ForwardBatch, rows: Sequence[int], take_over: Callable[[ForwardBatch, torch.Tensor], None]
    ) -> torch.Tensor | None:
        """Logits [S, vocab] of `rows`; None, with nothing done, for a batch that is not for a graph.

        take_over  fills in tokens that the batch carries over from the one before, once the others are sent
        """
        meta = batch.metadata
        if meta.num_rows != meta.batch_size or not (meta.qo_lens == 1).all():
            return None
        size = smallest_fit(self._sizes, meta.batch_size)
        if size is None or len(rows) > size or len(meta.kv_indices) + size - meta.batch_size > size * self._max_pages:
            return None
        captured = self._captured[size]
        filled = padded(meta, size, self._spare_page)
        token_ids = np.concatenate((batch.token_ids, np.zeros(size - meta.batch_size, dtype=np.int64)))
        self._attention.prepare_captured(filled)
        sent, *_, wanted = _send(captured.staging, token_ids, filled, rows)
        take_over(batch, sent)
        captured.graph.replay()
        return captured.logits.index_select(0, wanted)

    def _capture(self, size: int, page_size: int) -> _Captured:
        self._attention.reserve_captured(size, max_indices=size * self._max_pages)
        staging = Staging(self._runtime, torch.int64, capacity=4 * size)
        meta = all_padding(size, page_size=page_size, spare_page=self._spare_page)
        self._attention.prepare_captured(meta)
        token_ids, positions, slots, _ = _send(staging, np.zeros(size, dtype=np.int64), meta, range(size))
        logits = torch.empty(0)

        def work() -> None:
            nonlocal logits
            logits = self._model.forward(token_ids, positions, slots, caches=self._caches, attention=self._attention)

        graph = self._runtime.capture(work)
        return _Captured(staging, graph, logits)


def _send(staging: Staging, token_ids: np.ndarray, metadata: PagedMetadata, rows: Sequence[int]) -> list[torch.Tensor]:
    """token_ids, positions, out_slots [R] and rows [S] on the device; the first three always in the same place."""
    staging.pack([token_ids, metadata.positions, metadata.out_slots, np.array(rows, dtype=np.int64)])
    views = staging.upload()
    staging.sent()
    return views
