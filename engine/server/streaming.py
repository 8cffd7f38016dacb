"""Responses. Owns: writing an answer, streamed or whole, while watching whether the client is still there.

A client that goes away in any phase (queued, prefill, decode, emitting) ends its requests. Every response is recorded
when it is over, with what was really written.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping, Sequence
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.clock import Clock
from engine.errors import RefusalCause, RequestRefused
from engine.llm_engine import TokenOutput
from engine.request import GRAMMAR_FAILED, TURNED_AWAY, Cause, FinishReason
from engine.server.api_errors import ApiError, from_refusal, invalid, turned_away, unavailable
from engine.server.choices import Delta
from engine.server.connection import EVENT_STREAM, LOST
from engine.server.engine_thread import EngineThread
from engine.server.intake import Intake
from engine.server.mailbox import Sent
from engine.server.observer import FrontEndObserver
from engine.server.render import Envelope, usage_of
from engine.server.reply import Reply

_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_DONE = b"data: [DONE]\n\n"
#: Turns of the event loop until a cut connection has reached the task that watches it.
_TURNS_TO_NOTICE = 3


class ClientGone(ConnectionError):
    """The client cut the connection before the response ended."""


class _Wire:
    """The ASGI send channel of one response, measured. Times are nanoseconds of the clock.

    state  of the request, in which the connection says that it is lost, and learns that events follow
    """

    def __init__(self, send: Send, clock: Clock, gone: asyncio.Future[None], state: MutableMapping[str, Any]) -> None:
        self._send = send
        self._state = state
        self._clock = clock
        self._gone = gone
        self.first_byte_ns: int | None = None
        self.last_byte_ns: int | None = None
        self.bytes_sent = 0
        self.worst_send_ns = 0

    async def start_events(self) -> None:
        # Only now: a refusal instead of a stream has a length, into which no comment may be written.
        self._state[EVENT_STREAM] = True
        await self.start(200, _STREAM_HEADERS)

    async def start(self, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, data: bytes, *, more: bool) -> int:
        """Send body bytes; how long that took. Raises ClientGone."""
        if not more:
            # Writes into a connection that was just cut return at once; the end must not be among them unnoticed.
            await self._notice()
        began = self._clock.now_ns()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
        ended = self._clock.now_ns()
        self.worst_send_ns = max(self.worst_send_ns, ended - began)
        if self._state.get(LOST):
            # A write that had to wait also returns when the connection is cut, without an error and without writing.
            raise ClientGone
        if data:
            self.first_byte_ns = ended if self.first_byte_ns is None else self.first_byte_ns
            self.last_byte_ns = ended
            self.bytes_sent += len(data)
        return ended - began

    async def _notice(self) -> None:
        """Let the event loop say that the connection is lost, if it is. Raises ClientGone then."""
        for _ in range(_TURNS_TO_NOTICE):
            await asyncio.sleep(0)
        if self._gone.done() or self._state.get(LOST):
            raise ClientGone


class GenerationResponse(Response):
    """The answer to one accepted generation request."""

    def __init__(
        self,
        *,
        reply: Reply,
        intake: Intake,
        envelope: Envelope,
        stream: bool,
        engine_thread: EngineThread,
        clock: Clock,
        observer: FrontEndObserver,
    ) -> None:
        super().__init__()
        self._reply = reply
        self._choices = {choice.rid: choice for choice in intake.choices}
        self._intake = intake
        self._envelope = envelope
        self._stream = stream
        self._engine_thread = engine_thread
        self._clock = clock
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer, or end the requests when the client goes first."""
        gone = asyncio.ensure_future(_disconnected(receive))
        state = scope.setdefault("state", {})
        wire = _Wire(send, self._clock, gone, state)
        work = asyncio.ensure_future(self._write_stream(wire) if self._stream else self._write_whole(wire))
        complete = False
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            complete = work.done() and _wrote_all(work)
        finally:
            for task in (work, gone):
                task.cancel()
            # Waits for the cancellations; what they raise has been looked at above.
            await asyncio.gather(work, gone, return_exceptions=True)
            if not complete:
                self._observer.on_disconnect()
                self._engine_thread.abort(self._reply.live_rids, "client disconnected")
                while await self._reply.batch():
                    pass  # the record of the response follows the end of its requests
            self._record(wire, not complete)

    def _record(self, wire: _Wire, disconnected: bool) -> None:
        """Several choices share one response: each gets its figures."""
        self._engine_thread.record_response(
            Sent(
                tuple(self._choices),
                wire.first_byte_ns,
                wire.last_byte_ns,
                wire.bytes_sent,
                wire.worst_send_ns,
                disconnected,
            )
        )

    async def _refuse(self, wire: _Wire, refused: TokenOutput) -> None:
        """Answer with a status instead of a stream, and end the other choices, which nobody will read."""
        self._engine_thread.abort(self._reply.live_rids, "another choice of the call was refused")
        while await self._reply.batch():
            pass
        failure = _failure(refused.finish or FinishReason.REFUSED, refused.detail)
        await self._write_body(wire, failure.status, failure.headers, failure.body())

    async def _write_whole(self, wire: _Wire) -> None:
        wholes = {rid: Delta() for rid in self._choices}
        while outputs := await self._reply.batch():
            if any(output.finish is FinishReason.REFUSED for output in outputs):
                self._engine_thread.abort(self._reply.live_rids, "another choice of the call was refused")
            for output in outputs:
                delta = self._choices[output.rid].push(output)
                if delta is not None:
                    whole = wholes[output.rid]
                    whole.text += delta.text
                    whole.entries += delta.entries
                    whole.finish = delta.finish
        choices = self._intake.choices
        # A refusal first: it is why the other choices were aborted.
        failures = sorted((c.failure for c in choices if c.failure), key=lambda f: f[0] is not FinishReason.REFUSED)
        failure = _failure(*failures[0]) if failures else None
        if failure is not None:
            status, headers, content = failure.status, failure.headers, failure.body()
        else:
            rendered = [self._envelope.whole_choice(choice.index, wholes[choice.rid]) for choice in choices]
            usage = usage_of(choices, self._intake.choices_per_prompt)
            status, headers, content = 200, {}, self._envelope.response(rendered, usage)
        await self._write_body(wire, status, headers, content)

    @staticmethod
    async def _write_body(wire: _Wire, status: int, headers: dict[str, str], content: dict[str, Any]) -> None:
        data = msgspec.json.encode(content)
        await wire.start(status, {"content-type": "application/json", "content-length": str(len(data)), **headers})
        await wire.write(data, more=False)

    async def _write_stream(self, wire: _Wire) -> None:
        outputs: list[TokenOutput] = []
        if self._engine_thread.turns_away:
            # A request may be refused while it waits: its status is known with its first output.
            outputs = await self._reply.batch()
            refused = next((output for output in outputs if output.finish is FinishReason.REFUSED), None)
            if refused is not None:
                await self._refuse(wire, refused)
                return
        await wire.start_events()
        greeted: set[str] = set()
        unseen = set(self._choices)
        while outputs := outputs or await self._reply.batch():
            data = b"".join(self._events(outputs, greeted))
            if data:
                self._observer.on_stream_send(await wire.write(data, more=True))
                written_ns = wire.last_byte_ns
                assert written_ns is not None, "bytes were written"
                for rid in unseen.intersection(output.rid for output in outputs):
                    unseen.discard(rid)
                    # The moment that the record of the response will name, so that both tell the same story.
                    self._observer.on_first_byte(rid, written_ns)
            outputs = []
        tail = _DONE
        if self._envelope.include_usage and not any(choice.failure for choice in self._intake.choices):
            usage = usage_of(self._intake.choices, self._intake.choices_per_prompt)
            tail = _event(self._envelope.usage_event(usage)) + _DONE
        self._observer.on_stream_send(await wire.write(tail, more=False))

    def _events(self, outputs: Sequence[TokenOutput], greeted: set[str]) -> list[bytes]:
        """Stream events for these outputs: one per token that completes text, and one per end."""
        events = []
        for output in outputs:
            choice = self._choices[output.rid]
            delta = choice.push(output)
            if choice.failure is not None:
                events.append(_event(_failure(*choice.failure).body()))
            elif delta is not None:
                if self._envelope.is_chat and output.rid not in greeted:
                    greeted.add(output.rid)
                    events.append(_event(self._envelope.event([self._envelope.role_choice(choice.index)])))
                events.append(_event(self._envelope.event([self._envelope.delta_choice(choice.index, delta)])))
        return events


def _wrote_all(work: asyncio.Future[None]) -> bool:
    """True: written to its end. False: the connection broke under it. Raises what else went wrong."""
    error = work.exception()
    if error is None:
        return True
    if isinstance(error, OSError):
        return False
    raise error


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _failure(finish: FinishReason, detail: str) -> ApiError:
    """The error of a choice that the engine ended without a result."""
    if finish is FinishReason.REFUSED and detail in TURNED_AWAY:
        return turned_away(Cause(detail))
    if finish is FinishReason.REFUSED:
        return from_refusal(RequestRefused(RefusalCause.NEVER_FITS, detail or "the request can never fit"))
    if detail == GRAMMAR_FAILED:
        return invalid("the grammar ran into its limits while the answer was made: simplify it", None, detail)
    if finish is FinishReason.ABORT:
        return unavailable(f"the request was aborted: {detail or 'by the server'}", "aborted")
    return unavailable(f"the engine failed: {detail or 'see its log'}", "engine_error")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
