"""A module of FlashInfer's shape. Owns: its wrappers with their signatures, computing with the readable backend; what
takes a batch apart is in shaped_mixed.py, small operators are in tests/engine/models/shaped_operators.py.

Calls are bound to the stored signatures. What `plan` does to memory is what FlashInfer's does: it reads the lengths on
the host, starts copies from the arrays it was given and from pinned memory of its own, and in graph mode writes into
the buffers it was made with. `run` starts a kernel that reads what has arrived on the device by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.shaped_mixed import ShapedHolistic, ShapedPod, check_run
from tests.engine.attention.shaped_plans import PlanMemory, attend, target_of
from tests.engine.models.shaped_operators import KERNEL_TYPES, ShapedOperators
from tests.flashinfer.signatures import signature, stored

_SIGNATURES = {name: signature(parameters) for name, parameters in stored()["calls"].items()}


@dataclass
class Call:
    """One call as it came: the name of the function, or wrapper and method, and every parameter that was given."""

    name: str
    given: dict[str, Any]


@dataclass
class ShapedFlashInfer(ShapedOperators):
    """Stands where the module stands: attributes are the wrappers' classes, and functions.

    compute_dtype    see TorchReferenceBackend
    operator_types   see ShapedOperators
    holistic_heads   K/V heads that the scratch memory of BatchAttention does for; None: any number
    holistic_waits   its plan waits for the device; False: what would be if it did not
    off              kernels whose last row is wrong: fa2, fa3, decode, holistic, pod
    """

    device: LateDevice
    compute_dtype: torch.dtype | None = None
    calls: list[Call] = field(default_factory=list)
    operator_types: tuple[torch.dtype, ...] = KERNEL_TYPES
    holistic_heads: int | None = None
    holistic_waits: bool = True
    off: tuple[str, ...] = ()

    def bind(self, name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Parameters as given, without the defaults; TypeError where FlashInfer would raise it.

        owner   what a method is called on; None: a function
        """
        owners = () if owner is None else (owner,)
        given = dict(_SIGNATURES[name].bind(*owners, *args, **kwargs).arguments)
        given.pop("self", None)
        self.calls.append(Call(name, given))
        return given

    def named(self, name: str) -> list[dict[str, Any]]:
        return [call.given for call in self.calls if call.name == name]

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Prefill:
        return _Prefill(self, args, kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> _Decode:
        return _Decode(self, args, kwargs)

    def BatchAttention(self, *args: Any, **kwargs: Any) -> ShapedHolistic:
        return ShapedHolistic(self, args, kwargs)

    def BatchPODWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> ShapedPod:
        return ShapedPod(self, args, kwargs)

    def write(self, kernel: str, out: torch.Tensor, answer: torch.Tensor) -> None:
        """What `kernel` writes, which has `answer` to give."""
        out.copy_(answer)
        if kernel in self.off:
            out[-1:] *= 1.1


class _Wrapper:
    name = ""
    #: Parameters of `plan` and of the constructor that this wrapper names in its own way.
    plan_names = ("", "", "", "")
    buffer_names = ("", "", "", "")
    #: Values of `backend`; `auto` picks by the GPU: a decision nobody took.
    backends: tuple[str, ...] = ("fa2",)

    def __init__(self, module: ShapedFlashInfer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = module.bind(f"{self.name}.__init__", self, args, kwargs)
        assert given["backend"] in self.backends
        assert given["backend"] != "fa3" or module.device.capability == (9, 0), "no other GPU has what it calls"
        assert given["kv_layout"] == "NHD"
        assert given["float_workspace_buffer"].dtype is torch.uint8
        self._module = module
        self._kernel_name = given["backend"]
        buffers = [given.get(name) for name in self.buffer_names]
        is_graph = given.get("use_cuda_graph", False)
        if is_graph:
            assert all(buffer is not None for name, buffer in zip(self.buffer_names, buffers, strict=True) if name)
        self._memory = PlanMemory(module.device, buffers if is_graph else ())
        self._planned: dict[str, Any] = {}

    def plan(self, *args: Any, **kwargs: Any) -> None:
        given = self._module.bind(f"{self.name}.plan", self, args, kwargs)
        assert given["kv_data_type"] is given["q_data_type"], "both types have to be named: the default is float16"
        qo_indptr, *others = [given.get(name) for name in self.plan_names]
        batch = len(others[-1])
        if qo_indptr is None:
            qo_indptr = self._module.device.pinned(batch + 1, torch.int32).copy_(torch.arange(batch + 1))
        self._memory.check_graph(batch, others[1])
        self._memory.send([qo_indptr, *others], given["seq_lens"])
        self._planned = given

    def run(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._module.bind(f"{self.name}.run", self, args, kwargs)
        q, caches = given["q"], given["paged_kv_cache"]
        planned, read = self._planned, self._memory.reader()
        check_run(planned, q, caches, self._head_dim(planned))
        window_left = planned["window_left"]
        assert given.get("window_left", window_left) == window_left
        out, causal = target_of(q, given.get("out")), self._is_causal(planned)
        compute_dtype = self._module.compute_dtype

        def kernel() -> None:
            # A replayed graph computes the rows it was captured with: the buffers are those of its size.
            answer = attend(q, caches, read(), window=window_left + 1, causal=causal, compute_dtype=compute_dtype)
            self._module.write(self._kernel_name, out, answer)

        self._module.device.launch(kernel)
        return out

    def _head_dim(self, planned: dict[str, Any]) -> int:
        return int(planned["head_dim"] if "head_dim" in planned else planned["head_dim_qk"])

    def _is_causal(self, planned: dict[str, Any]) -> bool:
        return bool(planned.get("causal", False))


class _Prefill(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"
    plan_names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    buffer_names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    backends = ("fa2", "fa3")


class _Decode(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    plan_names = ("", "indptr", "indices", "last_page_len")
    buffer_names = ("", "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")

    def __init__(self, module: ShapedFlashInfer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(module, args, kwargs)
        self._kernel_name = "decode"

    def _is_causal(self, planned: dict[str, Any]) -> bool:
        # One row at the end of its context sees all of it; as causal it also carries the window.
        return True
