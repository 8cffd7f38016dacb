"""FlashInfer's wrappers. Owns: how each of them is made, planned and run, and what it cannot do.

Nothing is chosen here: that is the backend's part (engine/attention/flashinfer.py). Every kernel writes its rows one
behind the other, whatever the strides of q: what it writes to is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

import torch

from engine.attention.device import DeviceRuntime
from engine.attention.metadata import PagedMetadata

_LAYOUT: Final = "NHD"
#: The compute capability that FA3 is written for: Hopper.
FA3_CAPABILITY: Final = (9, 0)
#: Blocks of POD count in a table with a place for each multiprocessor, which they find by numbers of the hardware. Its
#: authors tried that on these (A100, H100); where the numbers are others, it would write beside the table.
POD_CAPABILITIES: Final = ((8, 0), (9, 0))
#: Decode rows of POD fill tiles of so many: all query heads of a K/V head have to fit one.
POD_GROUP: Final = 16


class MixedKernel(StrEnum):
    """How a batch of prompt pieces and decode rows is computed.

    RAGGED    all rows in one call; its query tile follows the average piece, so decode rows leave most of theirs empty
    SPLIT     pieces and decode rows in a call each
    HOLISTIC  all rows in one call of BatchAttention, which has a tile for each kind, and waits for the device in each
              plan; layers whose window hides something are computed as by RAGGED, since it has no windows
    POD       pieces and decode rows in one call, side by side on each multiprocessor
    """

    RAGGED = "ragged"
    SPLIT = "split"
    HOLISTIC = "holistic"
    POD = "pod"


class PrefillKernel(StrEnum):
    """What computes pieces of prompts that no decode rows share a call with.

    FA2   cuts long contexts into parts that are computed side by side
    FA3   for Hopper; does not, and reads K/V once for each query head
    """

    FA2 = "fa2"
    FA3 = "fa3"


class UnfitKernel(ValueError):
    """A kernel that this device or model is not for; the message says what is needed and what is there."""

    def __init__(self, kernel: MixedKernel | PrefillKernel, why: str) -> None:
        super().__init__(f"{kernel}: {why}")
        self.kernel = kernel
        self.why = why


class HeadShape(NamedTuple):
    """Query heads, K/V heads, and elements of each; in the order in which `plan` takes them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Library:
    """What every wrapper is made of and planned with.

    module     flashinfer
    workspace  uint8, scratch memory that wrappers share: kernels of one stream never run at once
    dtype      type of q and of the caches
    """

    module: Any
    runtime: DeviceRuntime
    workspace: torch.Tensor
    heads: HeadShape
    dtype: torch.dtype

    def types(self) -> dict[str, Any]:
        """What every plan says. By name: the wrappers' default type is float16."""
        return {
            "sm_scale": self.heads.head_dim**-0.5,
            "q_data_type": self.dtype,
            "kv_data_type": self.dtype,
        }

    def windowed(self, window: int) -> dict[str, Any]:
        """What every plan says that knows windows."""
        # FlashInfer counts the tokens before a row, this engine the row itself as well; -1: all.
        return self.types() | {"window_left": window - 1, "non_blocking": True}


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch, or the pieces or decode rows of one, whose arrays are under way. All int32.

    indices   [pages] on the device
    others    see PagedMetadata; pinned memory, which `plan` reads on the host and starts copies from
    """

    metadata: PagedMetadata
    indices: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    last_page_len: torch.Tensor
    seq_lens: torch.Tensor


class Kernel(Protocol):
    """Attention of one batch: `plan` once per step, `run` for each layer of the window it was planned for."""

    def plan(self, parts: Sequence[Sent], window: int) -> None:
        """parts: the batch, or its pieces and its decode rows where the kernel takes them apart. window 0: none."""
        ...

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """q [R, Hq, D], caches [num_pages, page_size, Hkv, D] each -> [R, Hq, D]."""
        ...


class Prefill:
    """Any rows in one call."""

    def __init__(self, library: Library, kernel: PrefillKernel) -> None:
        self._library = library
        self._wrapper = library.module.BatchPrefillWithPagedKVCacheWrapper(
            library.workspace, _LAYOUT, backend=kernel.value
        )

    def plan(self, parts: Sequence[Sent], window: int) -> None:
        (batch,) = parts
        self._wrapper.plan(
            batch.qo_indptr,
            batch.kv_indptr,
            batch.indices,
            batch.last_page_len,
            *self._library.heads,
            batch.metadata.page_size,
            causal=batch.metadata.causal,
            seq_lens=batch.seq_lens,
            **self._library.windowed(window),
        )

    def run(
        self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`out`: contiguous, where to write; None: into memory of its own."""
        return _written(self._wrapper, q, caches, out)


class Decode:
    """One row of each request in one call; with tensor cores this is the compiled module of FA2.

    max_rows, max_indices   of a batch that a graph is captured with, which has buffers of its own; None: of no graph
    """

    def __init__(self, library: Library, *, max_rows: int | None = None, max_indices: int = 0) -> None:
        self._library = library
        buffers: dict[str, Any] = {}
        if max_rows is not None:
            sizes = {"indptr": max_rows + 1, "indices": max_indices, "last_page_len": max_rows}
            device = library.runtime.device
            buffers = {
                f"paged_kv_{name}_buffer": torch.zeros(size, dtype=torch.int32, device=device)
                for name, size in sizes.items()
            }
            buffers["use_cuda_graph"] = True
        self._wrapper = library.module.BatchDecodeWithPagedKVCacheWrapper(
            library.workspace, _LAYOUT, use_tensor_cores=True, backend=PrefillKernel.FA2.value, **buffers
        )

    def plan(self, parts: Sequence[Sent], window: int) -> None:
        (batch,) = parts
        self._wrapper.plan(
            batch.kv_indptr,
            batch.indices,
            batch.last_page_len,
            *self._library.heads,
            batch.metadata.page_size,
            seq_lens=batch.seq_lens,
            **self._library.windowed(window),
        )

    def run(
        self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Prefill.run`."""
        return _written(self._wrapper, q, caches, out)


class Split:
    """Pieces and decode rows in a call each, by kernels that others may use too."""

    def __init__(self, pieces: Prefill, decodes: Decode) -> None:
        self._pieces = pieces
        self._decodes = decodes
        self._first_decode = 0

    def plan(self, parts: Sequence[Sent], window: int) -> None:
        pieces, decodes = parts
        self._pieces.plan([pieces], window)
        self._decodes.plan([decodes], window)
        self._first_decode = pieces.metadata.num_rows

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out, first = _contiguous_like(q), self._first_decode
        self._pieces.run(q[:first], caches, out[:first])
        self._decodes.run(q[first:], caches, out[first:])
        return out


class Holistic:
    """BatchAttention: any rows in one call, without windows.

    It brings 384 MiB of scratch memory along. `plan` waits for the device before it writes its pinned memory, so one of
    them serves any number of sets.
    """

    def __init__(self, library: Library) -> None:
        """Raises UnfitKernel for heads that its scratch memory is too small for, which it says in any `plan`."""
        self._library = library
        self._wrapper = library.module.BatchAttention(_LAYOUT, str(library.runtime.device))
        one = torch.ones(1, dtype=torch.int32)
        page = torch.zeros(1, dtype=torch.int32, device=library.runtime.device)
        bounds = torch.tensor([0, 1], dtype=torch.int32)
        try:
            self._plan(bounds, bounds, page, one, page_size=1, causal=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UnfitKernel(
                MixedKernel.HOLISTIC,
                f"FlashInfer cannot plan it for {library.heads.num_kv_heads} K/V heads of {library.heads.head_dim}: "
                f"{error}",
            ) from error

    def plan(self, parts: Sequence[Sent], window: int) -> None:
        assert not window, "it would compute the whole context"
        (batch,) = parts
        meta = batch.metadata
        self._plan(
            batch.qo_indptr,
            batch.kv_indptr,
            batch.indices,
            batch.seq_lens,
            page_size=meta.page_size,
            causal=meta.causal,
        )

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out = _contiguous_like(q)
        self._wrapper.run(q, caches, out=out)
        return out

    def _plan(self, *arrays: torch.Tensor, page_size: int, causal: bool) -> None:
        heads = self._library.heads
        self._wrapper.plan(*arrays, *heads, heads.head_dim, page_size, causal=causal, **self._library.types())


class Pod:
    """Pieces and decode rows in one call that takes them apart. It writes to memory of its own, hence one copy more."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._wrapper = library.module.BatchPODWithPagedKVCacheWrapper(library.workspace, _LAYOUT)
        self._first_decode = 0
        self._causal = True

    def plan(self, parts: Sequence[Sent], window: int) -> None:
        pieces, decodes = parts
        self._first_decode, self._causal = pieces.metadata.num_rows, pieces.metadata.causal
        self._wrapper.plan(
            pieces.qo_indptr,
            pieces.kv_indptr,
            pieces.indices,
            pieces.last_page_len,
            decodes.qo_indptr,
            decodes.kv_indptr,
            decodes.indices,
            decodes.last_page_len,
            *self._library.heads,
            pieces.metadata.page_size,
            **self._library.windowed(window),
        )

    def run(self, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        first = self._first_decode
        return torch.cat(self._wrapper.run(q[:first], caches, q[first:], caches, causal_p=self._causal))


def check_fit(mixed: MixedKernel, prefill: PrefillKernel, runtime: DeviceRuntime, heads: HeadShape) -> None:
    """Raise UnfitKernel where the device or the heads are not what a kernel is for."""
    has = ".".join(map(str, runtime.capability))
    if prefill is PrefillKernel.FA3 and runtime.capability != FA3_CAPABILITY:
        raise UnfitKernel(
            prefill, f"its kernels are for compute capability 9.0 (Hopper), this GPU has {has}: use {PrefillKernel.FA2}"
        )
    if mixed is not MixedKernel.POD:
        return
    if runtime.capability not in POD_CAPABILITIES:
        known = " and ".join(f"{major}.{minor}" for major, minor in POD_CAPABILITIES)
        raise UnfitKernel(
            mixed, f"it was only ever tried on compute capability {known}, this GPU has {has}: use {MixedKernel.SPLIT}"
        )
    group = heads.num_heads // heads.num_kv_heads
    if group > POD_GROUP:
        raise UnfitKernel(
            mixed,
            f"its tiles hold {POD_GROUP} query heads of a K/V head, the model has {group}: use {MixedKernel.SPLIT}",
        )


def _written(
    wrapper: Any, q: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor | None
) -> torch.Tensor:
    target = _contiguous_like(q) if out is None else out
    wrapper.run(q, caches, out=target)
    return target


def _contiguous_like(q: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)
