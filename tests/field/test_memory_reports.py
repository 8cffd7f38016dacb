"""Reported faults of memory, exits and the prefill/decode border: FR-03, 08, 12, 19, 20, 21, 23, 25, 42."""

from __future__ import annotations

import pytest

from engine.errors import RefusalCause, RequestRefused
from engine.events import RecordingSink
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduler.decision import Guard
from tests.builders import engine_config
from tests.engine.stub_model import EOS, StubRun, expected_tokens
from tests.field.test_admission_reports import (
    all_end_well,
    computed_tokens,
    mixed_on_and_off,
    pages_1_and_16,
    plans,
    prompt,
    retractions,
    started,
)
from tests.stateful.laws import check_state

chunk_on_and_off = pytest.mark.parametrize("chunk", [None, 32])


@pages_1_and_16
@chunk_on_and_off
@mixed_on_and_off
def test_fr_03_an_allocation_miss_changes_nothing(page_size: int, chunk: int | None, enable_mixed_chunk: bool) -> None:
    """The allocator says no once: everyone keeps place, row, lock and page, and the next step admits all three."""
    config = engine_config(
        page_size=page_size,
        num_pages=640 // page_size,
        chunked_prefill_size=chunk and 160,
        enable_mixed_chunk=enable_mixed_chunk,
    )
    run, sink = started(config)
    run.add("old", prompt(9, 40), 12)
    run.step()
    run.step()
    for number in range(3):
        run.add(f"r{number}", prompt(number, 40), 3)
    before, queue = run.kv.snapshot(), [request.rid for request in run.state.waiting]
    left = [True]
    run.kv.allocation_fault = lambda _kind: bool(left) and left.pop()
    run.step()
    after = run.kv.snapshot()
    assert (after.states, after.owners, after.leases, after.free_rows) == (
        before.states,
        before.owners,
        before.leases,
        before.free_rows,
    )
    assert [node.lock_count for node in after.nodes] == [node.lock_count for node in before.nodes]
    assert [request.rid for request in run.state.waiting] == queue
    failed = plans(sink)[-1]
    assert failed.claim_failed
    assert Guard.ALLOC_MISS in failed.guards
    check_state(run.state)
    run.step()
    assert [row.rid for row in plans(sink)[-1].prefills] == queue
    run.run()
    assert sum(plan.claim_failed for plan in plans(sink)) == 1
    all_end_well(run)


def test_fr_03_a_miss_in_a_decode_step_is_made_up() -> None:
    run, sink = started(engine_config(page_size=1, num_pages=64))
    run.add("r", prompt(0, 10), 10)
    run.step()
    run.step()
    done = len(run.tokens("r"))
    left = [True]
    run.kv.allocation_fault = lambda kind: kind == "decode" and bool(left) and left.pop()
    assert run.step() == []
    assert len(run.tokens("r")) == done
    run.run()
    assert sum(plan.claim_failed for plan in plans(sink)) == 1
    all_end_well(run)


@pages_1_and_16
@mixed_on_and_off
@pytest.mark.parametrize("radix", [True, False])
def test_fr_08_a_piece_reads_only_what_is_written(page_size: int, enable_mixed_chunk: bool, radix: bool) -> None:
    """All free slots are poisoned; the stub model reports every read of one, and of another prefix's K/V."""
    config = engine_config(
        page_size=page_size,
        num_pages=1024 // page_size,
        chunked_prefill_size=32,
        enable_mixed_chunk=enable_mixed_chunk,
        enable_radix=radix,
    )
    run, sink = started(config)
    run.add("d", prompt(1, 20), 30)
    run.step()
    run.add("L", prompt(0, 100), 5)
    run.run()
    pieces = [(row.prefix_len, row.extend_end) for plan in plans(sink) for row in plan.prefills if row.rid == "L"]
    assert len(pieces) >= 4
    assert [end for _, end in pieces[:-1]] == [start for start, _ in pieces[1:]]
    assert (pieces[0][0], pieces[-1][1]) == (0, 100)
    whole = engine_config(page_size=page_size, num_pages=1024 // page_size, chunked_prefill_size=None)
    alone, _ = started(whole)
    alone.add("L", prompt(0, 100), 5)
    alone.run()
    assert alone.tokens("L") == run.tokens("L")
    all_end_well(run)


@pytest.mark.parametrize("order", ["CABD", "ABDC"])
@pages_1_and_16
def test_fr_12_a_retraction_costs_nobody_else_a_step(order: str, page_size: int) -> None:
    """Memory runs out while four decode: who is scheduled in that step is everyone but the victims, each once."""
    config = engine_config(page_size=page_size, num_pages=96 // page_size, schedule_conservativeness=0.01)
    run, sink = started(config)
    for index, name in enumerate(order):
        run.add(name, prompt(ord(name) - 65, 12 + index), 40, ignore_eos=False, min_new_tokens=40)
    for _ in range(400):
        if not run.engine.has_work:
            break
        running = [request.rid for request in run.state.live_running]
        before = {rid: len(run.tokens(rid)) for rid in running}
        run.step()
        check_state(run.state)
        plan = plans(sink)[-1]
        victims = [victim.rid for victim in plan.retractions]
        if not victims:
            continue
        assert len(set(victims)) == len(victims)
        assert sorted([*victims, *plan.decodes]) == sorted(running)
        for rid in plan.decodes:
            assert len(run.tokens(rid)) == before[rid] + 1
        # The reference's victim: fewest outputs, then longest prompt.
        assert before[victims[0]] == min(before.values())
    assert retractions(sink), "the scenario must retract"
    all_end_well(run)


@pages_1_and_16
@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("everyone", [False, True])
def test_fr_19_an_abort_between_two_pieces_leaves_nothing(page_size: int, pieces: int, everyone: bool) -> None:
    """One end with reason abort and no token; pages and row are back within a step; the next in the queue starts."""
    config = engine_config(
        page_size=page_size, num_pages=1024 // page_size, chunked_prefill_size=64, max_running_requests=1
    )
    run, _ = started(config)
    run.add("L", prompt(0, 300), 4)
    run.add("next", prompt(1, 20), 2)
    for _ in range(pieces):
        run.step()
    had = run.tokens("L")
    assert len(had) == (1 if pieces == 5 else 0)
    assert (run.state.continuation is not None) == (0 < pieces < 5)
    for rid in ["L", "next"] if everyone else ["L"]:
        assert run.engine.abort_request(rid, "client went away")
    outputs = run.step()
    ends = [(output.rid, output.token_id) for output in outputs if output.finish is FinishReason.ABORT]
    assert ends == [("L", None), ("next", None)][: len(ends)]
    assert len(ends) == 1 + everyone
    assert "L" not in run.kv.leases
    check_state(run.state)
    assert not run.engine.abort_request("L")
    run.run()
    assert run.tokens("L") == had
    assert run.end("L") == ("abort", "client went away")
    assert run.end("next") == (("abort", "client went away") if everyone else ("length", ""))
    all_end_well(run)


@pages_1_and_16
@chunk_on_and_off
def test_fr_20_a_freed_duplicate_is_not_used_again(page_size: int, chunk: int | None) -> None:
    """Two identical prompts at once: the second one's copy is freed, and its table points at the tree's pages."""
    config = engine_config(page_size=page_size, num_pages=640 // page_size, chunked_prefill_size=chunk)
    run, _ = started(config)
    run.add("one", prompt(0, 64), 20)
    run.add("two", prompt(0, 64), 20)
    while len(run.state.live_running) < 2:
        run.step()
        check_state(run.state)
    run.add("third", prompt(5, 64), 20)
    for _ in range(4):
        run.step()
        check_state(run.state)
    one, two = (run.kv.leases[rid] for rid in ("one", "two"))
    shared = 64 // page_size
    assert one.pages[:shared].tolist() == two.pages[:shared].tolist()
    node = one.node
    while node.parent is not None:
        assert node.lock_count == 2
        node = node.parent
    run.run()
    all_end_well(run)


def test_fr_21_the_matched_node_itself_is_locked() -> None:
    """A (32 tokens) above B (32): a request on A + B keeps both from eviction until it ends."""
    run, _ = started(engine_config(page_size=16, num_pages=64))
    base = prompt(0, 64)
    run.add("A", base[:32], 1)
    run.run()
    run.add("B", [*base, 40], 1)
    run.run()
    assert run.kv.evictable_pages == 4
    run.add("user", [*base, 50, 51], 30)
    run.step()
    run.step()
    assert [node.lock_count for node in run.kv.tree.nodes()] == [1, 1]
    assert run.kv.evictable_pages == 0
    assert run.kv.evict_until_free(64) == 0
    run.run()
    assert run.kv.evictable_pages >= 4
    run.kv.evict_until_free(64)
    assert run.kv.free_pages == 64
    all_end_well(run)


@pages_1_and_16
@pytest.mark.parametrize("how", ["radix off", "flushed between pieces", "cached"])
def test_fr_23_progress_is_kept_in_the_request(page_size: int, how: str) -> None:
    """300 tokens in pieces of 64: five pieces, each token computed once, never more pages than the prompt needs."""
    config = engine_config(
        page_size=page_size, num_pages=1024 // page_size, chunked_prefill_size=64, enable_radix=how != "radix off"
    )
    # Without the checker: evictions from outside a step are none that it could count.
    sink = RecordingSink()
    run = StubRun(config, sink)
    run.add("L", prompt(0, 300), 2)
    held = []
    while run.engine.has_work:
        run.step()
        held += [lease.count for lease in run.kv.leases.values()]
        if how == "flushed between pieces":
            run.kv.evict_until_free(run.kv.num_pages)
    pieces = [row for plan in plans(sink) for row in plan.prefills]
    assert len(pieces) == 5
    assert computed_tokens(sink, "L") == 300
    assert max(held) <= -(-301 // page_size)
    all_end_well(run)


def test_fr_25_a_live_id_is_refused_and_free_again_after_its_end() -> None:
    """Duplicate of a live request: refused and nothing of the first one changes. After the end the id is free."""
    run, _ = started(engine_config(num_pages=64))
    run.add("same", prompt(0, 40), 6)
    run.step()
    with pytest.raises(RequestRefused, match="live request") as refused:
        run.engine.add_request(run.requests["same"])
    assert refused.value.cause is RefusalCause.INVALID
    assert len(run.state.requests) == len(run.engine.tokens) == 1
    run.run()
    run.assert_right_tokens("same")
    for _ in range(2):  # reuse after a normal end, then right after a cancel
        run.outputs["same"] = []
        run.add("same", prompt(1, 30), 5)
        run.step()
        run.engine.abort_request("same")
        run.step()
        assert run.end("same") == ("abort", "")
        run.outputs["same"] = []
        run.add("same", prompt(2, 30), 5)
        run.run()
        run.assert_right_tokens("same")
        assert run.end("same") == ("length", "")
    run.assert_nothing_held()


def test_fr_25_a_cancelled_id_is_free_once_its_end_is_handed_out() -> None:
    """A retry right after the cancel is refused: whose end would come next? One step later it is served."""
    run = StubRun(engine_config(num_pages=64))
    run.add("same", prompt(0, 40), 6)
    run.step()
    run.engine.abort_request("same")
    request = run.requests["same"]
    with pytest.raises(RequestRefused, match="live request"):
        run.engine.add_request(request)
    outputs = run.engine.step()
    assert [(output.rid, output.token_id, output.finish) for output in outputs] == [("same", None, FinishReason.ABORT)]
    run.engine.add_request(request)
    second = []
    while run.engine.has_work:
        second += run.engine.step()
    assert [o.token_id for o in second] == expected_tokens(request.prompt_ids, request.params)
    assert [o.output_index for o in second] == list(range(6))


@mixed_on_and_off
@chunk_on_and_off
@pages_1_and_16
@pytest.mark.parametrize("how_many", [1, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_fr_42_the_shortest_outputs(
    page_size: int, chunk: int | None, enable_mixed_chunk: bool, how_many: int, overlap: bool
) -> None:
    """max_new_tokens 1 and 2, and EOS as the very first token: exactly so many tokens, and rows are free at once."""
    config = engine_config(
        page_size=page_size,
        num_pages=2048 // page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=enable_mixed_chunk,
        max_running_requests=2,
        overlap=overlap,
    )
    for limit in (1, 2):
        run, sink = started(config)
        for number in range(how_many):
            run.add(f"r{number}", prompt(number, 40), limit)
        run.run(max_steps=80)
        assert all(len(run.tokens(rid)) == limit for rid in run.requests)
        assert all(run.end(rid) == ("length", "") for rid in run.requests)
        if limit == 1:
            assert not any(plan.decodes for plan in plans(sink)), "a decode step for a request of one token"
        all_end_well(run)


def _prompt_with_early_eos(at: int) -> list[int]:
    """A prompt whose output number `at` (1-based) is the end token, when nothing forbids it."""
    params = SamplingParams(max_new_tokens=at)
    for number in range(90):
        for length in range(5, 60):
            candidate = prompt(number, length)
            tokens = expected_tokens(candidate, params)
            if len(tokens) == at and tokens[-1] == EOS:
                return candidate
    raise AssertionError("no such prompt")


@pages_1_and_16
@pytest.mark.parametrize("overlap", [False, True])
def test_fr_42_the_end_token_first_and_ignored_and_held_back(page_size: int, overlap: bool) -> None:
    """EOS as the first token stops at once; ignore_eos runs on; min_new_tokens=5 with EOS at 2 gives at least 5."""
    run, _ = started(engine_config(page_size=page_size, num_pages=512 // page_size, overlap=overlap))
    first, second = _prompt_with_early_eos(1), _prompt_with_early_eos(2)
    run.add("stops", first, 9, ignore_eos=False)
    run.add("ignores", first, 9, ignore_eos=True)
    run.add("holds", second, 9, ignore_eos=False, min_new_tokens=5)
    run.run()
    assert run.tokens("stops") == [EOS]
    assert run.end("stops") == ("stop", "eos")
    assert len(run.tokens("ignores")) == 9
    assert run.end("ignores") == ("length", "")
    assert len(run.tokens("holds")) >= 5
    assert EOS not in run.tokens("holds")[:4]
    all_end_well(run)


@pytest.mark.parametrize("limit", [0, -1])
def test_fr_42_no_output_at_all_is_refused(limit: int) -> None:
    run, _ = started(engine_config(num_pages=64))
    with pytest.raises(RequestRefused, match=f"max_new_tokens is {limit}; at least 1") as refused:
        run.add("r", prompt(0, 5), limit)
    assert (refused.value.cause, refused.value.field) == (RefusalCause.INVALID, "max_tokens")
    assert not run.engine.has_work


def test_the_stub_model_reports_what_these_tests_rely_on() -> None:
    """Poison and foreign K/V are noticed: a page table that points at another request's page fails the step."""
    run, _ = started(engine_config(page_size=16, num_pages=64))
    run.add("a", prompt(0, 40), 9)
    run.add("b", prompt(1, 40), 9)
    run.step()
    run.step()
    run.kv.leases["b"].adopt(0, run.kv.leases["a"].pages[:1])
    with pytest.raises(AssertionError, match="reads K/V of another prefix"):
        run.step()
    other: StubRun = started(engine_config(page_size=16, num_pages=64))[0]
    other.add("a", prompt(0, 40), 9)
    other.step()
    other.model.poison(other.kv.leases["a"].pages[:1].tolist())
    with pytest.raises(AssertionError, match="not written"):
        other.step()
