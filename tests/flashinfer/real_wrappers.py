"""FlashInfer's real wrappers on CPU tensors. Owns: what stands in for their compiled modules and for a GPU's answers.

Everything that the package does in Python happens: arguments are checked, lengths read, buffers filled, windows and
scales kept, outputs made. Only the compiled modules are ours: they compute with the readable backend, or with torch,
from the arguments they are given.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from engine.attention.metadata import PagedMetadata
from engine.attention.torch_reference import TorchReferenceBackend
from tests.engine.models.shaped_operators import add_and_norm, turn, write_rms_norm, write_silu_and_mul

#: Places in the argument list of a compiled module's `paged_run`.
Q, K, V, QO_INDPTR, KV_INDPTR, KV_INDICES, LAST_PAGE_LEN, OUT = range(3, 11)
MASK_MODE, LAYOUT, WINDOW = 12, 13, 14
SM_SCALE = 23
CAUSAL, NHD = 1, 0


class CompiledModule:
    """What `get_batch_prefill_module` gives: `plan` and `paged_run`. `made` lists what was asked for."""

    made: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, backend: str, *variant: Any) -> None:
        self.made.append((backend, *variant))
        self.plans: list[tuple[Any, ...]] = []

    def plan(self, *args: Any) -> list[int]:
        qo_indptr, kv_indptr, seq_lens = args[3:6]
        assert {qo_indptr.dtype, kv_indptr.dtype, seq_lens.dtype} == {torch.int32}
        assert len(seq_lens) == len(qo_indptr) - 1 == len(kv_indptr) - 1
        self.plans.append(args)
        return [len(self.plans)]

    def paged_run(self, *args: Any) -> None:
        arrays = [args[place].numpy() for place in (QO_INDPTR, KV_INDPTR, KV_INDICES, LAST_PAGE_LEN)]
        qo_indptr, kv_indptr, indices, last_page_len = arrays
        rows, k = int(qo_indptr[-1]), args[K]
        assert args[LAYOUT] == NHD
        assert args[SM_SCALE] == args[Q].shape[2] ** -0.5
        meta = PagedMetadata(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=indices[: kv_indptr[-1]],
            last_page_len=last_page_len,
            out_slots=np.zeros(rows, dtype=np.int64),
            positions=np.zeros(rows, dtype=np.int32),
            page_size=k.shape[1],
            # One row at the end of its context sees all of it, and what a window leaves of it.
            causal=args[MASK_MODE] == CAUSAL or bool((np.diff(qo_indptr) == 1).all()),
        )
        backend = TorchReferenceBackend(windows=(args[WINDOW] + 1,))
        backend.prepare(meta)
        args[OUT].copy_(backend.run(args[Q], k, args[V], 0))


class CompiledOperators:
    """What `get_norm_module`, `get_rope_module` and `get_act_and_mul_module` give. `types`: of what came."""

    types: ClassVar[set[torch.dtype]] = set()

    def rmsnorm(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool) -> None:
        assert not pdl
        self.types.add(x.dtype)
        write_rms_norm(out, x, weight, eps)

    def fused_add_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, pdl: bool
    ) -> None:
        assert not pdl
        self.types.add(x.dtype)
        add_and_norm(x, residual, weight, eps)

    def apply_rope_pos_ids_cos_sin_cache(self, *args: Any) -> None:
        q, k, q_out, k_out, table, positions, interleaved = args
        assert not interleaved
        for heads, out in ((q, q_out), (k, k_out)):
            assert heads.data_ptr() == out.data_ptr(), "in place"
            self.types.add(heads.dtype)
            turn(positions, out, table)

    def silu_and_mul(self, out: torch.Tensor, x: torch.Tensor, pdl: bool) -> None:
        assert not pdl
        self.types.add(x.dtype)
        write_silu_and_mul(out, x)


def real_operators(patch: pytest.MonkeyPatch) -> ModuleType:
    """The package, with its small operators usable on CPU tensors while `patch` lasts."""
    package = importlib.import_module("flashinfer")
    patch.setattr(CompiledOperators, "types", set())
    norm, rope, activation = (importlib.import_module(f"flashinfer.{name}") for name in ("norm", "rope", "activation"))
    # Where its other kernels for norms can be had it takes these; which would be a question to a GPU.
    patch.setattr(norm, "_use_cuda_norm", lambda _: True, raising=False)
    patch.setattr(norm, "get_norm_module", CompiledOperators)
    patch.setattr(rope, "get_rope_module", CompiledOperators)
    patch.setattr(activation, "get_act_and_mul_module", lambda _: CompiledOperators())
    for module in (norm, activation):
        patch.setattr(module, "device_support_pdl", lambda _: False)
    return package


def real_wrappers(patch: pytest.MonkeyPatch) -> ModuleType:
    """The package, with its wrappers usable on CPU tensors while `patch` lasts."""
    package = importlib.import_module("flashinfer")
    empty = torch.empty

    def unpinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("pin_memory", None)  # which a torch without CUDA refuses
        return empty(*args, **kwargs)

    patch.setattr(torch, "empty", unpinned)
    patch.setattr(CompiledModule, "made", [])
    for name in ("flashinfer.prefill", "flashinfer.decode"):
        module = importlib.import_module(name)
        patch.setattr(module, "get_batch_prefill_module", CompiledModule)
        patch.setattr(module, "device_support_pdl", lambda _: False)
        patch.setattr(module, "get_compute_capability", lambda _: (9, 0), raising=False)
    return package
