"""EngineThread: one thread owns the engine; messages in, ends out, whatever happens."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.clock import MonotonicClock
from engine.config import CacheConfig, EngineConfig, ExecutorConfig, SchedulerConfig
from engine.errors import EngineDead, LawBroken, RefusalCause, RequestRefused
from engine.events import RecordingSink
from engine.llm_engine import EngineRequest, LLMEngine, TokenOutput
from engine.request import FinishReason
from engine.sampling_params import SamplingParams
from engine.server.api_errors import QueueFull
from engine.server.engine_thread import EngineThread
from engine.server.mailbox import Abort, Add, Mailbox
from engine.server.reply import Reply
from tests.engine.server.live import GatedExecutor, until

Scene = Callable[["Stage"], Awaitable[None]]


class Stage:
    """An engine on its thread, inside a running loop."""

    def __init__(self, *, max_running: int = 4, max_queued: int = 4, pages: int = 64, step_ms: int = 0) -> None:
        config = EngineConfig(
            scheduler=SchedulerConfig(max_running_requests=max_running),
            cache=CacheConfig(num_pages=pages, page_size=16),
            executor=ExecutorConfig(kind="simulated", simulated_step_ms=step_ms),
        )
        self.sink = RecordingSink()
        self.executor = GatedExecutor(config)
        self.engine = LLMEngine(config, executor=self.executor, clock=MonotonicClock(), sink=self.sink)
        self.thread = EngineThread(self.engine, max_queued_requests=max_queued, max_running_requests=max_running)


def request(rid: str, prompt_len: int = 5, max_new: int = 3) -> EngineRequest:
    params = SamplingParams(max_new_tokens=max_new, temperature=0, ignore_eos=True)
    return EngineRequest(rid=rid, prompt_ids=tuple(range(40, 40 + prompt_len)), params=params)


async def outputs_of(reply: Reply) -> list[TokenOutput]:
    outputs = []
    while batch := await reply.batch():
        outputs += batch
    return outputs


def play(scene: Scene, **options: int) -> Stage:
    """Run a scene with a started thread, and stop it."""
    stage = Stage(**options)

    async def run() -> None:
        stage.thread.start(asyncio.get_running_loop())
        try:
            await asyncio.wait_for(scene(stage), 20)
        finally:
            stage.executor.gate.set()
            await stage.thread.stop(0.0)

    asyncio.run(run())
    assert stage.thread.open_replies == 0
    return stage


def test_outputs_come_in_order_and_end_once() -> None:
    async def scene(stage: Stage) -> None:
        replies = [await stage.thread.submit([request(f"r{i}", max_new=5)]) for i in range(4)]
        for index, reply in enumerate(replies):
            outputs = await outputs_of(reply)
            assert [output.output_index for output in outputs] == list(range(5))
            assert {output.rid for output in outputs} == {f"r{index}"}
            assert [output.finish for output in outputs] == [None] * 4 + [FinishReason.LENGTH]
            assert await reply.batch() == []

    play(scene)


def test_the_engine_is_touched_by_its_thread_only() -> None:
    async def scene(stage: Stage) -> None:
        here = threading.get_ident()
        there = await asyncio.wrap_future(stage.thread.call(threading.get_ident))
        assert here != there
        assert (await stage.thread.snapshot()).requests == ()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(stage.thread.call(lambda: 1 // 0))
        await outputs_of(await stage.thread.submit([request("after")]))  # a caller's error is the caller's

    play(scene)


def test_a_live_duplicate_rid_is_refused_and_the_first_goes_on() -> None:
    async def scene(stage: Stage) -> None:
        stage.executor.gate.clear()
        reply = await stage.thread.submit([request("same")])
        for twice in ([request("other"), request("same")], [request("two"), request("two")]):
            with pytest.raises(RequestRefused) as caught:
                await stage.thread.submit(twice)
            assert caught.value.cause is RefusalCause.INVALID
        stage.executor.gate.set()
        assert len(await outputs_of(reply)) == 3

    play(scene)


def test_a_refusal_half_way_ends_what_was_already_taken() -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(RequestRefused) as caught:
            await stage.thread.submit([request("fits"), request("too long", max_new=10**6)])
        assert caught.value.cause is RefusalCause.TOO_LONG
        await outputs_of(await stage.thread.submit([request("later")]))

    stage = play(scene)
    ends = [
        (e.rid, e.cause)
        for e in stage.sink.events
        if type(e).__name__ == "RequestTransitioned" and e.target == "finished"
    ]
    assert ends == [("fits", "abort"), ("later", "length")]


def test_requests_are_taken_all_or_none_up_to_the_bound() -> None:
    async def scene(stage: Stage) -> None:
        with pytest.raises(QueueFull) as caught:
            await stage.thread.submit([request(f"a{i}") for i in range(4)])
        assert (caught.value.depth, caught.value.limit) == (0, 2)
        assert stage.thread.open_replies == 0
        await outputs_of(await stage.thread.submit([request(f"b{i}") for i in range(3)]))  # one row and two places

    play(scene, max_running=1, max_queued=2)


def test_a_queue_that_memory_holds_up_is_bounded_by_the_setting() -> None:
    async def scene(stage: Stage) -> None:
        # 10 pages of 16 tokens: one request fills the pool, seven rows stay free.
        replies = [await stage.thread.submit([request("r0", prompt_len=100, max_new=40)])]
        deepest, refused = 0, 0
        for index in range(1, 12):
            try:
                replies.append(await stage.thread.submit([request(f"r{index}", prompt_len=100, max_new=40)]))
            except QueueFull:
                refused += 1
            waiting = await asyncio.wrap_future(stage.thread.call(lambda: stage.engine.num_waiting))
            deepest = max(deepest, waiting)
        assert deepest == 3
        assert refused >= 1
        for reply in replies:
            await outputs_of(reply)

    play(scene, max_running=8, max_queued=3, pages=10, step_ms=5)


def test_an_abort_ends_with_abort_and_unknown_ones_do_nothing() -> None:
    async def scene(stage: Stage) -> None:
        stage.thread.abort(["nobody"], "no reason")
        reply = await stage.thread.submit([request("r", max_new=500)])
        assert (await reply.batch())[0].token_id is not None
        stage.thread.abort(reply.live_rids, "test")
        stage.thread.abort(["r"], "twice")
        outputs = await outputs_of(reply)
        assert outputs[-1].finish is FinishReason.ABORT
        assert sum(output.finish is not None for output in outputs) == 1
        state = await stage.thread.snapshot()
        assert (state.requests, state.kv.leases) == ((), ())

    play(scene, step_ms=2)  # 500 steps must not be over before the abort is asked for


def test_a_submitter_that_is_cancelled_leaves_nothing() -> None:
    async def scene(stage: Stage) -> None:
        stage.executor.gate.clear()
        first = await stage.thread.submit([request("first")])
        waiting = asyncio.ensure_future(stage.thread.submit([request("cancelled", max_new=500)]))
        await asyncio.sleep(0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        stage.executor.gate.set()
        await outputs_of(first)
        await asyncio.to_thread(until, lambda: not stage.thread.open_replies)
        assert (await stage.thread.snapshot()).requests == ()

    play(scene)


def test_a_crash_ends_every_reply_once_and_refuses_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        stage.executor.gate.clear()
        live = await stage.thread.submit([request("live"), request("live2")])
        inside = asyncio.ensure_future(stage.thread.submit([request("in the mailbox")]))
        future = stage.thread.call(lambda: 1)
        await asyncio.sleep(0)

        def broken() -> list[TokenOutput]:
            raise LawBroken("a law does not hold")

        stage.engine.step = broken
        stage.executor.gate.set()
        outputs = await outputs_of(live)
        assert [o.rid for o in outputs if o.finish is FinishReason.ERROR] == ["live", "live2"]
        (last,) = await asyncio.gather(inside, return_exceptions=True)
        if isinstance(last, Reply):  # taken in the turn of the crash: then it has its end
            assert [output.finish for output in await outputs_of(last)] == [FinishReason.ERROR]
        else:
            assert isinstance(last, EngineDead)
        assert future.done()
        for _ in range(3):
            with pytest.raises(EngineDead, match="a law does not hold"):
                await stage.thread.submit([request("late")])
        assert "a law does not hold" in stage.thread.status.dead
        late = stage.thread.call(lambda: 1)
        assert isinstance(late.exception(1), EngineDead)

    play(scene)
    assert "the engine stopped" in caplog.text


@pytest.mark.parametrize("error", [ValueError("may quote a prompt"), SystemExit("may quote a prompt")])
def test_texts_of_foreign_exceptions_stay_in_the_log(error: BaseException) -> None:
    async def scene(stage: Stage) -> None:
        def broken() -> list[TokenOutput]:
            raise error

        stage.engine.step = broken
        reply = await stage.thread.submit([request("r")])
        outputs = await outputs_of(reply)
        assert (outputs[-1].finish, outputs[-1].detail) == (FinishReason.ERROR, "engine_dead")
        assert stage.thread.status.dead == type(error).__name__

    play(scene)


def test_stopping_ends_what_is_live_and_what_is_in_the_mailbox() -> None:
    stage = Stage()

    async def scene() -> list[Any]:
        stage.thread.start(asyncio.get_running_loop())
        stage.executor.gate.clear()
        live = await stage.thread.submit([request("live", max_new=400)])
        late = asyncio.ensure_future(stage.thread.submit([request("late")]))
        await asyncio.sleep(0)
        stop = asyncio.ensure_future(stage.thread.stop(0.0))
        await asyncio.sleep(0.02)
        stage.executor.gate.set()
        await stop
        return [await outputs_of(live), await asyncio.gather(late, return_exceptions=True)]

    outputs, (late,) = asyncio.run(scene())
    assert outputs[-1].finish is FinishReason.ABORT
    if isinstance(late, Reply):  # taken before the shutdown was seen: then it has an end like the others
        assert not late.live_rids
    else:
        assert isinstance(late, RequestRefused)
    assert stage.thread.status.stopped
    assert stage.engine.snapshot().requests == ()


def test_an_idle_thread_beats_and_does_not_spin() -> None:
    async def scene(stage: Stage) -> None:
        steps = stage.engine.steps_done
        before = stage.thread.status.heartbeat_ns
        await asyncio.to_thread(until, lambda: stage.thread.status.heartbeat_ns != before)
        assert stage.engine.steps_done == steps
        assert time.monotonic_ns() - stage.thread.status.progress_ns < 5_000_000_000

    play(scene)


def test_the_mailbox_bounds_requests_but_never_an_abort() -> None:
    async def scene() -> None:
        box = Mailbox(2)
        assert box.post(Add((request("a"), request("b")), Reply(["a", "b"])))
        assert not box.post(Add((request("c"),), Reply(["c"])))
        assert all(box.post(Abort((f"r{i}",), "")) for i in range(100))
        assert box.pending_requests == 2
        assert len(box.take(0)) == 101
        assert box.post(Add((request("c"),), Reply(["c"])))
        assert len(box.close()) == 1
        assert not box.post(Abort(("a",), ""))

    asyncio.run(scene())


def test_nothing_follows_an_end() -> None:
    async def scene() -> None:
        reply = Reply(["a"])
        reply.accepted.set_result(None)
        reply.deliver(TokenOutput("a", 1, 0))
        reply.deliver(TokenOutput("a", None, 1, finish=FinishReason.ABORT))
        reply.deliver(TokenOutput("a", 2, 1))
        reply.fail(EngineDead("x"), FinishReason.ERROR, "x")
        assert [output.finish for output in await reply.batch()] == [None, FinishReason.ABORT]
        assert await reply.batch() == []

    asyncio.run(scene())
