"""Siblings: choices of one prompt compute it once, wait in sight of the limits, and end exactly once each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import StepPlanned
from engine.llm_engine import EngineRequest, TokenOutput
from engine.request import Cause, FinishReason
from engine.sampling_params import SamplingParams
from engine.server.queue_limits import QueueLimits
from engine.server.siblings import Siblings
from tests.engine.server.live import GatedExecutor, LiveServer, until
from tests.engine.server.test_disconnects import leave

PROMPT = "a prompt of some length, which four choices need " * 4
TOKENS = len(PROMPT)


def computed(live: LiveServer) -> int:
    """Prompt tokens that were computed, of all requests."""
    plans = [event for event in live.sink.events if isinstance(event, StepPlanned)]
    return sum(row.extend_len for plan in plans for row in plan.prefills)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_computed_once_for_all_its_choices(serve: Any, stream: bool) -> None:
    live = serve()
    answer = live.post(prompt=PROMPT, n=4, max_tokens=6, ignore_eos=True, stream=stream)
    assert answer.status_code == 200
    assert TOKENS <= computed(live) <= TOKENS + 3 * live.config.cache.page_size
    if not stream:
        usage = answer.json()["usage"]
        assert usage["prompt_tokens"] == TOKENS
        assert usage["completion_tokens"] == 24
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0, "computed for this call, not found"
    live.assert_nothing_held()


def test_each_prompt_of_a_call_has_its_own_first(serve: Any) -> None:
    live = serve()
    answer = live.post(prompt=[PROMPT, "short", PROMPT.upper()], n=3, max_tokens=4, ignore_eos=True)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(9))
    assert computed(live) <= 2 * TOKENS + 3 * len("short") + 4 * live.config.cache.page_size
    live.assert_nothing_held()


def test_choices_are_those_of_the_same_request_asked_alone(serve: Any) -> None:
    live = serve()
    ask: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "seed": 4, "temperature": 1}
    several = live.post(n=3, **ask).json()["choices"]
    assert several[0]["text"] == live.post(**ask).json()["choices"][0]["text"]
    assert [choice["text"] for choice in live.post(n=3, **ask).json()["choices"]] == [c["text"] for c in several]


def test_those_who_wait_are_counted_and_end_when_their_client_leaves(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor)
    live.executor.gate.clear()
    body = {"model": "simulated", "prompt": PROMPT, "n": 5, "max_tokens": 50}
    leave(live, body, lambda: live.executor.batches)
    assert live.thread.open_replies == 5
    # As of the beginning of the step that is under way: the first choice waited, too.
    assert live.thread.status.waiting == 5
    live.executor.gate.set()
    live.assert_nothing_held()
    assert live.post(max_tokens=2).status_code == 200


def test_those_who_wait_fill_the_queue(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor, server={"max_queued_requests": 8}, scheduler={"max_running_requests": 2})
    live.executor.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(live.post, prompt=PROMPT, n=8, max_tokens=2, ignore_eos=True)
        until(lambda: live.executor.batches, "the first choice is in a step")
        second = pool.submit(live.post, prompt=PROMPT, n=4, max_tokens=2)
        live.executor.gate.set()
        statuses = {first.result().status_code, second.result().status_code}
    assert first.result().status_code == 200
    assert statuses <= {200, 429}
    live.assert_nothing_held()


def test_a_shutdown_ends_those_who_wait(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor)
    live.executor.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.post, prompt=PROMPT, n=4, max_tokens=1000)
        until(lambda: live.executor.batches, "the first choice is in a step")
        live.thread.begin_shutdown(0.0)
        live.executor.gate.set()
        assert answer.result().status_code == 503
    until(lambda: live.thread.open_replies == 0, "every reply ended")
    assert live.thread.status.waiting == 0


def test_a_step_that_fails_ends_only_those_in_it(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor)
    live.executor.fail_next = True
    assert live.post(prompt=PROMPT, n=3, max_tokens=4).status_code == 503
    live.assert_nothing_held()
    assert live.post(prompt=PROMPT, n=3, max_tokens=4).status_code == 200
    live.assert_nothing_held()


# -- the books ---------------------------------------------------------------------------------------------------------


def request(rid: str, prompt: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(rid=rid, prompt_ids=prompt, params=SamplingParams())


def output(rid: str, *, token: int | None = 7, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(rid=rid, token_id=token, output_index=0, finish=finish)


def held(count: int = 3) -> Siblings:
    siblings = Siblings(1)
    prompt = (1, 2, 3)
    now, behind = siblings.divide([request(f"r{i}", prompt) for i in range(count + 1)])
    assert [r.rid for r in now] == ["r0"]
    siblings.hold(behind)
    return siblings


def test_a_token_of_the_first_frees_all() -> None:
    siblings = held()
    assert siblings.follow([output("other"), output("r0")]) == ([request(f"r{i}", (1, 2, 3)) for i in (1, 2, 3)], [])
    assert len(siblings) == 0
    assert siblings.follow([output("r0")]) == ([], [])


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.ERROR])
def test_when_the_first_ends_without_a_token_the_next_goes_first(finish: FinishReason) -> None:
    siblings = held()
    freed, ends = siblings.follow([output("r0", token=None, finish=finish)])
    assert ([r.rid for r in freed], ends, len(siblings)) == (["r1"], [], 2)
    freed, ends = siblings.follow([output("r1")])
    assert ([r.rid for r in freed], ends, len(siblings)) == (["r2", "r3"], [], 0)


def test_a_refusal_of_the_first_is_one_of_all() -> None:
    siblings = held()
    freed, ends = siblings.follow([output("r0", token=None, finish=FinishReason.REFUSED)])
    assert freed == []
    assert ends == [output(f"r{i}", token=None, finish=FinishReason.REFUSED) for i in (1, 2, 3)]


def test_short_prompts_equal_prompts_of_others_and_no_sharing_hold_nobody() -> None:
    one, other = tuple(range(40)), tuple(range(40))
    assert one is not other
    for share_from, requests in (
        (41, [request("a", one), request("b", one)]),
        (None, [request("a", one), request("b", one)]),
        (40, [request("a", one), request("b", other)]),
    ):
        assert Siblings(share_from).divide(requests) == (requests, {})


def test_the_wait_of_who_is_held_counts_from_the_beginning() -> None:
    """Also when the first ends early and another goes first; a refusal and an abort leave nothing behind."""
    siblings = held()
    siblings.follow([output("r0", token=None, finish=FinishReason.ABORT)])
    siblings.drop("r3")
    siblings.hold({}, 99)
    assert siblings.since("r1") == 0
    siblings.follow([output("r1")])
    assert siblings.since("r2") == 0
    assert siblings._since == {}


class Waiting:
    """A queue whose members entered at a time; who was admitted is not in it."""

    def __init__(self, entered_ns: dict[str, int]) -> None:
        self.entered_ns = entered_ns
        self.now_ns = 0
        self.refused: list[str] = []

    def overdue(self, limit_ns: int, /) -> list[str]:
        return [rid for rid, at in self.entered_ns.items() if self.now_ns - at >= limit_ns]

    def displaceable(self, _priority: int | None, _count: int, /) -> list[str]:
        return []

    def turn_away(self, rid: str, cause: Cause, /) -> bool:
        assert cause is Cause.QUEUE_TIMEOUT
        del self.entered_ns[rid]
        self.refused.append(rid)
        return True


def test_a_time_behind_another_is_taken_off_the_time_in_the_queue() -> None:
    queue = Waiting({"freed": 70, "admitted": 70, "plain": 70})
    limits = QueueLimits(queue, timeout_s=100e-9, displaces=False)
    for rid in ("freed", "admitted"):
        limits.count_from(rid, 20, 70)
    del queue.entered_ns["admitted"]
    for now_ns, refused in ((119, []), (120, ["freed"]), (169, ["freed"]), (170, ["freed", "plain"])):
        queue.now_ns = now_ns
        limits.expire(now_ns)
        assert queue.refused == refused
    assert limits._waited_before == {}


@given(
    count=st.integers(1, 6),
    moves=st.lists(st.tuples(st.sampled_from(["token", "abort", "refused", "drop"]), st.integers(0, 6)), max_size=12),
)
def test_everybody_is_freed_ended_or_dropped_exactly_once(count: int, moves: list[tuple[str, int]]) -> None:
    siblings = held(count)
    seen: list[str] = []
    for move, number in moves:
        rid = f"r{number}"
        if move == "drop":
            if siblings.drop(rid):
                seen.append(rid)
            continue
        finish = {"token": None, "abort": FinishReason.ABORT, "refused": FinishReason.REFUSED}[move]
        freed, ends = siblings.follow([output(rid, token=7 if finish is None else None, finish=finish)])
        seen += [r.rid for r in freed] + [end.rid for end in ends]
        assert len(siblings) == count - len(seen)
    assert len(set(seen)) == len(seen)
    assert set(seen) <= {f"r{i}" for i in range(1, count + 1)}
