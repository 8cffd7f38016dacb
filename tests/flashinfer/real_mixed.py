"""FlashInfer's real BatchAttention and POD on CPU tensors. Owns: what stands in for their compiled modules.

As in real_wrappers.py: the package's own Python runs, and the readable backend computes from what a kernel would get.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.engine.attention.shaped_plans import attend

#: Arguments of one part of POD's kernel, and the places that matter among them.
PART = 22
ARRAYS, OUT, MASK_MODE, LAYOUT, WINDOW, SM_SCALE = slice(6, 10), 10, 12, 13, 14, 19
CAUSAL, NOT_CAUSAL, NHD = 1, 0, 0


class CompiledHolistic:
    """What `get_holistic_attention_module` gives: `plan` and `run`. `waits`: for the device since the last plan."""

    waits: ClassVar[list[None]] = []

    def __init__(self, *variant: Any) -> None:
        q, kv, out, index, dim, *_ = variant
        assert (q, kv, out, index) == (*[torch.bfloat16] * 3, torch.int32)
        self._dim = dim
        self._arrays: list[np.ndarray] = []

    def plan(self, *args: Any) -> list[int]:
        qo_indptr, kv_indptr, lens, batch, _, _, dim, _ = args[3:]
        assert self.waits, "its pinned memory is written over while a copy may read it"
        self.waits.clear()
        assert dim == self._dim
        assert batch == len(lens)
        self._arrays = [array.numpy().copy() for array in (qo_indptr, kv_indptr, lens)]
        return []

    def run(self, *args: Any) -> None:
        q, k, v, indices, out, lse, mask_mode, layout, _, _, page_size, v_scale, sm_scale, soft_cap = args[3:17]
        qo_indptr, kv_indptr, lens = self._arrays
        assert (layout, v_scale, soft_cap, sm_scale) == (NHD, 1.0, 0.0, q.shape[2] ** -0.5)
        assert out.is_contiguous()
        assert lse.shape == q.shape[:2]
        arrays = [qo_indptr, kv_indptr, indices.numpy(), (lens - 1) % page_size + 1]
        out.copy_(attend(q, (k, v), arrays, window=0, causal=mask_mode == CAUSAL, compute_dtype=None))


class CompiledPod:
    """What `get_batch_pod_module` gives: `run_tensor`."""

    def __init__(self, *variant: Any) -> None:
        q, kv, out, dim, *_ = variant
        assert (q, kv, out) == (*[torch.bfloat16] * 3,)
        self._dim = dim

    def run_tensor(self, *args: Any) -> None:
        pieces, decodes, (_, counters) = args[:PART], args[PART : 2 * PART], args[2 * PART :]
        assert counters.dtype is torch.int32
        assert pieces[0].data_ptr() != decodes[0].data_ptr(), "a half of the workspace for each part"
        assert decodes[MASK_MODE] == NOT_CAUSAL
        for part, causal in ((pieces, pieces[MASK_MODE] == CAUSAL), (decodes, True)):
            q, k, v = part[3:6]
            assert q.shape[2] == self._dim
            assert (part[LAYOUT], part[SM_SCALE]) == (NHD, q.shape[2] ** -0.5)
            arrays = [array.numpy() for array in part[ARRAYS]]
            window = part[WINDOW] + 1
            part[OUT].copy_(attend(q, (k, v), arrays, window=window, causal=causal, compute_dtype=None))


def real_mixed(patch: pytest.MonkeyPatch, prefill_module: type) -> None:
    """Make the package's BatchAttention and POD usable on CPU tensors while `patch` lasts.

    prefill_module   stands in for the compiled module whose `plan` POD uses
    """
    patch.setattr(CompiledHolistic, "waits", [])
    patch.setattr(torch.cuda, "synchronize", lambda: CompiledHolistic.waits.append(None))
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    holistic, pod = importlib.import_module("flashinfer.attention._core"), importlib.import_module("flashinfer.pod")
    patch.setattr(holistic, "get_holistic_attention_module", CompiledHolistic)
    # Of another module, for K and V of unequal strides, which this engine has not.
    patch.setattr(holistic, "get_holistic_attention_independent_module", lambda *_: None, raising=False)
    patch.setattr(pod, "get_batch_prefill_module", prefill_module)
    patch.setattr(pod, "get_batch_pod_module", CompiledPod)
    patch.setattr(pod, "device_support_pdl", lambda _: False)
