"""A module of FlashInfer's shape. Owns: its wrappers with their signatures, computing with the readable backend.

Calls are bound to the stored signatures. What `plan` does to memory is what FlashInfer's does: it reads the lengths on
the host, starts copies from the arrays it was given and from pinned memory of its own, and in graph mode writes into
the buffers it was made with. `run` starts a kernel that reads what has arrived on the device by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.attention.metadata import PagedMetadata
from engine.attention.torch_reference import TorchReferenceBackend
from tests.engine.attention.late_device import LateDevice, refuse_poison
from tests.flashinfer.signatures import signature, stored

_SIGNATURES = {name: signature(parameters) for name, parameters in stored()["calls"].items()}


@dataclass
class Call:
    """One call as it came: the name of the wrapper and method, and every parameter that was given."""

    name: str
    given: dict[str, Any]


@dataclass
class ShapedFlashInfer:
    """Stands where the module stands: attributes are the wrappers' classes.

    compute_dtype   see TorchReferenceBackend
    """

    device: LateDevice
    compute_dtype: torch.dtype | None = None
    calls: list[Call] = field(default_factory=list)

    def bind(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Parameters as given, without the defaults; TypeError where FlashInfer would raise it."""
        given = dict(_SIGNATURES[name].bind(owner, *args, **kwargs).arguments)
        given.pop("self")
        self.calls.append(Call(name, given))
        return given

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call.given for call in self.calls if call.name == name]

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Prefill:
        return _Prefill(self, args, kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Decode:
        return _Decode(self, args, kwargs)


class _Wrapper:
    name = ""
    #: Parameters of `plan` and of the constructor that this wrapper names in its own way.
    plan_names = ("", "", "", "")
    buffer_names = ("", "", "", "")

    def __init__(self, module: ShapedFlashInfer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = module.bind(f"{self.name}.__init__", self, args, kwargs)
        assert given["backend"] == "fa2", "`auto` picks by the GPU: a decision nobody took"
        assert given["kv_layout"] == "NHD"
        assert given["float_workspace_buffer"].dtype is torch.uint8
        self._module = module
        self._device = module.device
        self._is_graph = given.get("use_cuda_graph", False)
        self._buffers = [given.get(name) for name in self.buffer_names]
        if self._is_graph:
            assert all(
                buffer is not None for name, buffer in zip(self.buffer_names, self._buffers, strict=True) if name
            )
        # As FlashInfer: 8 MiB of which a plan uses little.
        self._pinned_plan = self._device.pinned(4096, torch.int32)
        self._device_plan = torch.zeros(4096, dtype=torch.int32)
        self._planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = self._module.bind(f"{self.name}.plan", self, args, kwargs)
        arrays = [given.get(name) for name in self.plan_names]
        for array in (*arrays, given["seq_lens"]):
            assert array is None or array.dtype is torch.int32, "another integer type is another compiled module"
        assert given["kv_data_type"] is given["q_data_type"], "both types have to be named: the default is float16"
        qo_indptr, kv_indptr, indices, last_page_len = arrays
        batch = len(last_page_len)
        if qo_indptr is None:
            qo_indptr = self._device.pinned(batch + 1, torch.int32).copy_(torch.arange(batch + 1))
        self._check_plan(batch, indices)
        # The plan itself: made on the host from the lengths, then copied like everything else.
        plan = torch.cat((torch.tensor([batch, given["page_size"]]), qo_indptr, kv_indptr, given["seq_lens"])).int()
        self._pinned_plan[: len(plan)] = plan
        self._send(self._device_plan[: len(plan)], self._pinned_plan[: len(plan)])
        self._planned = given | {"batch": batch, "plan_length": len(plan)}
        if not self._is_graph:
            self._buffers = [torch.empty_like(array) for array in (qo_indptr, kv_indptr, indices, last_page_len)]
            self._buffers[2] = indices  # on the device already: used in place
        sources = (qo_indptr, kv_indptr, None, last_page_len)
        for buffer, source in zip(self._buffers, sources, strict=True):
            if buffer is not None and source is not None:
                self._send(buffer, source)
        if self._is_graph:
            target = self._buffers[2]
            assert target is not None
            self._device.launch(lambda: target[: len(indices)].copy_(indices))

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._module.bind(f"{self.name}.run", self, args, kwargs)
        q, (k, v) = given["q"], given["paged_kv_cache"]
        planned = self._planned
        assert planned, "run() before plan()"
        assert q.dtype is planned["q_data_type"], f"planned for {planned['q_data_type']}, q is {q.dtype}"
        assert q.shape[1:] == (planned["num_qo_heads"], self._head_dim(planned))
        assert k.shape[1:] == (planned["page_size"], planned["num_kv_heads"], self._head_dim(planned))
        assert k.stride() == v.stride(), "unequal strides are another compiled module"
        assert given.get("window_left", planned["window_left"]) == planned["window_left"]
        out = given.get("out")
        if out is None:
            out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
        length, page_size, window = planned["plan_length"], planned["page_size"], planned["window_left"] + 1
        causal, batch, buffers = self._is_causal(planned), planned["batch"], list(self._buffers)

        def kernel() -> None:
            plan = self._device_plan[:length]
            rows = buffers[0] if buffers[0] is not None else torch.arange(batch + 1, dtype=torch.int32)
            arrays = [rows[: batch + 1], buffers[1][: batch + 1], buffers[2], buffers[3][:batch]]
            refuse_poison(plan, *arrays[:2], arrays[3], arrays[2][: int(arrays[1][-1])])
            assert plan[2 : batch + 3].tolist() == arrays[0].tolist(), "plan and arrays are of different steps"
            assert plan[batch + 3 : 2 * batch + 4].tolist() == arrays[1].tolist(), "plan and arrays differ"
            # [:rows]: a replayed graph computes the rows it was captured with.
            backend = TorchReferenceBackend(windows=(window,), compute_dtype=self._module.compute_dtype)
            out.copy_(_attend(backend, q, k, v, [array.numpy() for array in arrays], page_size, causal=causal))

        self._device.launch(kernel)
        return out

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy that FlashInfer starts without waiting for it."""
        self._device.copy(target, source)

    def _check_plan(self, batch: int, indices: torch.Tensor) -> None:
        if self._is_graph:
            last_page_len, held = self._buffers[3], self._buffers[2]
            assert last_page_len is not None
            assert held is not None
            assert batch == len(last_page_len), "a graph has the batch size it was captured with"
            assert len(indices) <= len(held), "more page ids than the buffer holds"

    def _head_dim(self, planned: dict[str, Any]) -> int:
        return int(planned["head_dim"] if "head_dim" in planned else planned["head_dim_qk"])

    def _is_causal(self, planned: dict[str, Any]) -> bool:
        return bool(planned.get("causal", False))


class _Prefill(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"
    plan_names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    buffer_names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")


class _Decode(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    plan_names = ("", "indptr", "indices", "last_page_len")
    buffer_names = ("", "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")

    def _is_causal(self, planned: dict[str, Any]) -> bool:
        # One row at the end of its context sees all of it; as causal it also carries the window.
        return True


def _attend(
    backend: TorchReferenceBackend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arrays: list[np.ndarray],
    page_size: int,
    *,
    causal: bool,
) -> torch.Tensor:
    """The readable backend over what the kernel read on the device."""
    qo_indptr, kv_indptr, indices, last_page_len = arrays
    rows = int(qo_indptr[-1])
    assert rows == len(q), f"planned for {rows} rows, q has {len(q)}"
    backend.prepare(
        PagedMetadata(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=indices[: kv_indptr[-1]],
            last_page_len=last_page_len,
            out_slots=np.zeros(rows, dtype=np.int64),
            positions=np.zeros(rows, dtype=np.int32),
            page_size=page_size,
            causal=causal,
        )
    )
    return backend.run(q, k, v, 0)
