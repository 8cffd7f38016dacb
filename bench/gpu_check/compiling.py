"""Compiling beforehand. Owns: every kernel of the sections, used once over a few rows, with no limit of time.

FlashInfer compiles a module where it is first planned or called. In a section that would take the section's time, and
one that takes much more ends the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bench.gpu_check.batches import random_batch
from bench.gpu_check.correctness import OTHERS
from bench.gpu_check.random_model import shape
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import FLASHINFER, Rig
from engine.attention.flashinfer import HeadShape, UnfitKernel

#: Pieces, decode rows, and both: (query rows, context) of each request.
SORTS = ([(17, 40), (5, 5)], [(1, 30), (1, 7)], [(17, 40), (1, 30)])
#: Tokens that a row sees in layers with a window: those are modules of their own.
WINDOW = 8


def attention_kernels(rig: Rig) -> Iterator[Finding]:
    """Each kernel for each size of head, with a window and without. Its seconds are those of its modules, and nothing
    where they were there; a check fails where one cannot be had."""
    kernels: dict[str, dict[str, Any]] = {"default": {}} | {other: settings for other, (_, settings) in OTHERS.items()}
    for kernel, settings in kernels.items():
        for dim in sorted({dim for _, dim, _ in rig.sizes.heads}):
            for window in (0, WINDOW):
                name = f"D {dim}, {kernel}" + f", window {window}" * bool(window)
                yield _used(rig, name, partial(_attend, rig, HeadShape(6, 2, dim), window, settings))


def small_kernels(rig: Rig) -> Iterator[Finding]:
    """FlashInfer's small operators likewise: a module of norms, one of RoPE, one of the activation, for all sizes."""
    _, dim, _ = rig.sizes.heads[0]
    config = shape(layers=1, hidden=6 * dim, ffn=12 * dim, heads=6, kv_heads=2, head_dim=dim, vocab=64)
    rows = torch.ones(3, 12 * dim, dtype=rig.sizes.dtype, device=rig.device)
    ops = rig.ops()[FLASHINFER](config, rows)
    ops.reserve_positions(4)
    positions = torch.arange(3, device=rig.device)
    yield _used(rig, "norms", lambda: ops.rms_norm(rows, rows[0]))
    yield _used(rig, "RoPE", lambda: ops.turned(rows[:, : 10 * dim], None, ops.angles(positions)))
    yield _used(rig, "activation", lambda: ops.silu_and_mul(rows))


def _attend(rig: Rig, heads: HeadShape, window: int, settings: dict[str, Any]) -> None:
    backend = rig.backend(heads, windows=(window,), **settings)
    for lens in SORTS:
        batch = random_batch(rig, heads, lens, 16)
        backend.prepare(batch.metadata)
        backend.run(batch.q, batch.k_cache, batch.v_cache, 0)


def _used(rig: Rig, name: str, use: Callable[[], object]) -> Finding:
    """How long it took to `use` a kernel once."""
    start = time.monotonic()
    try:
        use()
        rig.runtime.synchronize()
    except UnfitKernel as error:
        return Finding(name, note=f"not tried: {error.why}")
    except Exception as error:  # whatever a compiler says is told, and the next kernel is tried
        return Finding(name, ok=False, note=f"{type(error).__name__}: {str(error)[:300]}")
    return Finding(name, ok=True, value=time.monotonic() - start, unit="s")
