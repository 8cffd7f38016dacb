"""Sections 1 and 9 to 11. Owns: the ceilings of the device, and attention as a share of them.

Data are random, and every launch takes the next of several inputs, which together are larger than the L2 cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch

from bench.gpu_check.batches import Batch, random_batch, shrunk
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention.flashinfer import FlashInferBackend, HeadShape, MixedKernel, PrefillKernel, UnfitKernel

#: Aims of docs/gpu.md.
DECODE_AIM, PREFILL_AIM = 0.8, 0.6
#: K/V bytes from which on the decode aim holds: below, starting the kernel is most of the time.
DECODE_AIM_FROM = 1e9
#: Bytes that inputs of one measurement take together, at least.
ROTATED_BYTES = 256 * 1024 * 1024
EIGHT_BILLION = HeadShape(32, 8, 128)
SMALL = HeadShape(9, 3, 64)


class Ceilings:
    """What section 1 measured; sections after it compare with that. 0: not measured."""

    def __init__(self) -> None:
        self.copy_bytes_s = 0.0
        self.matmul_flop_s = 0.0

    def measure(self, rig: Rig) -> Iterator[Finding]:
        """Section 1: a copy on the device, and a matrix product."""
        self.copy_bytes_s = rig.sizes.copy_bytes / _copy_s(rig)
        yield Finding("copy on the device, read and written", None, self.copy_bytes_s / 1e12, "TB/s", 4.0)
        n = rig.sizes.matmul
        a, b = (torch.randn(n, n, device=rig.device).to(rig.sizes.dtype) for _ in range(2))
        seconds = rig.median_s(lambda: torch.mm(a, b))
        self.matmul_flop_s = 2 * n**3 / seconds
        yield Finding(f"product of two matrices of {n} x {n}", None, self.matmul_flop_s / 1e12, "TFLOP/s", 700)


def _copy_s(rig: Rig) -> float:
    """Time to copy half of `copy_bytes` to the other half, which touches all of them."""
    count = rig.sizes.copy_bytes // 2
    source = torch.empty(count, dtype=torch.uint8, device=rig.device).random_()
    target = torch.empty_like(source)
    return rig.median_s(lambda: target.copy_(source))


def decode(rig: Rig, ceilings: Ceilings) -> Iterator[Finding]:
    """Section 9: bytes of K/V read in a second, as a share of the copy's. The plan is not timed here."""
    for heads in (SMALL, EIGHT_BILLION):
        for rows in (1, 8, 64, 256):
            for context in (512, 4096, 16_384):
                lens = shrunk([(1, context)] * max(1, rows // rig.sizes.shrink), rig.sizes.shrink)
                read = sum(c for _, c in lens) * heads.num_kv_heads * heads.head_dim * 2 * rig.sizes.dtype.itemsize
                seconds = _attention_s(rig, heads, lens, read)
                share = read / seconds / ceilings.copy_bytes_s if ceilings.copy_bytes_s else 0.0
                aim = DECODE_AIM if read > DECODE_AIM_FROM else None
                note = f"{seconds * 1e6:,.0f} µs, {read / 1e9:.3f} GB"
                yield Finding(f"D {heads.head_dim}, {rows} rows, context {context}", None, share, "of copy", aim, note)


def prefill(rig: Rig, ceilings: Ceilings) -> Iterator[Finding]:
    """Section 10: 4 Hq D operations for each pair of a row and a token that it sees, as a share of the product's."""
    for kernel in PrefillKernel:
        for heads in (SMALL, EIGHT_BILLION):
            try:
                yield from _prefill(rig, ceilings, heads, kernel)
            except UnfitKernel as error:
                yield Finding(f"D {heads.head_dim}, {kernel}", note=f"not measured: {error.why}")


def _prefill(rig: Rig, ceilings: Ceilings, heads: HeadShape, kernel: PrefillKernel) -> Iterator[Finding]:
    for chunk in (512, 2048, 8192):
        for prefix in (0, 16_384):
            lens = shrunk([(chunk, prefix + chunk)], rig.sizes.shrink)
            rows, context = lens[0]
            pairs = rows * (context - rows) + rows * (rows + 1) // 2
            work = 4 * heads.num_heads * heads.head_dim * pairs
            seconds = _attention_s(rig, heads, lens, 0, prefill=kernel)
            share = work / seconds / ceilings.matmul_flop_s if ceilings.matmul_flop_s else 0.0
            aim = PREFILL_AIM if chunk == 8192 else None
            name = f"D {heads.head_dim}, chunk {chunk} after {prefix}, {kernel}"
            yield Finding(name, None, share, "of matmul", aim, f"{seconds * 1e6:,.0f} µs")


def mixed(rig: Rig) -> Iterator[Finding]:
    """Section 11: pieces of prompts beside decode rows, plan included, by each way to compute them."""
    for pieces in ([512], [2048], [512] * 4):
        for decodes in (16, 128):
            lens = [(n, n) for n in pieces] + [(1, 2048)] * max(1, decodes // rig.sizes.shrink)
            batch = random_batch(rig, EIGHT_BILLION, shrunk(lens, rig.sizes.shrink), 16)
            name = f"pieces {pieces}, {decodes} decode rows at 2048"
            usual = 0.0
            for kernel in MixedKernel:
                try:
                    backend = rig.backend(EIGHT_BILLION, mixed=kernel)
                    seconds = rig.median_s(partial(_step, backend, batch))
                except Exception as error:  # one that cannot be had is told: the others are measured all the same
                    yield Finding(f"{name}: {kernel}", note=f"not measured: {type(error).__name__}: {error}")
                    continue
                usual = usual or seconds
                note = f"{seconds * 1e6:,.0f} µs; above 1.05 it would be worth a trial in `serve`"
                yield Finding(f"{name}: ragged / {kernel}", None, usual / seconds, "", None, note)


def _step(backend: FlashInferBackend, batch: Batch) -> None:
    backend.prepare(batch.metadata)
    backend.run(batch.q, batch.k_cache, batch.v_cache, 0)


def _attention_s(rig: Rig, heads: HeadShape, lens: list[tuple[int, int]], read: int, **settings: Any) -> float:
    """Median time of one layer's attention, over as many batches as pass the L2 cache."""
    copies = 1 if rig.sizes.shrink > 1 else max(1, min(8, ROTATED_BYTES // max(read, ROTATED_BYTES // 8)))
    prepared = []
    for _ in range(copies):
        batch, backend = random_batch(rig, heads, lens, 16), rig.backend(heads, **settings)
        backend.prepare(batch.metadata)
        prepared.append((backend, batch))
    turns = cycle(prepared)

    def launch() -> None:
        backend, batch = next(turns)
        backend.run(batch.q, batch.k_cache, batch.v_cache, 0)

    return rig.median_s(launch)
