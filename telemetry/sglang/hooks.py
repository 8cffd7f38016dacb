"""Hooks. Owns: what runs on SGLang's scheduler thread around its own functions, and that none of it can reach SGLang.

Each hook calls the wrapped function with the arguments as they came, once, and gives back what it returned; what the
function raises goes through untouched. What a hook itself raises is caught and counted, and after `MOST_FAULTS` of them
the hooks do nothing but delegate. Facts leave through `Outlet.put`, which never waits.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from telemetry.sglang.capture import PassCapture, ended_kind, ledger_of, tokens_of
from telemetry.sglang.facts import AbortAsked, AnyFact, Arrived, Back, Done, Ended, Gone, MemoryTest, Planned, Row

_log = logging.getLogger(__name__)

MOST_FAULTS: Final = 100
#: While somebody waits and nothing can be done, SGLang's loop turns thousands of times a second: of passes that find
#: the same, one is told in this time.
IDLE_EVERY_NS: Final = 100_000_000
Hook = Callable[..., Any]


class Outlet(Protocol):
    """Where facts go. `begin` looks at the scheduler once; False: it is not recorded."""

    def begin(self, scheduler: Any) -> bool: ...

    def put(self, fact: AnyFact) -> None: ...


class Hooks:
    """The hooks of one process, for its one scheduler.

    off     why nothing is taken any more; None: facts are taken
    faults  exceptions of the hooks' own, all of them caught
    """

    def __init__(self, outlet: Outlet, *, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._outlet = outlet
        self._clock = clock
        self.off: str | None = None
        self.faults = 0
        self._scheduler: Any = None
        self._number = 0
        self._step = 0
        self._pass: PassCapture | None = None
        self._test: MemoryTest | None = None
        self._backs: list[Back] | None = None
        self._planned: Any = None
        #: (step, when its batch was launched) of steps whose result is to come.
        self._launched: deque[tuple[int, int]] = deque()
        self._idle_told: tuple[object, int] = ((), 0)
        self._worked = False

    def around(self) -> dict[str, Hook]:
        """`Class.function` -> its hook, to be called as hook(function, *arguments)."""
        return {
            "Scheduler.get_next_batch_to_run": self._wrap(self._plan_begins, self._plan_ends),
            "Scheduler._get_new_batch_prefill_raw": self._wrap(self._pass_begins, self._pass_ends),
            "Scheduler.get_num_allocatable_reqs": self._wrap(None, self._rows_asked),
            "Scheduler._add_request_to_queue": self._wrap(None, self._queued),
            "Scheduler.run_batch": self._wrap(self._launches, None),
            "Scheduler.process_batch_result": self._wrap(self._result_begins, self._result_ends),
            "Scheduler.abort_request": self._wrap(self._abort_asked, None),
            "Scheduler.send_abort_output": self._wrap(None, self._gone),
            "Scheduler.on_idle": self._wrap(None, self._idle),
            "SchedulePolicy.calc_priority": self._wrap(None, self._ordered),
            "PrefillAdder.__init__": self._wrap(None, self._opened),
            "PrefillAdder.add_one_req": self._wrap(self._try_begins, self._try_ends),
            "PrefillAdder.add_chunked_req": self._wrap(self._continue_begins, self._continue_ends),
            "PrefillBudget.check_prefill": self._wrap(None, self._tested),
            "PrefillBudget.can_allocate_prefill": self._wrap(None, self._tested_now),
        }

    def _wrap(self, before: Callable[..., Any] | None, after: Callable[..., None] | None) -> Hook:
        def hook(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self.off is not None:
                return function(*args, **kwargs)
            token = None
            if before is not None:
                try:
                    token = before(*args, **kwargs)
                except Exception as error:  # whatever goes wrong here must not reach SGLang
                    self._fault(error)
            result = function(*args, **kwargs)
            if after is not None:
                try:
                    after(token, result, *args, **kwargs)
                except Exception as error:  # as above
                    self._fault(error)
            return result

        return hook

    def _fault(self, error: Exception) -> None:
        self.faults += 1
        if self.faults == 1:
            _log.warning("admitscope: a hook failed, SGLang goes on (%s: %s)", type(error).__name__, error)
        if self.faults >= MOST_FAULTS:
            self.switch_off(f"{self.faults} faults of its own, the last {type(error).__name__}: {error}")

    def switch_off(self, why: str) -> None:
        """Take no fact any more, and say why."""
        if self.off is None:
            self.off = why
            self._pass = self._planned = self._scheduler = self._backs = None
            _log.error("admitscope: recording ends, SGLang goes on: %s", why)

    def _is_ours(self, scheduler: Any) -> bool:
        """Whether this is the scheduler that is recorded: the first of the process, if it can be."""
        if scheduler is self._scheduler:
            return True
        if self._scheduler is None and self.off is None:
            if self._outlet.begin(scheduler):
                self._scheduler = scheduler
                return True
            self.off = "this scheduler is not recorded"
        return False

    def _head(self, t_ns: int | None = None) -> tuple[int, int]:
        self._number += 1
        return self._number - 1, self._clock() if t_ns is None else t_ns

    # -- the queue -------------------------------------------------------------------------------------------------

    def _queued(self, _: Any, __: Any, scheduler: Any, req: Any, *___: Any, **____: Any) -> None:
        if not self._is_ours(scheduler):
            return
        queue = scheduler.waiting_queue
        if not queue or queue[-1] is not req:
            return  # turned away at the door: nobody was told that it came
        now = self._clock()
        if req.retraction_count and self._backs is not None:
            taken = self._pass is not None and self._pass.gave_way(req)
            cause = "preempt" if taken else "retract"
            self._backs.append(Back(req.rid, cause, len(req.output_ids), req.retraction_count, now))
            return
        params = req.sampling_params
        self._outlet.put(
            Arrived(
                *self._head(now),
                req.rid,
                len(req.origin_input_ids),
                len(req.output_ids),
                params.max_new_tokens,
                bool(params.ignore_eos),
                req.priority,
                req.routing_key,
                int(req.time_stats.created_time * 1e9),
                req.retraction_count,
            )
        )

    def _abort_asked(self, scheduler: Any, recv_req: Any) -> None:
        if self._is_ours(scheduler):
            timed_out = "waiting timeout" in (recv_req.abort_message or "")
            cause = "queue_timeout" if timed_out else "abort"
            self._outlet.put(AbortAsked(*self._head(), "" if recv_req.abort_all else recv_req.rid, cause))

    def _gone(self, _: Any, __: Any, scheduler: Any, abort_req: Any, req: Any) -> None:
        if self._is_ours(scheduler):
            self._outlet.put(Gone(*self._head(), req.rid, _cause_of(abort_req), len(req.output_ids)))

    # -- a pass ----------------------------------------------------------------------------------------------------

    def _pass_begins(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if self._backs is not None and self._is_ours(scheduler):
            self._pass = PassCapture(scheduler)

    def _pass_ends(self, _: Any, result: Any, *__: Any, **___: Any) -> None:
        if self._pass is not None:
            self._pass.end(batch=result[0], running=result[1])

    def _ordered(self, _: Any, __: Any, policy: Any, waiting_queue: Any, *___: Any, **____: Any) -> None:
        if self._pass is not None:
            self._pass.ordered(policy, waiting_queue)

    def _rows_asked(self, _: Any, rows: int, *__: Any, **___: Any) -> None:
        if self._pass is not None:
            self._pass.rows = rows

    def _opened(self, _: Any, __: Any, adder: Any, *___: Any, **____: Any) -> None:
        if self._pass is None:
            return
        if adder.exact_chunk_fill:
            self.switch_off("SGLANG_EXACT_CHUNK_FILL charges otherwise than the records say")
            return
        self._pass.opened_by(adder)

    def _try_begins(self, adder: Any, req: Any, *_: Any, **__: Any) -> Any:
        self._test = None
        taken = self._pass
        if taken is None or taken.adder is not adder:
            return None
        rest = len(req.full_untruncated_fill_ids) - req.prefix_len
        return ledger_of(adder), len(adder.can_run_list), req.prefix_len, rest

    def _try_ends(
        self, token: Any, result: Any, adder: Any, req: Any, has_chunked_req: bool, *_: Any, **__: Any
    ) -> None:
        if self._pass is not None and token is not None:
            self._pass.tried_one(token, result.name, adder, req, test=self._test, had_continuation=has_chunked_req)

    def _continue_begins(self, adder: Any, req: Any) -> Any:
        return self._try_begins(adder, req)

    def _continue_ends(self, token: Any, _: Any, adder: Any, req: Any) -> None:
        if self._pass is not None and token is not None:
            self._pass.tried_one(token, None, adder, req, test=None, had_continuation=True)

    def _tested(self, _: Any, result: Any, budget: Any, **kwargs: Any) -> None:
        if self._pass is not None:
            self._test = MemoryTest(kwargs["total_tokens"], budget.remaining_total, bool(result[0]))

    def _tested_now(self, _: Any, result: Any, budget: Any, **kwargs: Any) -> None:
        if self._pass is not None:
            total, current = budget.remaining_total, budget.remaining_current
            self._test = MemoryTest(kwargs["paged_input"], min(total, current), bool(result), True, current <= total)

    # -- a step ----------------------------------------------------------------------------------------------------

    def _plan_begins(self, scheduler: Any, *_: Any, **__: Any) -> int:
        self._pass = None
        self._backs = [] if self._is_ours(scheduler) else None
        return self._clock()

    def _plan_ends(self, began_ns: int, plan: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        backs, taken, self._backs, self._pass = self._backs, self._pass, None, None
        if backs is None:
            return
        batch, running = plan.batch_to_run, plan.running_batch
        if batch is None and not backs:
            if not scheduler.waiting_queue:
                return
            told = (taken.signature() if taken is not None else None, running.batch_is_full)
            if told == self._idle_told[0] and began_ns - self._idle_told[1] < IDLE_EVERY_NS:
                return
            self._idle_told = (told, began_ns)
        else:
            self._idle_told = ((), 0)
        rows = taken.batch_rows() if taken is not None and batch is not None and taken.is_built else ()
        decoding = batch.reqs if batch is not None and not rows else getattr(batch, "decoding_reqs", None) or ()
        self._tell_plan(began_ns, scheduler, taken, rows, tuple([req.rid for req in decoding]), backs, running, batch)
        self._planned = batch
        self._worked = True

    def _tell_plan(
        self,
        began_ns: int,
        scheduler: Any,
        taken: PassCapture | None,
        rows: tuple[Row, ...],
        decodes: tuple[str, ...],
        backs: list[Back],
        running: Any,
        batch: Any,
    ) -> None:
        self._step += 1
        continuation = scheduler.chunked_req
        members = sum(row.is_last for row in rows)
        self._outlet.put(
            Planned(
                *self._head(began_ns),
                self._step,
                self._clock(),
                taken.told() if taken is not None else None,
                rows,
                decodes,
                tuple(backs),
                continuation.rid if continuation is not None else None,
                bool(running.batch_is_full),
                scheduler.new_token_ratio_tracker.current,
                len(scheduler.waiting_queue),
                members + (len(decodes) if decodes or batch is running else len(running.reqs)),
                tokens_of(scheduler),
                is_idle=batch is None,
            )
        )

    def _launches(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        if batch is self._planned and self._is_ours(scheduler):
            self._planned = None
            self._launched.append((self._step, self._clock()))

    def _result_begins(self, scheduler: Any, *_: Any, **__: Any) -> int | None:
        return self._clock() if self._is_ours(scheduler) else None

    def _result_ends(self, ready_ns: int | None, _: Any, scheduler: Any, batch: Any, *__: Any, **___: Any) -> None:
        if ready_ns is None or not self._launched:
            return
        step, launched_ns = self._launched.popleft()
        ended = tuple(
            [
                Ended(req.rid, ended_kind(req.finished_reason), len(req.output_ids))
                for req in batch.reqs
                if req.finished_reason is not None
            ]
        )
        self._outlet.put(
            Done(
                *self._head(),
                step,
                launched_ns,
                ready_ns,
                ended,
                len(scheduler.waiting_queue),
                tokens_of(scheduler),
            )
        )

    def _idle(self, _: Any, __: Any, scheduler: Any) -> None:
        """Nothing is left, and SGLang has set the ratio back: told once, as a step that does nothing."""
        if not self._worked or not self._is_ours(scheduler) or scheduler.waiting_queue or self._launched:
            return
        if scheduler.chunked_req is not None or scheduler.running_batch.reqs:
            return
        tracker = scheduler.new_token_ratio_tracker
        if tracker.current != tracker.init:
            return  # not set back yet: SGLang still finds something to wait for
        self._worked = False
        now = self._clock()
        self._tell_plan(now, scheduler, None, (), (), [], scheduler.running_batch, None)


def _cause_of(abort_req: Any) -> str:
    """The closed word for an end outside of a step, from the message that SGLang made for it."""
    reason = getattr(abort_req, "finished_reason", None) or {}
    message = str(reason.get("message", "")) if isinstance(reason, dict) else ""
    if "higher priority request" in message:
        return "displaced"
    if "waiting timeout" in message:
        return "queue_timeout"
    if "KV" in message or "memory" in message:
        return "kv_pool_exhausted"
    return "abort"
