"""FlashInferBackend. Owns: attention on NVIDIA GPUs by FlashInfer's kernels. No other file of the engine imports it.

It has no logic of its own beyond this: choose a wrapper by what the batch is, fill buffers, `plan` once per step, `run`
once per layer. A ragged batch goes through the FA2 prefill kernel, one of decode rows alone through the decode wrapper,
which with tensor cores is the same compiled module. `auto` is never asked: it picks otherwise on other GPUs.

`plan` reads the lengths on the host and starts copies from them, and from pinned memory of its wrapper's own. A second
`plan` before these copies ran would overwrite what they read: hence two sets of wrappers and buffers, used by turns,
each with an event that says when it is free.

Layers with a sliding window get a plan of their own, in steps where the window hides something.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from engine.attention.device import DeviceRuntime
from engine.attention.metadata import PagedMetadata
from engine.attention.staging import SETS, Rotation, Staging

#: Bytes of the scratch memory that all wrappers share: kernels of one stream never run at once.
WORKSPACE_BYTES: Final = 128 * 1024 * 1024
_BACKEND: Final = "fa2"
_LAYOUT: Final = "NHD"


class MixedKernel(StrEnum):
    """How a batch of prompt pieces and decode rows is computed; chosen by measurements (bench/gpu_check) only.

    RAGGED   all rows in one call; its query tile follows the average piece, so decode rows leave most of theirs empty
    SPLIT    pieces and decode rows in a call each
    """

    RAGGED = "ragged"
    SPLIT = "split"


class HeadShape(NamedTuple):
    """Query heads, K/V heads, and elements of each; in the order in which `plan` takes them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True)
class _Part:
    """A planned wrapper and the rows [first, end) that it computes."""

    wrapper: Any
    first: int
    end: int


@dataclass(slots=True)
class _Set:
    """What one step uses. wrappers: (decode?, window) -> wrapper, made when first needed; 0: no window.

    `decode_staging` is for the second half of a batch that is split.
    """

    staging: Staging
    decode_staging: Staging | None
    wrappers: dict[tuple[bool, int], Any] = field(default_factory=dict)


class FlashInferBackend:
    """Attention over pages by FlashInfer.

    dtype     type of q and of the caches: float16 or bfloat16
    windows   see LlamaConfig.windows
    kernels   the module to use; None: flashinfer, imported now
    sets      wrappers and buffers used by turns
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
        kernels: Any = None,
        sets: int = SETS,
    ) -> None:
        if kernels is None:
            # Here and not above: importing takes seconds and writes to the home directory, with or without a GPU.
            import flashinfer

            kernels = flashinfer
        self._kernels = kernels
        self._runtime = runtime
        self._heads = heads
        self._dtype = dtype
        self._windows = windows
        self._mixed = mixed
        # Zeroed once, as FlashInfer asks for memory that it uses for the first time.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=runtime.device)
        self._sets = Rotation(self._new_set, sets)
        #: Batch size -> what graphs of that size use.
        self._captured: dict[int, _Set] = {}
        #: Window -> what computes its layers in this step.
        self._running: dict[int, list[_Part]] = {}
        self._of_layer: tuple[int, ...] = ()

    def _new_set(self) -> _Set:
        is_split = self._mixed is MixedKernel.SPLIT
        return _Set(
            staging=Staging(self._runtime, torch.int32),
            decode_staging=Staging(self._runtime, torch.int32) if is_split else None,
        )

    def prepare(self, metadata: PagedMetadata) -> None:
        """Plan the step: no array is looked at again until the next one."""
        chosen = self._sets.next()
        # The set as a whole: a wrapper may have been planned from the other of its buffers the last time.
        chosen.staging.wait()
        if chosen.decode_staging is not None:
            chosen.decode_staging.wait()
        longest = int(metadata.seq_lens.max(initial=0))
        self._of_layer = tuple(window if 0 < window < longest else 0 for window in self._windows)
        windows = sorted(set(self._of_layer)) or [0]
        pieces = _leading_pieces(metadata)
        if chosen.decode_staging is not None and 0 < pieces < metadata.batch_size:
            halves = [
                (chosen.staging, _requests(metadata, 0, pieces)),
                (chosen.decode_staging, _requests(metadata, pieces, metadata.batch_size)),
            ]
        else:
            halves = [(chosen.staging, metadata)]
        self._running = {window: [] for window in windows}
        first = 0
        for staging, half in halves:
            is_decode = bool((half.qo_lens == 1).all())
            for window, wrapper in self._plan(chosen, staging, half, windows, is_decode=is_decode):
                self._running[window].append(_Part(wrapper, first, first + half.num_rows))
            first += half.num_rows

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of every row: q [R, Hq, D], caches [num_pages, page_size, Hkv, D] -> [R, Hq, D]."""
        parts = self._running[self._of_layer[layer] if self._of_layer else 0]
        if len(parts) == 1:
            whole: torch.Tensor = parts[0].wrapper.run(q, (k_cache, v_cache))
            return whole
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in parts:
            part.wrapper.run(q[part.first : part.end], (k_cache, v_cache), out=out[part.first : part.end])
        return out

    def reserve_captured(self, size: int, *, max_indices: int) -> None:
        """A wrapper for graphs of `size` decode rows. It has one set: who replays a size twice waits for its copies.

        Raises ValueError for a model with windows: which of them bind changes from step to step, a graph does not.
        """
        if any(self._windows):
            raise ValueError(f"windows={self._windows}: a captured batch has one plan for all layers")
        device = self._runtime.device
        wrapper = self._kernels.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=torch.zeros(max_indices, dtype=torch.int32, device=device),
            paged_kv_last_page_len_buffer=torch.zeros(size, dtype=torch.int32, device=device),
            backend=_BACKEND,
        )
        self._captured[size] = _Set(Staging(self._runtime, torch.int32), None, {(True, 0): wrapper})

    def prepare_captured(self, metadata: PagedMetadata) -> None:
        """Plan decode rows into the buffers of their batch size, which has to be reserved."""
        chosen = self._captured[metadata.batch_size]
        planned = self._plan(chosen, chosen.staging, metadata, [0], is_decode=True)
        self._of_layer = ()
        self._running = {0: [_Part(wrapper, 0, metadata.num_rows) for _, wrapper in planned]}

    def _plan(
        self, chosen: _Set, staging: Staging, metadata: PagedMetadata, windows: list[int], *, is_decode: bool
    ) -> list[tuple[int, Any]]:
        """Fill `staging`, plan a wrapper for each of `windows`; (window, wrapper)."""
        arrays = _packed(metadata)
        indices, *host = staging.pack(arrays)
        del indices  # the kernels read page ids on the device
        on_device = staging.upload()[0]
        planned = []
        for window in windows:
            key = (is_decode, window)
            wrapper = chosen.wrappers.get(key)
            if wrapper is None:
                wrapper = chosen.wrappers[key] = self._decode_wrapper() if is_decode else self._prefill_wrapper()
            if is_decode:
                self._plan_decode(wrapper, metadata, on_device, host, window)
            else:
                self._plan_prefill(wrapper, metadata, on_device, host, window)
            planned.append((window, wrapper))
        # Copies from the wrappers' own pinned memory were started before this place as well.
        staging.sent()
        return planned

    def _prefill_wrapper(self) -> Any:
        return self._kernels.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT, backend=_BACKEND)

    def _decode_wrapper(self) -> Any:
        return self._kernels.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, _LAYOUT, use_tensor_cores=True, backend=_BACKEND
        )

    def _plan_prefill(
        self, wrapper: Any, metadata: PagedMetadata, indices: torch.Tensor, host: list[torch.Tensor], window: int
    ) -> None:
        qo_indptr, kv_indptr, last_page_len, seq_lens = host
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            indices,
            last_page_len,
            *self._heads,
            metadata.page_size,
            causal=metadata.causal,
            seq_lens=seq_lens,
            **self._common(window),
        )

    def _plan_decode(
        self, wrapper: Any, metadata: PagedMetadata, indices: torch.Tensor, host: list[torch.Tensor], window: int
    ) -> None:
        _, kv_indptr, last_page_len, seq_lens = host
        wrapper.plan(
            kv_indptr,
            indices,
            last_page_len,
            *self._heads,
            metadata.page_size,
            seq_lens=seq_lens,
            **self._common(window),
        )

    def _common(self, window: int) -> dict[str, Any]:
        """What every plan says. Types by name: the wrappers' default is float16."""
        return {
            "sm_scale": self._heads.head_dim**-0.5,
            # FlashInfer counts the tokens before a row, this engine the row itself as well; -1: all.
            "window_left": window - 1,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
            "non_blocking": True,
        }


def _packed(metadata: PagedMetadata) -> list[np.ndarray]:
    """The int32 arrays of a plan: page ids first, then what `plan` reads on the host."""
    return [
        metadata.kv_indices,
        metadata.qo_indptr,
        metadata.kv_indptr,
        metadata.last_page_len,
        metadata.seq_lens,
    ]


def _leading_pieces(metadata: PagedMetadata) -> int:
    """Requests before the decode rows at the end of the batch."""
    others = np.flatnonzero(metadata.qo_lens != 1)
    return int(others[-1]) + 1 if len(others) else 0


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
