"""FlashInferBackend. Owns: attention on NVIDIA GPUs by FlashInfer's kernels: which of them computes a batch, and their
buffers. FlashInfer's small operators are in engine/models/flashinfer_ops.py; no other file imports it.

Pieces of prompts go through the prefill wrapper, decode rows through the decode wrapper, batches of both as
`MixedKernel` says. FlashInfer's `auto` is never asked: it picks otherwise on other GPUs.

`plan` reads the lengths on the host and starts copies from them, and from pinned memory of its wrapper's own. A second
`plan` before these copies ran would overwrite what they read: hence two sets of wrappers and buffers, used by turns,
each with events that say when it is free.

Layers with a sliding window get a plan of their own, in steps where the window hides something.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import numpy as np
import torch

from engine.attention.device import DeviceRuntime
from engine.attention.flashinfer_kernels import (
    Decode,
    HeadShape,
    Holistic,
    Kernel,
    Library,
    MixedKernel,
    Pod,
    Prefill,
    PrefillKernel,
    Sent,
    Split,
    UnfitKernel,
    check_fit,
)
from engine.attention.metadata import PagedMetadata
from engine.attention.staging import SETS, Rotation, Staging

__all__ = ["FlashInferBackend", "HeadShape", "MixedKernel", "PrefillKernel", "UnfitKernel", "first_decode"]

#: Bytes of the scratch memory that all wrappers share but BatchAttention, which brings its own.
WORKSPACE_BYTES: Final = 128 * 1024 * 1024
#: Ways to compute a mixed batch that take its pieces and its decode rows apart.
_IN_PARTS: Final = (MixedKernel.SPLIT, MixedKernel.POD)


class _Kind(StrEnum):
    """Kernels of a set; the first two are those of PrefillKernel."""

    FA2 = "fa2"
    FA3 = "fa3"
    DECODE = "decode"
    SPLIT = "split"
    HOLISTIC = "holistic"
    POD = "pod"


@dataclass(slots=True)
class _Set:
    """What one step uses. stagings: one for each part of a batch. kernels: by kind and window, made when needed."""

    stagings: list[Staging]
    kernels: dict[tuple[_Kind, int], Kernel] = field(default_factory=dict)

    def wait(self) -> None:
        """Until all is free: a wrapper may have been planned from the other of the buffers the last time."""
        for staging in self.stagings:
            staging.wait()


class FlashInferBackend:
    """Attention over pages by FlashInfer.

    dtype     type of q and of the caches: float16 or bfloat16
    windows   see LlamaConfig.windows
    mixed     what computes batches of pieces and decode rows
    prefill   what computes pieces without decode rows beside them
    kernels   the module to use; None: flashinfer, imported now
    sets      wrappers and buffers used by turns

    Raises UnfitKernel where the device or the model is not what `mixed` or `prefill` is for.
    """

    name = "flashinfer"

    def __init__(
        self,
        *,
        runtime: DeviceRuntime,
        heads: HeadShape,
        dtype: torch.dtype,
        windows: tuple[int, ...] = (),
        mixed: MixedKernel = MixedKernel.RAGGED,
        prefill: PrefillKernel = PrefillKernel.FA2,
        kernels: Any = None,
        sets: int = SETS,
    ) -> None:
        check_fit(mixed, prefill, runtime, heads)
        if kernels is None:
            # Here and not above: importing takes seconds and writes to the home directory, with or without a GPU.
            import flashinfer

            kernels = flashinfer
        self._runtime = runtime
        self._windows = windows
        self._mixed = mixed
        self._prefill = _Kind(prefill)
        # Zeroed once, as FlashInfer asks for memory that it uses for the first time.
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=runtime.device)
        self._library = Library(kernels, runtime, workspace, heads, dtype)
        # Now, so that its memory is taken when the K/V pool is sized.
        self._holistic = Holistic(self._library) if mixed is MixedKernel.HOLISTIC else None
        self._sets = Rotation(self._new_set, sets)
        #: Batch size -> what graphs of that size use.
        self._captured: dict[int, _Set] = {}
        #: Window -> what computes its layers in this step.
        self._running: dict[int, Kernel] = {}
        self._of_layer: tuple[int, ...] = ()

    def _new_set(self) -> _Set:
        return _Set([Staging(self._runtime, torch.int32) for _ in range(1 + (self._mixed in _IN_PARTS))])

    def prepare(self, metadata: PagedMetadata) -> None:
        """Plan the step: no array is looked at again until the next one."""
        chosen = self._sets.next()
        chosen.wait()
        longest = int(metadata.seq_lens.max(initial=0))
        self._of_layer = tuple(window if 0 < window < longest else 0 for window in self._windows)
        windows = sorted(set(self._of_layer)) or [0]
        first = first_decode(metadata)
        is_mixed = 0 < first < metadata.batch_size
        parts = [metadata]
        if is_mixed and self._mixed in _IN_PARTS:
            parts = [_requests(metadata, 0, first), _requests(metadata, first, metadata.batch_size)]
        kind = self._prefill if first else _Kind.DECODE
        kinds = {window: self._mixed_kind(window) if is_mixed else kind for window in windows}
        self._plan(chosen, parts, kinds)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of every row: q [R, Hq, D], caches [num_pages, page_size, Hkv, D] -> [R, Hq, D]."""
        return self._running[self._of_layer[layer] if self._of_layer else 0].run(q, (k_cache, v_cache))

    def reserve_captured(self, size: int, *, max_indices: int) -> None:
        """A wrapper for graphs of `size` decode rows. It has one set: who replays a size twice waits for its copies.

        Raises ValueError for a model with windows: which of them bind changes from step to step, a graph does not.
        """
        if any(self._windows):
            raise ValueError(f"windows={self._windows}: a captured batch has one plan for all layers")
        kernel = Decode(self._library, max_rows=size, max_indices=max_indices)
        self._captured[size] = _Set([Staging(self._runtime, torch.int32)], {(_Kind.DECODE, 0): kernel})

    def prepare_captured(self, metadata: PagedMetadata) -> None:
        """Plan decode rows into the buffers of their batch size, which has to be reserved."""
        self._of_layer = ()
        self._plan(self._captured[metadata.batch_size], [metadata], {0: _Kind.DECODE})

    def _mixed_kind(self, window: int) -> _Kind:
        """What computes a mixed batch in layers with `window`; 0: none."""
        if self._mixed is MixedKernel.RAGGED or (self._mixed is MixedKernel.HOLISTIC and window):
            return _Kind.FA2
        return _Kind(self._mixed)

    def _plan(self, chosen: _Set, parts: Sequence[PagedMetadata], kinds: Mapping[int, _Kind]) -> None:
        """Send the arrays of `parts`, and plan a kernel for each window."""
        used = chosen.stagings[: len(parts)]
        sent = [_send(staging, part) for staging, part in zip(used, parts, strict=True)]
        self._running = {}
        for window, kind in kinds.items():
            kernel = self._running[window] = self._kernel(chosen, kind, window)
            kernel.plan(sent, window)
        # Copies from the wrappers' own pinned memory were started before this place as well.
        for staging in used:
            staging.sent()

    def _kernel(self, chosen: _Set, kind: _Kind, window: int) -> Kernel:
        key = (kind, window)
        if key not in chosen.kernels:
            chosen.kernels[key] = self._made(chosen, kind, window)
        return chosen.kernels[key]

    def _made(self, chosen: _Set, kind: _Kind, window: int) -> Kernel:
        match kind:
            case _Kind.DECODE:
                return Decode(self._library)
            case _Kind.SPLIT:
                pieces, decodes = (self._kernel(chosen, part, window) for part in (self._prefill, _Kind.DECODE))
                assert isinstance(pieces, Prefill)
                assert isinstance(decodes, Decode)
                return Split(pieces, decodes)
            case _Kind.HOLISTIC:
                assert self._holistic is not None, "made with the backend"
                return self._holistic
            case _Kind.POD:
                return Pod(self._library)
            case _:
                return Prefill(self._library, PrefillKernel(kind))


def first_decode(metadata: PagedMetadata) -> int:
    """The first of the requests at the end of the batch that have one row each; before it are pieces.

    0: no pieces; the number of requests: no decode rows, or nothing but requests without rows before them, which are
    computed together.
    """
    others = np.flatnonzero(metadata.qo_lens != 1)
    first = int(others[-1]) + 1 if len(others) else 0
    return first if not first or metadata.qo_indptr[first] else metadata.batch_size


def _send(staging: Staging, metadata: PagedMetadata) -> Sent:
    """Start the copy of a part's arrays. `staging.sent` is for whoever knows of the last copy that reads them."""
    _, *host = staging.pack(
        [metadata.kv_indices, metadata.qo_indptr, metadata.kv_indptr, metadata.last_page_len, metadata.seq_lens]
    )
    return Sent(metadata, staging.upload()[0], *host)


def _requests(metadata: PagedMetadata, first: int, end: int) -> PagedMetadata:
    """Requests [first, end) as a batch of their own."""
    qo, kv = metadata.qo_indptr[first : end + 1], metadata.kv_indptr[first : end + 1]
    return replace(
        metadata,
        qo_indptr=qo - qo[0],
        kv_indptr=kv - kv[0],
        kv_indices=metadata.kv_indices[kv[0] : kv[-1]],
        last_page_len=metadata.last_page_len[first:end],
        out_slots=metadata.out_slots[qo[0] : qo[-1]],
        positions=metadata.positions[qo[0] : qo[-1]],
    )
