"""Sections 5 and 6. Owns: captured graphs against the eager pass, and steps planned while the device is late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu_check.batches import metadata_of
from bench.gpu_check.random_model import SMALL, executor_of, in_the_middle, random_model
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention.device import DeviceMemory, DeviceRuntime, Event, Graph
from engine.attention.flashinfer import HeadShape, MixedKernel, UnfitKernel
from engine.executor.manual import ManualDriver
from engine.models.llama import LlamaModel

#: Part of the largest logit by which graph and eager pass may differ: other kernels, other order of sums.
GRAPH_TOLERANCE = 0.02
#: Requests of a step of section 6, and what each has in the pool.
RACE_ROWS, RACE_CONTEXT = 16, 700
#: The device is kept busy this long in front of every step, in seconds.
SPIN_S = 0.0005


def graphs(rig: Rig) -> Iterator[Finding]:
    """Section 5: replay against eager with either table of small operators."""
    for ops, make_ops in rig.ops().items():
        yield from _graphs(rig, ops, random_model(rig, SMALL, make_ops))


def _graphs(rig: Rig, ops: str, model: LlamaModel) -> Iterator[Finding]:
    """At each batch size, contexts that grow between replays, padded rows."""
    largest, page = rig.sizes.graph_rows, 16
    context = 300 // rig.sizes.shrink
    pages = largest * -(-(context + 80) // page)
    eager = executor_of(rig, model, num_pages=pages)
    graphed = executor_of(rig, model, num_pages=pages, graph_rows=largest)
    graphed.kv_cache[:, :, :pages] = eager.kv_cache
    for rows in _sizes(largest):
        worst, changed = 0.0, False
        drivers = [ManualDriver(executor) for executor in (eager, graphed)]
        pairs = [in_the_middle(driver, rig, [context + i for i in range(rows)], room=64) for driver in drivers]
        for sequence, twin in zip(*pairs, strict=True):
            twin.tokens = list(sequence.tokens)
        for _ in range(3):
            before = graphed.kv_cache[:, :, :pages].clone()
            batches = [
                driver.batch([(s, 1) for s in sequences]) for driver, sequences in zip(drivers, pairs, strict=True)
            ]
            want = eager.forward(batches[0], rows=list(range(rows)))
            got = graphed.forward(batches[1], rows=list(range(rows)))
            worst = max(worst, float((got - want).abs().max() / want.abs().max()))
            slots = torch.from_numpy(batches[1].metadata.out_slots).to(rig.device)
            changed |= _touched(before, graphed.kv_cache[:, :, :pages], slots)
            for sequence in (*pairs[0], *pairs[1]):
                sequence.computed_len += 1
                sequence.tokens.append(int(sequence.tokens[0]))
        yield Finding(
            f"{rows} rows, {ops}: replay against eager, contexts that grow",
            worst <= GRAPH_TOLERANCE,
            worst,
            "",
            GRAPH_TOLERANCE,
        )
        yield Finding(f"{rows} rows, {ops}: pages of others keep their bits", not changed)
    driver = ManualDriver(graphed)
    batch = driver.batch([(s, 1) for s in in_the_middle(driver, rig, [context] * 3)])
    first = graphed.forward(batch, rows=[0, 1, 2])
    same = all(torch.equal(graphed.forward(batch, rows=[0, 1, 2]), first) for _ in range(rig.sizes.replays))
    yield Finding(f"{rig.sizes.replays} replays of one step give the same bits, {ops}", same)


def _sizes(largest: int) -> list[int]:
    """Batches at and between captured sizes."""
    return sorted({rows for rows in (1, 2, 3, 5, 8, 13, 16, 17, largest) if rows <= largest})


def _touched(before: torch.Tensor, after: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether a slot other than `slots` has other bits than before. Caches [layers, 2, pages, page_size, Hkv, D]."""
    was, now = before.flatten(2, 3), after.flatten(2, 3)
    others = torch.ones(was.shape[2], dtype=torch.bool, device=was.device).index_fill_(0, slots, False)
    return not torch.equal(was[:, :, others], now[:, :, others])


def race(rig: Rig) -> Iterator[Finding]:
    """Section 6: steps that are started behind a busy device, against the same steps one at a time: of decode rows, and
    of pieces and decode rows by each kernel for both."""
    context = max(2, RACE_CONTEXT // rig.sizes.shrink)
    decodes = _Steps(rig, [(1, context)] * RACE_ROWS)
    want = decodes.outs(rig.runtime, 2, len(decodes.plans), late=False)
    yield decodes.compared("late steps, two sets: steps that differ", rig.sizes.race_steps, want)
    count = min(64, rig.sizes.race_steps)
    wrong = decodes.differing(decodes.outs(DeafRuntime(rig.runtime), 1, count, late=True), want)
    yield Finding(
        f"{count} late steps, one set that does not wait: some have to differ", wrong > 0, wrong, "steps",
        note="else this section could not see a race",
    )  # fmt: skip
    both = _Steps(rig, [(min(RACE_ROWS, context), context)] * 2 + [(1, context)] * RACE_ROWS)
    for mixed in MixedKernel:
        name = f"late steps of pieces and decode rows, {mixed}"
        try:
            want = both.outs(rig.runtime, 2, len(both.plans), late=False, mixed=mixed)
            yield both.compared(f"{name}: steps that differ", rig.sizes.race_steps // 4, want, mixed=mixed)
        except UnfitKernel as error:
            yield Finding(name, note=f"not tried: {error.why}")
        except Exception as error:  # one that cannot be compiled is told, and the others are tried
            yield Finding(f"{name}: can be used", ok=False, note=f"{type(error).__name__}: {str(error)[:300]}")


class _Steps:
    """Steps over one pool whose requests are of `lens`, as `metadata_of` takes them: always the same lengths, so that
    what one step reads of another is wrong but inside the pool. plans: pages in eight orders, by turns."""

    def __init__(self, rig: Rig, lens: list[tuple[int, int]]) -> None:
        kv_heads, dim, group = rig.sizes.heads[0]
        self._rig = rig
        self._heads = HeadShape(kv_heads * group, kv_heads, dim)
        num_pages = sum(-(-context // 16) for _, context in lens) + 3
        self.plans = [metadata_of(lens, 16, rig.rng, num_pages=num_pages) for _ in range(8)]
        rows = sum(count for count, _ in lens)
        self._q = torch.randn(rows, self._heads.num_heads, dim, device=rig.device).to(rig.sizes.dtype)
        self._k, self._v = torch.randn(2, num_pages, 16, kv_heads, dim, device=rig.device).to(rig.sizes.dtype)

    def outs(self, runtime: DeviceRuntime, sets: int, count: int, *, late: bool, **settings: Any) -> list[torch.Tensor]:
        """The answers of `count` steps; `late`: behind a busy device."""
        rig, outs = self._rig, []
        backend = rig.backend(self._heads, runtime=runtime, sets=sets, **settings)
        for step in range(count):
            if late:
                rig.stopwatch.spin(SPIN_S)
            backend.prepare(self.plans[step % len(self.plans)])
            outs.append(backend.run(self._q, self._k, self._v, 0))
            if not late or step % 64 == 63:
                rig.runtime.synchronize()
        rig.runtime.synchronize()
        return outs

    def differing(self, got: list[torch.Tensor], want: list[torch.Tensor]) -> int:
        """How many steps have another answer than the plan's in `want`."""
        return sum(not torch.equal(out, want[i % len(want)]) for i, out in enumerate(got))

    def compared(self, name: str, count: int, want: list[torch.Tensor], **settings: Any) -> Finding:
        """`count` late steps with two sets, none of which may differ."""
        wrong = self.differing(self.outs(self._rig.runtime, 2, count, late=True, **settings), want)
        return Finding(f"{count} {name}", wrong == 0, wrong, "steps", 0)


class _DeafEvent:
    def record(self) -> None: ...

    def wait(self) -> None: ...


class DeafRuntime:
    """A device whose events nobody waits for: what would be without them."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self.device = runtime.device
        self.capability = runtime.capability

    def event(self) -> Event:
        return _DeafEvent()

    def pinned(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._runtime.pinned(count, dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime.copy(target, source)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._runtime.fetch(target, source)

    def capture(self, work: Callable[[], None]) -> Graph:
        # The seam asks for the method; section 6, for which this is, captures nothing.
        raise NotImplementedError("nothing is captured without events")

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def memory(self) -> DeviceMemory:
        return self._runtime.memory()

    def reset_peak(self) -> None:
        self._runtime.reset_peak()
