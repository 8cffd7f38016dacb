"""Capture. Owns: one prefill pass of SGLang's as it is seen from its scheduler's thread, and what is read of objects.

Reads attributes and never writes one. A `PassCapture` lives as long as the planning of one step.
"""

from __future__ import annotations

from typing import Any

from engine.scheduler.decision import LedgerView
from telemetry.sglang.facts import MemoryTest, Pass, Row, Tried, Untried


def ledger_of(adder: Any) -> LedgerView:
    """What the adder has left. The pool is asked once: both memory ledgers differ from it by a number that is kept."""
    budget = adder.memory_budget
    current = budget.remaining_current
    total = current + budget.current_offset - budget.total_offset
    return LedgerView(adder.rem_input_tokens, adder.rem_chunk_tokens, total, current)


def tokens_of(scheduler: Any) -> tuple[int, int, int]:
    """[free, evictable, protected] tokens of the pool now."""
    tree = scheduler.tree_cache
    return (
        int(scheduler.token_to_kv_pool_allocator.available_size()),
        int(tree.evictable_size()),
        int(tree.protected_size()),
    )


def ended_kind(reason: Any) -> str:
    """stop | length | abort | error, from SGLang's reason for an end."""
    told = reason.to_json()
    kind = str(told.get("type", "stop"))
    if kind == "abort" and int(told.get("status_code") or 0) >= 500:
        return "error"
    return kind if kind in {"stop", "length", "abort"} else "stop"


class PassCapture:
    """One pass while it is made.

    rows      what the scheduler last said of free rows, as the pass looked at them
    is_built  it made a batch
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        queue = scheduler.waiting_queue
        self._had_continuation = scheduler.chunked_req is not None
        self.adder: Any = None
        self.rows: int | None = None
        self.is_built = False
        self._waiting = len(queue)
        self._policy: str | None = None
        self._is_ordered = False
        self._opened: LedgerView | None = None
        self._closed: LedgerView | None = None
        self._mixed = 0
        self._promised = 0.0
        self._was_full = False
        self._tried: list[Tried] = []
        self._members: list[tuple[Any, int, int, int]] = []
        self._skipped: str | None = None
        self._head: str | None = None
        self._untried: Untried | None = None

    # -- while it is made ------------------------------------------------------------------------------------------

    def ordered(self, policy: Any, queue: Any) -> None:
        """The queue was put in order."""
        self._policy = policy._determine_active_policy(queue).value  # the only place that knows of a fallback
        self._waiting = len(queue)
        self._is_ordered = True

    def opened_by(self, adder: Any) -> None:
        """The adder was made: ledgers stand, decode rows are charged."""
        budget = adder.memory_budget
        self.adder = adder
        self._opened = ledger_of(adder)
        self._mixed = budget.current_offset
        self._promised = budget.total_offset - budget.current_offset
        self._was_full = bool(adder.running_batch.batch_is_full)

    def tried_one(
        self, token: Any, result: str | None, adder: Any, req: Any, *, test: MemoryTest | None, had_continuation: bool
    ) -> None:
        """The adder looked at one request. `token`: ledgers, batch size, prefix and rest from before."""
        before, batch, prefix, candidate = token
        is_added = len(adder.can_run_list) > batch
        selected, rest = 0, candidate
        if is_added:
            loaded, prefix = req.prefix_len - prefix, req.prefix_len
            candidate -= loaded
            selected = req.extend_end - prefix
            rest = candidate - selected
            self._members.append((req, prefix, req.extend_end, rest))
        self._tried.append(
            Tried(
                rid=req.rid,
                is_continuation=result is None,
                prefix_len=prefix,
                candidate=candidate,
                selected=selected,
                rest=rest,
                is_admitted=is_added,
                before=before,
                after=ledger_of(adder),
                result=result,
                test=test,
                had_continuation=had_continuation,
                batch=batch,
                delayer=adder.prefill_delayer_single_pass is not None,
            )
        )

    def gave_way(self, req: Any) -> bool:
        """Whether this pass preempted `req`."""
        return self.adder is not None and any(victim is req for victim in self.adder.preempt_list)

    # -- when it is over -------------------------------------------------------------------------------------------

    def end(self, *, batch: Any, running: Any) -> None:
        """SGLang's function has returned."""
        self.is_built = batch is not None
        queue = self._scheduler.waiting_queue
        if self.adder is None:
            self._head = queue[0].rid if queue else None
            self._skipped = self._why_skipped(running)
            return
        # A batch has its pages by now, which the adder counts a second time: what the last candidate left stands.
        last_left = self._tried[-1].after if self._tried else self._opened
        self._closed = last_left if self.is_built else ledger_of(self.adder)
        candidates = [tried for tried in self._tried if not tried.is_continuation]
        last = candidates[-1] if candidates else None
        if (last is not None and last.result != "CONTINUE") or len(candidates) >= self._waiting:
            return
        refused = {tried.rid for tried in candidates if not tried.is_admitted}
        backs = {req.rid for req in self.adder.preempt_list}
        for req in queue:
            if req.rid not in refused and req.rid not in backs:
                rest = len(req.origin_input_ids) + len(req.output_ids)
                matched = min(req.num_matched_prefix_tokens, max(rest - 1, 0))
                self._untried = Untried(req.rid, matched, rest - matched, self.rows)
                return

    def _why_skipped(self, running: Any) -> str:
        if not self._waiting and not self._had_continuation:
            return "queue_empty"
        if self._is_ordered:
            return "delayed"  # a switch of SGLang's own tests holds prefills back
        if not running.batch_is_full:
            return "delayed"
        # The flag is asked for before the rows: who asked for rows found it clear, and set it.
        return "full_flag" if self.rows is None else "rows"

    def signature(self) -> object:
        """What tells two passes without a batch apart."""
        last = self._tried[-1] if self._tried else None
        told = None if last is None else (last.rid, last.candidate, last.result, last.before)
        return self._skipped, self._head, self._untried, told

    def batch_rows(self) -> tuple[Row, ...]:
        """The prompt pieces of the batch that was built, with their rows."""
        return tuple(
            # SGLang's row 0 pads its tables, and is nobody's.
            [
                Row(req.rid, prefix, end, rest == 0, None if (row := req.kv.req_pool_idx) is None else int(row) - 1)
                for req, prefix, end, rest in self._members
            ]
        )

    def told(self) -> Pass:
        """The pass as a fact."""
        adder = self.adder
        if adder is None:
            return Pass(self._skipped, self._head, self._waiting, policy=self._policy)
        return Pass(
            skipped=None,
            head=None,
            waiting=self._waiting,
            policy=self._policy,
            opened=self._opened,
            closed=self._closed,
            mixed=self._mixed,
            promised=self._promised,
            tried=tuple(self._tried),
            untried=self._untried,
            was_full=self._was_full,
            chunk_limit=adder.chunked_req_limit,
            prefill_max=adder.prefill_max_requests,
            align=self._scheduler.truncation_align_size,
        )
