"""Faults of what requests hold. Owns: one method of the real cache, pool or tree broken at a time."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kvcache.kv_cache import KvLease
from engine.kvcache.page_pool import PageState
from engine.kvcache.radix_cache import Node
from engine.request import Cause, RequestState
from engine.scheduler import commit
from engine.scheduler.plan import StepPlan
from tests.builders import CoreRun
from tests.sabotage.engine_faults import breaks, planned

# -- what a request holds --------------------------------------------------------------------------------------------


@breaks("INV-LOCK-01", "a temporary lock that stays")
def temporary_lock(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    def change(plan: StepPlan) -> StepPlan:
        tree, requests = run.scheduler.kv.tree, run.scheduler.state.requests
        for decision in plan.decisions:
            request = requests[decision.rid]
            if decision.is_admitted or request.state is not RequestState.WAITING:
                continue
            node, pages = tree.touch(request.keys.first(4))
            if pages:
                tree.lock(node, request.rid)
        return plan

    planned(run, patch, change)


@breaks("INV-LOCK-01", "a victim that keeps its lock")
def victim_keeps_lock(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    tree, original = type(run.scheduler.kv.tree), commit.retract
    unlock = tree.unlock

    def broken(state: Any, request: Any, publisher: Any, cause: Cause = Cause.RETRACT) -> None:
        patch.setattr(tree, "unlock", lambda self, node, rid: None)
        original(state, request, publisher, cause)
        patch.setattr(tree, "unlock", unlock)

    patch.setattr(commit, "retract", broken)


@breaks("INV-LOCK-02", "a row given out twice")
def row_twice(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.kv.release

    def broken(lease: KvLease, keys: Any, *, split_at: int | None = None) -> None:
        original(lease, keys, split_at=split_at)
        run.scheduler.kv._free_rows.append(lease.row)

    patch.setattr(run.scheduler.kv, "release", broken)


@breaks("INV-LOCK-02", "a row that leaks")
def row_leaks(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.kv.release

    def broken(lease: KvLease, keys: Any, *, split_at: int | None = None) -> None:
        original(lease, keys, split_at=split_at)
        if lease.rid == "r1":
            run.scheduler.kv._free_rows.pop()

    patch.setattr(run.scheduler.kv, "release", broken)


@breaks("INV-LOCK-03", "a lock counted twice")
def lock_twice(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    tree = run.scheduler.kv.tree
    original = type(tree).lock

    def broken(self: Any, node: Node, rid: str, *, above: Node | None = None) -> None:
        if rid == "r3" and node.parent is not None:
            node.lock_count += 1
        original(self, node, rid, above=above)

    patch.setattr(type(tree), "lock", broken)


@breaks("INV-LOCK-03", "a split that forgets one holder")
def split_forgets(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    tree = run.scheduler.kv.tree
    original = type(tree)._split

    def broken(self: Any, *args: Any, **kwargs: Any) -> Node:
        upper = original(self, *args, **kwargs)
        if upper.lock_count:
            upper.lock_count -= 1
        return upper

    patch.setattr(type(tree), "_split", broken)


@breaks("INV-EXIT-01", "an end that forgets to unlock")
def forgotten_unlock(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    tree = run.scheduler.kv.tree
    original = type(tree).unlock
    patch.setattr(type(tree), "unlock", lambda self, node, rid: None if rid == "r1" else original(self, node, rid))


@breaks("INV-EXIT-01", "an end that keeps its private pages")
def keeps_pages(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = type(run.scheduler.kv.pool).move

    def broken(self: Any, pages: Any, source: PageState, target: PageState, *, owner: int, cause: str) -> None:
        if cause != "free":
            original(self, pages, source, target, owner=owner, cause=cause)

    patch.setattr(type(run.scheduler.kv.pool), "move", broken)


@breaks("INV-EXIT-01", "two ends of one abort")
def two_ends(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.scheduler.abort

    def broken(rid: str, now_ns: int, *, detail: str = "") -> bool | None:
        request = run.scheduler.state.requests.get(rid)
        done = original(rid, now_ns, detail=detail)
        if request is not None:
            run.scheduler.publisher.transitioned(request, RequestState.DECODE, Cause.ABORT, row=0)
        return done

    patch.setattr(run.scheduler, "abort", broken)
    original_step = run.step
    patch.setattr(run, "step", lambda **kwargs: (run.abort("r1") if run.steps == 4 else None, original_step(**kwargs)))


# -- pages -----------------------------------------------------------------------------------------------------------


@breaks("INV-PAGE-01", "a counter that drifts")
def counter_drifts(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.step

    def broken(**kwargs: Any) -> StepPlan:
        if run.steps == 5:
            run.scheduler.kv.pool._counts[PageState.FREE] -= 1
        return original(**kwargs)

    patch.setattr(run, "step", broken)


@breaks("INV-PAGE-02", "a page in two places, sums balanced")
def two_owners(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.step

    def broken(**kwargs: Any) -> StepPlan:
        leases = [lease for lease in run.scheduler.kv.leases.values() if lease.count > lease.shared]
        if len(leases) > 1:
            leases[1]._pages[leases[1].count - 1] = leases[0].pages[-1]
        return original(**kwargs)

    patch.setattr(run, "step", broken)


@breaks("INV-PAGE-02", "a free page in a page table")
def free_page_used(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.step

    def broken(**kwargs: Any) -> StepPlan:
        lease = next((one for one in run.scheduler.kv.leases.values() if one.count > one.shared), None)
        if lease is not None:
            lease._pages[lease.count - 1] = run.scheduler.kv.pool._free[0]
        return original(**kwargs)

    patch.setattr(run, "step", broken)


@breaks("INV-PAGE-02", "the wrong owner after a split")
def split_owner(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = type(run.scheduler.kv.pool).move

    def broken(self: Any, pages: Any, source: PageState, target: PageState, *, owner: int, cause: str) -> None:
        original(self, pages, source, target, owner=owner + 500 if cause == "split" else owner, cause=cause)

    patch.setattr(type(run.scheduler.kv.pool), "move", broken)


@breaks("INV-PAGE-02", "a page in limbo")
def limbo(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    original = run.step

    def broken(**kwargs: Any) -> StepPlan:
        pool = run.scheduler.kv.pool
        if run.steps == 3 and pool._free_top:
            pool._free_top -= 1  # dropped from the free list, in nobody's hands
        return original(**kwargs)

    patch.setattr(run, "step", broken)


@breaks("INV-PAGE-03", "an eviction of a locked node")
def evicts_locked(run: CoreRun, patch: pytest.MonkeyPatch) -> None:
    tree, pool = run.scheduler.kv.tree, run.scheduler.kv.pool
    original = type(tree).evict_until_free

    def broken(self: Any, free_pages: int) -> int:
        leaf = next((node for node in self.nodes() if node.lock_count and not node.children), None)
        if leaf is not None and pool.count(PageState.FREE) < free_pages:
            pool._states[leaf.pages] = PageState.EVICTABLE  # past the pool's own check
            pool.move(leaf.pages, PageState.EVICTABLE, PageState.FREE, owner=-1, cause="evict")
        return original(self, free_pages)

    patch.setattr(type(tree), "evict_until_free", broken)
