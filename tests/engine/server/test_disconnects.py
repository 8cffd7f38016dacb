"""Clients that go away, in every phase: their requests end, and nothing stays held."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from engine.request import FinishReason
from tests.engine.server.live import DEADLINE_S, GatedExecutor, until

BODY = {"model": "simulated", "prompt": "p", "max_tokens": 1500, "ignore_eos": True}


def ends_of(live: Any) -> dict[str, list[str]]:
    """Causes of the transitions to FINISHED, by request."""
    ends: dict[str, list[str]] = {}
    for event in live.sink.events:
        if type(event).__name__ == "RequestTransitioned" and event.target == "finished":
            ends.setdefault(event.rid, []).append(event.cause)
    return ends


def sent_of(live: Any) -> list[Any]:
    return [event for event in live.sink.events if type(event).__name__ == "ResponseSent"]


def leave(live: Any, body: dict[str, Any], when: Callable[[], Any], path: str = "/v1/completions") -> None:
    """Send a request, read nothing, wait until `when()` holds, and cut the connection."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.port))
        connection.sendall(head.encode() + content)
        until(when, "the phase to leave in")


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_queued(serve: Any, stream: bool) -> None:
    live = serve(step_ms=2, scheduler={"max_running_requests": 1})
    with live.http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as first:
        kept = first.iter_raw()  # dropped, it would close the connection
        next(kept)
        leave(live, BODY | {"stream": stream}, lambda: len(live.snapshot().waiting) == 1)
        until(lambda: ends_of(live), "end of the queued request")
        assert len(live.snapshot().running) == 1  # the other one goes on
    live.assert_nothing_held()
    assert list(ends_of(live).values()) == [["abort"], ["abort"]]
    assert live.observer.disconnects == 2


@pytest.mark.parametrize("stream", [False, True])
def test_fr_19_leaving_in_the_middle_of_a_chunked_prefill(serve: Any, stream: bool) -> None:
    live = serve(step_ms=10, scheduler={"chunked_prefill_size": 16})
    body = BODY | {"prompt": [40 + i % 50 for i in range(500)], "max_tokens": 5, "stream": stream}
    leave(live, body, lambda: live.snapshot().continuation is not None)
    live.assert_nothing_held()
    assert live.engine.work_steps < 500 // 16  # it did not finish the prompt first
    assert list(ends_of(live).values()) == [["abort"]]


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_while_decoding(serve: Any, stream: bool) -> None:
    live = serve(step_ms=5)
    leave(live, BODY | {"stream": stream}, lambda: any(r.output_len > 3 for r in live.snapshot().requests))
    live.assert_nothing_held()
    assert list(ends_of(live).values()) == [["abort"]]
    until(lambda: sent_of(live), "record of the response")
    assert [event.disconnected for event in sent_of(live)] == [True]
    assert (sent_of(live)[0].bytes_sent > 0) == stream


def test_leaving_with_several_choices_ends_all_of_them(serve: Any) -> None:
    live = serve(step_ms=5)
    body = BODY | {"prompt": ["a", "b", "c"], "n": 2, "stream": True, "max_tokens": 400}
    leave(live, body, lambda: len(live.snapshot().running) == 6)
    live.assert_nothing_held()
    assert list(ends_of(live).values()) == [["abort"]] * 6
    until(lambda: len(sent_of(live)) == 6, "six records")


def test_leaving_while_the_last_bytes_are_sent(serve: Any) -> None:
    # The engine is done long before a client that does not read: its answer is held by the connection alone.
    live = serve(context=8192, cache={"num_pages": 600})
    body = {"model": "simulated", "messages": [{"role": "user", "content": "x"}], "max_tokens": 8000, "stream": True}
    body |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    leave(live, body, lambda: ends_of(live), "/v1/chat/completions")
    live.assert_nothing_held()
    assert list(ends_of(live).values()) == [["length"]]
    until(lambda: sent_of(live), "record of the response")
    assert sent_of(live)[0].disconnected


def test_leaving_before_the_body_is_complete(serve: Any) -> None:
    live = serve()

    async def half() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.to_thread(until, lambda: live.observer.received == 1)
        writer.close()
        await writer.wait_closed()

    asyncio.run(half())
    until(lambda: live.observer.disconnects == 1, "disconnect seen")
    assert live.observer.rejected.total() == 1
    assert live.engine.work_steps == 0


def test_fifty_concurrent_with_random_disconnects_leave_nothing_behind(serve: Any) -> None:
    live = serve(
        step_ms=1,
        scheduler={"max_running_requests": 12, "chunked_prefill_size": 32, "max_prefill_tokens": 64},
        cache={"num_pages": 80},
    )
    dice = random.Random(7)
    plans = [
        (
            [33 + dice.randrange(90) for _ in range(dice.randrange(1, 200))]
            if index % 3
            else [50] * 120 + [60 + index],
            dice.randrange(2, 60),
            index % 2 == 0,  # streamed
            index % 5 < 2,  # goes away
            dice.random(),
        )
        for index in range(50)
    ]
    outcomes: list[str] = []

    async def streamed(client: openai.AsyncOpenAI, ask: dict[str, Any], leave_after: int | None) -> int:
        tokens = 0
        async with await client.completions.create(stream=True, **ask) as events:
            async for event in events:
                tokens += len(event.choices[0].text)
                if leave_after is not None and tokens > leave_after:
                    break
        return tokens

    async def whole(client: openai.AsyncOpenAI, ask: dict[str, Any]) -> int:
        usage = (await client.completions.create(**ask)).usage
        assert usage is not None
        return usage.completion_tokens

    async def one(
        client: openai.AsyncOpenAI, prompt: list[int], count: int, stream: bool, leaves: bool, when: float
    ) -> None:
        ask: dict[str, Any] = {"model": "simulated", "prompt": prompt, "max_tokens": count}
        ask["extra_body"] = {"ignore_eos": True}
        if stream and leaves:
            assert await streamed(client, ask, int(when * (count - 1))) < count + 1
        elif leaves:
            task = asyncio.create_task(whole(client, ask))
            await asyncio.sleep(when * 0.1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            assert await (streamed(client, ask, None) if stream else whole(client, ask)) == count
        outcomes.append("left" if leaves else "served")

    async def crowd() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE_S
        ) as client:
            await asyncio.gather(*(one(client, *plan) for plan in plans))

    asyncio.run(crowd())
    assert (outcomes.count("served"), outcomes.count("left")) == (30, 20)
    live.assert_nothing_held()
    ends = ends_of(live)
    assert all(len(causes) == 1 for causes in ends.values())
    assert ["abort"] in ends.values()  # else the test shows nothing
    until(lambda: len(sent_of(live)) == len(ends), "one record of a response per request")
    # And the server is as good as new.
    answer = live.post(max_tokens=3, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_client_that_waits_sees_its_answer_although_others_leave(serve: Any) -> None:
    live = serve(make_executor=GatedExecutor)
    live.executor.gate.clear()

    async def scene() -> httpx.Response:
        async with httpx.AsyncClient(base_url=live.url, timeout=DEADLINE_S) as client:
            stays = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 5}))
            await asyncio.to_thread(until, lambda: live.thread.open_replies == 1)
            goes = asyncio.create_task(client.post("/v1/completions", json=BODY))
            await asyncio.to_thread(until, lambda: live.thread.open_replies == 2)
            goes.cancel()
            live.executor.gate.set()
            return await stays

    assert asyncio.run(scene()).json()["choices"][0]["finish_reason"] == FinishReason.LENGTH
    live.assert_nothing_held()
