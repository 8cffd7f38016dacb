"""Compiling beforehand. Owns: every attention kernel of the sections, used once over a few rows, with no limit of time.

FlashInfer compiles a module where it is first planned. In a section that would take the section's time, and one that
takes much more ends the program.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from bench.gpu_check.batches import random_batch
from bench.gpu_check.correctness import OTHERS
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention.flashinfer import HeadShape, UnfitKernel

#: Pieces, decode rows, and both: (query rows, context) of each request.
SORTS = ([(17, 40), (5, 5)], [(1, 30), (1, 7)], [(17, 40), (1, 30)])
#: Tokens that a row sees in layers with a window: those are modules of their own.
WINDOW = 8


def attention_kernels(rig: Rig) -> Iterator[Finding]:
    """Each kernel for each size of head, with a window and without. Its seconds are those of its modules, and nothing
    where they were there; a check fails where one cannot be had."""
    kernels = {"default": {}} | {other: settings for other, (_, settings) in OTHERS.items()}
    for kernel, settings in kernels.items():
        for dim in sorted({dim for _, dim, _ in rig.sizes.heads}):
            for window in (0, WINDOW):
                name = f"D {dim}, {kernel}" + f", window {window}" * bool(window)
                start = time.monotonic()
                try:
                    backend = rig.backend(HeadShape(6, 2, dim), windows=(window,), **settings)
                    for lens in SORTS:
                        batch = random_batch(rig, HeadShape(6, 2, dim), lens, 16)
                        backend.prepare(batch.metadata)
                        backend.run(batch.q, batch.k_cache, batch.v_cache, 0)
                    rig.runtime.synchronize()
                except UnfitKernel as error:
                    yield Finding(name, note=f"not tried: {error.why}")
                    continue
                except Exception as error:  # whatever a compiler says is told, and the next kernel is tried
                    yield Finding(name, ok=False, note=f"{type(error).__name__}: {str(error)[:300]}")
                    continue
                yield Finding(name, ok=True, value=time.monotonic() - start, unit="s")
