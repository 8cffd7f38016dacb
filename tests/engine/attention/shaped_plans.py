"""What a plan of FlashInfer does to memory, and what stands in the place of its kernels. Owns: the copies that a plan
starts, what a kernel finds on the device, and the readable backend computing from that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.attention.metadata import PagedMetadata
from engine.attention.torch_reference import TorchReferenceBackend
from tests.engine.attention.late_device import LateDevice, refuse_poison

#: qo_indptr, kv_indptr, page ids and last_page_len, as a kernel reads them on the device.
Arrays = list[np.ndarray]


class PlanMemory:
    """What one plan fills: pinned memory of its own with its twin on the device, and the arrays of the batch.

    buffers   of a graph, written in place, in the order of Arrays (None: there is none); () for a wrapper of no graph
    """

    def __init__(self, device: LateDevice, buffers: Sequence[torch.Tensor | None] = ()) -> None:
        self._device = device
        self._buffers = list(buffers)
        self._is_graph = bool(buffers)
        # As FlashInfer: 8 MiB of which a plan uses little.
        self._pinned = device.pinned(4096, torch.int32)
        self._on_device = torch.zeros(4096, dtype=torch.int32)
        self._length = self._batch = 0

    def send(self, arrays: Sequence[torch.Tensor], seq_lens: torch.Tensor) -> None:
        """Make the plan on the host, and start the copies of it and of the arrays."""
        qo_indptr, kv_indptr, indices, last_page_len = arrays
        for array in (*arrays, seq_lens):
            assert array.dtype is torch.int32, "another integer type is another compiled module"
        self._batch = len(last_page_len)
        self._write(torch.cat((torch.tensor([self._batch, 0]), qo_indptr, kv_indptr, seq_lens)).int())
        if not self._is_graph:
            self._buffers = [torch.empty_like(array) for array in arrays]
            self._buffers[2] = indices  # on the device already: used in place
        for buffer, source in zip(self._buffers, (qo_indptr, kv_indptr, None, last_page_len), strict=True):
            if buffer is not None and source is not None:
                self._device.copy(buffer, source)
        if self._is_graph:
            target = self._buffers[2]
            assert target is not None
            self._device.launch(lambda: target[: len(indices)].copy_(indices))

    def reader(self) -> Callable[[], Arrays]:
        """What a kernel that is started now will find when it runs. It raises PoisonRead, or AssertionError where
        plan and arrays are of different steps."""
        batch, length, buffers = self._batch, self._length, list(self._buffers)
        rows, kv_indptr, indices, last_page_len = buffers
        assert kv_indptr is not None
        assert indices is not None
        assert last_page_len is not None

        def read() -> Arrays:
            plan = self._on_device[:length]
            qo_indptr = torch.arange(batch + 1, dtype=torch.int32) if rows is None else rows
            arrays = [qo_indptr[: batch + 1], kv_indptr[: batch + 1], last_page_len[:batch]]
            refuse_poison(plan, *arrays)
            refuse_poison(indices[: int(arrays[1][-1])])
            assert plan[2 : batch + 3].tolist() == arrays[0].tolist(), "plan and arrays are of different steps"
            assert plan[batch + 3 : 2 * batch + 4].tolist() == arrays[1].tolist(), "plan and arrays differ"
            return [array.numpy() for array in (arrays[0], arrays[1], indices, arrays[2])]

        return read

    def check_graph(self, batch: int, indices: torch.Tensor) -> None:
        """As FlashInfer refuses a plan that its graph's buffers are not for."""
        if self._is_graph:
            held, last_page_len = self._buffers[2:]
            assert held is not None
            assert last_page_len is not None
            assert batch == len(last_page_len), "a graph has the batch size it was captured with"
            assert len(indices) <= len(held), "more page ids than the buffer holds"

    def _write(self, plan: torch.Tensor) -> None:
        self._length = len(plan)
        self._pinned[: len(plan)] = plan
        self._device.copy(self._on_device[: len(plan)], self._pinned[: len(plan)])


class OwnPlanMemory(PlanMemory):
    """Of a wrapper that copies all it needs into memory of its own, but for page ids, which it uses in place."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__(device)
        self._indices = torch.empty(0, dtype=torch.int32)

    def send(self, arrays: Sequence[torch.Tensor], seq_lens: torch.Tensor) -> None:
        """arrays: qo_indptr, kv_indptr and page ids."""
        qo_indptr, kv_indptr, self._indices = arrays
        self._batch = len(seq_lens)
        self._write(torch.cat((qo_indptr, kv_indptr, seq_lens)).int())

    def reader(self) -> Callable[[], Arrays]:
        """As `PlanMemory.reader`, with lengths in tokens in the place of last_page_len."""
        batch, length, indices = self._batch, self._length, self._indices

        def read() -> Arrays:
            plan = self._on_device[:length]
            refuse_poison(plan)
            qo_indptr, kv_indptr, lens = plan.split([batch + 1, batch + 1, batch])
            refuse_poison(indices[: int(kv_indptr[-1])])
            return [array.numpy() for array in (qo_indptr, kv_indptr, indices, lens)]

        return read


def attend(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    arrays: Arrays,
    *,
    window: int,
    causal: bool,
    compute_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The readable backend over what the kernel read on the device. window 0: none."""
    backend = TorchReferenceBackend(windows=(window,), compute_dtype=compute_dtype)
    qo_indptr, kv_indptr, indices, last_page_len = arrays
    rows = int(qo_indptr[-1])
    assert rows == len(q), f"planned for {rows} rows, q has {len(q)}"
    k, v = caches
    backend.prepare(
        PagedMetadata(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=indices[: kv_indptr[-1]],
            last_page_len=last_page_len,
            out_slots=np.zeros(rows, dtype=np.int64),
            positions=np.zeros(rows, dtype=np.int32),
            page_size=k.shape[1],
            causal=causal,
        )
    )
    return backend.run(q, k, v, 0)


def target_of(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Where a kernel writes: `out`, whose rows it takes to lie one behind the other, or memory of its own."""
    if out is None:
        return torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    assert out.shape == q.shape
    assert out.dtype is q.dtype
    assert out.is_contiguous(), "a kernel knows no strides of its output"
    return out
