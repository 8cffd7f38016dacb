"""EngineThread. Owns: the one thread that touches the engine, and the traffic between it and the event loop.

In: messages through the mailbox, handled between steps. Out: one hop to the event loop per step, with all its outputs.
Whatever happens to the engine, every request that was submitted gets exactly one answer: a refusal or an end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from engine.clock import Clock, MonotonicClock
from engine.errors import AdmitscopeError, EngineDead, RefusalCause, RequestRefused
from engine.kvcache.page_keys import HEAD_TOKENS
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.llm_engine import EngineRequest, TokenOutput
from engine.request import FinishReason
from engine.server.api_errors import QueueFull
from engine.server.mailbox import Abort, Add, Call, Mailbox, Message, Sent, Shutdown
from engine.server.queue_limits import QueueLimits
from engine.server.reply import Reply
from engine.server.siblings import Siblings
from engine.server.step_engine import EngineStatus, StepEngine

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Longest sleep of an idle loop, hence the age a heartbeat may have while nothing is wrong.
_IDLE_S: Final = 0.25
#: Pause after a step that did nothing although requests wait, so that a stuck engine does not burn a core.
_NO_PROGRESS_S: Final = 0.005
#: Time that an engine gets, once it has aborted what was live at its drain deadline, to hand out the ends.
_ABORT_GRACE_NS: Final = 5_000_000_000
#: Time that it gets after the deadline to begin with that; then the event loop answers for it.
_SILENCE_S: Final = 0.25
#: How long a stop waits, past the deadline, for the step under way: only behind it can the ends be recorded.
_LAST_STEP_S: Final = 30.0


class EngineThread:
    """Runs an engine on a thread of its own. Everything public but `status` and `call` belongs to the event loop.

    queue_timeout_s, displaces   see QueueLimits
    share_from                   see Siblings
    """

    def __init__(
        self,
        engine: StepEngine,
        *,
        max_queued_requests: int,
        max_running_requests: int,
        queue_timeout_s: float | None = None,
        displaces: bool = False,
        share_from: int | None = HEAD_TOKENS,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._clock = clock or MonotonicClock()
        self._max_queued = max_queued_requests
        self._max_running = max_running_requests
        self._limits = QueueLimits(engine, timeout_s=queue_timeout_s, displaces=displaces)
        self._siblings = Siblings(share_from)
        self._mailbox = Mailbox(max_queued_requests + max_running_requests)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Event loop only:
        self._replies: dict[str, Reply] = {}
        self._refusing: Exception | None = None
        # Engine thread only:
        self._live: set[str] = set()
        self._fresh = 0  # requests added since the last step: no pass has looked at them yet
        self._step_again = False
        self._deadline_ns: int | None = None
        self._aborted_ns: int | None = None  # when what was live at the deadline was aborted
        self._progress_ns, self._last_token_ns = self._clock.now_ns(), 0
        self._moves_seen = -1
        self.status = self._status()

    # --- event loop -------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin stepping; outputs go to `loop`."""
        self._loop = loop
        self._thread.start()

    @property
    def queue_limit(self) -> int:
        """Requests that one submission may hold at most: more could never be accepted."""
        return self._max_queued

    @property
    def turns_away(self) -> bool:
        """May a request that was accepted be refused while it waits?"""
        return self._limits.turns_away

    @property
    def is_alive(self) -> bool:
        """The thread runs: the engine is its own."""
        return self._thread.is_alive()

    @property
    def open_replies(self) -> int:
        """Engine requests that have had no end yet, as the event loop sees them."""
        return len(self._replies)

    async def submit(self, requests: Sequence[EngineRequest]) -> Reply:
        """Hand over requests, all or none, and wait until the engine has taken them.

        Raises RequestRefused (QueueFull with the depth) or EngineDead.
        """
        if self._refusing is not None:
            raise self._refusing.with_traceback(None)
        rids = [request.rid for request in requests]
        if len(set(rids)) < len(rids) or not self._replies.keys().isdisjoint(rids):
            raise RequestRefused(RefusalCause.INVALID, "the id of a live request was used again", field="rid")
        reply = Reply(rids)
        if not self._mailbox.post(Add(tuple(requests), reply)):
            if self.status.stopped:
                raise EngineDead("the engine thread has ended")
            raise QueueFull(self.status.waiting + self._mailbox.pending_requests, self._max_queued)
        self._replies.update(dict.fromkeys(rids, reply))
        try:
            await reply.accepted
        except asyncio.CancelledError:
            self.abort(reply.live_rids, "cancelled")
            raise
        except (RequestRefused, EngineDead):
            for rid in rids:
                self._replies.pop(rid, None)
            raise
        return reply

    def abort(self, rids: Sequence[str], detail: str = "") -> None:
        """Ask for the end of these requests; their ends still come through their reply."""
        if rids:
            self._mailbox.post(Abort(tuple(rids), detail))

    def record_response(self, sent: Sent) -> None:
        """Tell the engine's listeners what was written; lost when the engine is gone."""
        self._mailbox.post(sent)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run `function` on the engine thread between two steps. From any thread."""
        future: Future[_T] = Future()
        if not self._mailbox.post(Call(function, future)):
            future.set_exception(EngineDead("the engine thread has ended"))
        return future

    async def snapshot(self) -> SchedulerSnapshot:
        """The scheduler's state between two steps."""
        return await asyncio.wrap_future(self.call(self._engine.snapshot))

    def begin_shutdown(self, drain_s: float) -> None:
        """Refuse new requests; live ones may run for `drain_s` seconds, then they are aborted. Returns at once.

        Then every reply ends, be the engine in a step or not; in a step it aborts the requests behind that step.
        """
        if self._refusing is None:
            self._refusing = _shutting_down()
        self._mailbox.post(Shutdown(self._clock.now_ns() + round(drain_s * 1e9)))
        self._post(self._answer_later, drain_s + _SILENCE_S)

    async def stop(self, drain_s: float) -> None:
        """Shut down and wait for the thread; afterwards every reply has ended."""
        self.begin_shutdown(drain_s)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, drain_s + _ABORT_GRACE_NS / 1e9 + _LAST_STEP_S)
        self._end_all(EngineDead("the engine thread did not end in time"), FinishReason.ABORT, "shutting_down")

    def _dispatch(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            reply = self._replies.get(output.rid)
            if reply is not None:
                reply.deliver(output)
                if output.finish is not None:
                    del self._replies[output.rid]

    def _answer_later(self, wait_s: float) -> None:
        asyncio.get_running_loop().call_later(wait_s, self._answer_for_the_engine)

    def _answer_for_the_engine(self) -> None:
        """The drain is over, and the engine is in a step that may take longer than anybody waits."""
        # First the aborts: the record of a response follows the end of its request.
        self.abort(tuple(self._replies), "shutting_down")
        self._end_all(_shutting_down(), FinishReason.ABORT, "shutting_down")

    def _end_all(self, error: Exception, finish: FinishReason, detail: str) -> None:
        self._refusing = self._refusing or error
        for reply in dict.fromkeys(self._replies.values()):
            reply.fail(error, finish, detail)
        self._replies.clear()

    # --- engine thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._finished():
                for message in self._mailbox.take(self._patience_s()):
                    self._handle(message)
                self._enforce_deadline()
                self._step_again |= self._limits.expire(self._clock.now_ns())
                if self._engine.has_work or self._step_again:
                    self._step()
                else:
                    self._progress_ns = self._clock.now_ns()
                self.status = self._status()
            self._leave(_shutting_down(), "")
        except BaseException as error:  # whatever broke, an exit included: every client must still get its end
            _log.exception("the engine stopped", extra={"step": self._engine.steps_done})
            dead = _in_words(error)
            self._leave(EngineDead(dead), dead)

    def _patience_s(self) -> float:
        """How long to wait for a message: not at all with work at hand that moves."""
        if self._engine.has_work or self._step_again:
            return 0.0 if self._step_again or self._engine.moves != self._moves_seen else _NO_PROGRESS_S
        return _IDLE_S

    def _handle(self, message: Message) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort():
                for rid in message.rids:
                    self._abort(rid, message.detail)
            case Sent():
                for rid in message.rids:
                    self._engine.record_response(
                        rid,
                        message.first_byte_ns,
                        message.last_byte_ns,
                        message.bytes_sent,
                        message.worst_send_ns,
                        message.disconnected,
                    )
            case Call():
                self._call(message)
            case Shutdown():
                earlier = self._deadline_ns
                self._deadline_ns = message.deadline_ns if earlier is None else min(earlier, message.deadline_ns)

    def _add(self, message: Add) -> None:
        """Take all requests or none, and say which."""
        refusal, victims = self._refusal(message.requests)
        added: list[str] = []
        now, behind = self._siblings.divide(message.requests)
        for request in now if refusal is None else ():
            try:
                self._engine.add_request(request)
            except RequestRefused as error:
                refusal = error
                break
            added.append(request.rid)
        if refusal is None:
            self._siblings.hold(behind, self._clock.now_ns())
            self._live.update(request.rid for request in message.requests)
            self._fresh += len(added)
            # Not before: who cannot be taken displaces nobody.
            self._step_again |= self._limits.displace(victims)
        else:
            for rid in added:
                self._step_again |= self._engine.abort_request(rid, "a request of the same call was refused")
        self._post(message.reply.settle, refusal)

    def _refusal(self, requests: Sequence[EngineRequest]) -> tuple[RequestRefused | None, Sequence[str]]:
        """Why these requests cannot be taken, or None; then also who has to leave the queue for them.

        A burst fills the free rows and then the queue, whether it comes within one step or not: requests that no pass
        has looked at yet do not count while there is a row for them, unless older ones wait although rows are free.
        """
        if self._deadline_ns is not None:
            return _shutting_down(), ()
        held, count = len(self._siblings), len(requests)
        waiting, fresh = self._engine.num_waiting + held, self._fresh + held
        free_rows = 0 if waiting > fresh else max(0, self._max_running - self._engine.num_running)
        lacking = waiting + count - min(fresh + count, free_rows) - self._max_queued
        if lacking <= 0:
            return None, ()
        victims = self._limits.find_room(requests, lacking)
        return (QueueFull(waiting, self._max_queued), ()) if victims is None else (None, victims)

    def _call(self, message: Call) -> None:
        if not message.future.set_running_or_notify_cancel():
            return
        try:
            message.future.set_result(message.function())
        except Exception as error:  # the caller's function: the caller gets its error
            message.future.set_exception(error)

    def _step(self) -> None:
        self._moves_seen = self._engine.moves
        self.status = self._status(in_step=True)
        self._step_again = False
        outputs = self._engine.step()
        self._fresh = 0
        if self._siblings:
            outputs += self._follow(outputs)
        now = self._clock.now_ns()
        if outputs:
            self._live.difference_update(output.rid for output in outputs if output.finish is not None)
            if any(output.token_id is not None for output in outputs):
                self._last_token_ns = now
            self._post(self._dispatch, outputs)
        if outputs or self._engine.moves != self._moves_seen:
            self._progress_ns = now

    def _follow(self, outputs: list[TokenOutput]) -> list[TokenOutput]:
        """Hand over the choices whose prompt is computed now; the ends of those that get no further."""
        freed, ends = self._siblings.follow(outputs)
        for request in freed:
            since_ns = self._siblings.since(request.rid)
            try:
                self._engine.add_request(request)
                self._fresh += 1
                self._limits.count_from(request.rid, since_ns, self._clock.now_ns())
            except RequestRefused as error:
                ends.append(_end(request.rid, FinishReason.REFUSED, str(error)))
        return ends

    def _abort(self, rid: str, detail: str) -> None:
        """End a request early, wherever it is."""
        if self._siblings.drop(rid):
            self._live.discard(rid)
            self._post(self._dispatch, [_end(rid, FinishReason.ABORT, detail)])
        else:
            self._step_again |= self._engine.abort_request(rid, detail)

    def _enforce_deadline(self) -> None:
        now_ns = self._clock.now_ns()
        if self._deadline_ns is None or self._aborted_ns is not None or now_ns < self._deadline_ns:
            return
        self._aborted_ns = now_ns
        for rid in sorted(self._live):
            self._abort(rid, "shutting_down")

    def _finished(self) -> bool:
        """True when a shutdown was asked for and nothing is left to do, or time is up."""
        if self._deadline_ns is None:
            return False
        # From the aborts, not from the deadline: a step may have lasted over both, and its requests need their ends.
        overdue = self._aborted_ns is not None and self._clock.now_ns() > self._aborted_ns + _ABORT_GRACE_NS
        return overdue or not (self._engine.has_work or self._step_again)

    def _leave(self, error: Exception, dead: str) -> None:
        """Last words: close the mailbox, fail what was inside, end every reply."""
        finish = FinishReason.ERROR if dead else FinishReason.ABORT
        for message in self._mailbox.close():
            if isinstance(message, Call):
                message.future.set_exception(error)
            elif isinstance(message, Sent) and not dead:
                self._handle(message)
        self.status = self._status(dead=dead, stopped=True)
        self._post(self._end_all, error, finish, "engine_dead" if dead else "shutting_down")

    def _status(self, *, in_step: bool = False, dead: str = "", stopped: bool = False) -> EngineStatus:
        engine = self._engine
        return EngineStatus(
            heartbeat_ns=self._clock.now_ns(),
            progress_ns=self._progress_ns,
            last_token_ns=self._last_token_ns,
            steps=engine.steps_done,
            waiting=engine.num_waiting + len(self._siblings),
            running=engine.num_running,
            has_work=engine.has_work,
            in_step=in_step,
            dead=dead,
            draining=self._deadline_ns is not None,
            stopped=stopped,
        )

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """One hop to the event loop; a closed loop has nobody left to tell."""
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


def _end(rid: str, finish: FinishReason, detail: str) -> TokenOutput:
    """The end of a request that never reached the engine."""
    return TokenOutput(rid=rid, token_id=None, output_index=0, finish=finish, detail=detail)


def _shutting_down() -> RequestRefused:
    return RequestRefused(RefusalCause.SHUTTING_DOWN, "the server is shutting down")


def _in_words(error: BaseException) -> str:
    """For clients and probes: the text of our own errors, only the kind of others, which may quote anything."""
    kind = type(error).__name__
    return f"{kind}: {error}"[:200] if isinstance(error, AdmitscopeError) else kind
