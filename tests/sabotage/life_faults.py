"""Faults of how requests come and go. Owns: aborts, ends and prefixes handled wrongly, one at a time."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kvcache.kv_cache import KvLease
from engine.kvcache.radix_cache import Node
from engine.request import Cause
from tests.builders import CoreRun
from tests.sabotage.engine_faults import breaks


def hang_up_in_flight(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    """No fault: once, a client goes while its decode is under way."""
    original, done = run.scheduler.apply, []

    def apply(plan: Any, outcome: Any) -> None:
        if plan.decodes and not done:
            done.append(plan.decodes[0])
            run.abort(plan.decodes[0])
        original(plan, outcome)

    patch.setattr(run.scheduler, "apply", apply)


@breaks("INV-STEP-01", "pages given back while the step still writes them")
def early_free(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.abort

    def abort(rid: str, now_ns: int, **kwargs: Any) -> bool | None:
        request = run.scheduler.state.requests.get(rid)
        if request is not None:
            request.in_flight = 0
        return original(rid, now_ns, **kwargs)

    patch.setattr(run.scheduler, "abort", abort)
    hang_up_in_flight(run, patch)


@breaks("INV-LOCK-02", "a row that a hang-up leaks")
def hang_up_leaks_row(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    scheduler = run.scheduler
    abort, release = scheduler.abort, scheduler.kv.release

    def leaky(lease: KvLease, keys: Any, *, split_at: int | None = None) -> None:
        release(lease, keys, split_at=split_at)
        scheduler.kv._free_rows.pop()

    def broken(rid: str, now_ns: int, **kwargs: Any) -> bool | None:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(scheduler.kv, "release", leaky)
            return abort(rid, now_ns, **kwargs)

    patch.setattr(scheduler, "abort", broken)
    step = run.step

    def hang_up(**kwargs: Any) -> Any:
        running = scheduler.state.live_running
        if run.steps == 6 and running:
            run.abort(next(iter(running)).rid)
        return step(**kwargs)

    patch.setattr(run, "step", hang_up)


@breaks("INV-LOCK-03", "a prefix counted on and not pinned")
def unpinned(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    tree = run.scheduler.kv.tree
    original = type(tree).lock

    def broken(self: Any, node: Node, rid: str, *, above: Node | None = None) -> None:
        if above is not None or node.parent is None:
            original(self, node, rid, above=above)

    patch.setattr(type(tree), "lock", broken)


@breaks("INV-EXIT-01", "an end that is never told")
def untold_end(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original, untold = type(run.scheduler.publisher).transitioned, []

    def broken(self: Any, request: Any, source: Any, cause: Cause, **kwargs: Any) -> None:
        if cause is Cause.LENGTH and not untold:
            untold.append(request.rid)
            return
        original(self, request, source, cause, **kwargs)

    patch.setattr(type(run.scheduler.publisher), "transitioned", broken)
