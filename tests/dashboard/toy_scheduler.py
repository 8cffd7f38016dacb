"""A toy scheduler for the page to look at. Owns: requests, pages, ledgers and passes whose numbers fit together.

It is not the engine and proves nothing about scheduling: it exists so that the page's tests and its development need
neither a model nor the real read model. Pages add up to the pool, every ledger goes down by what was charged, queue and
passes tell the same story. The clock is the caller's: `tick()` makes one step.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

from telemetry import observe as o

PAGE = 16
STEP_S = 0.05
INPUT, CHUNK, ROWS = 256, 128, 24


@dataclass
class Req:
    rid: str
    came: float
    prompt: int
    max_new: int
    prefix: int = 0
    done: int = 0
    outputs: int = 0
    state: str = "waiting"
    admitted: float | None = None
    first: float | None = None
    last: float | None = None
    finish: str | None = None
    ended: float | None = None
    chunks: list[o.ChunkRow] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    decisions: list[o.DecisionRow] = field(default_factory=list)
    over: int = 0
    passes: int = 0
    blocker: str = "engine_busy"
    reason: str | None = None
    need: float | None = None
    have: float | None = None
    who: str | None = None
    seen: int | None = None
    pages: list[int] = field(default_factory=list)


class ToyScheduler:
    """The toy scheduler. `busy` draws new requests by itself in each tick."""

    def __init__(
        self, *, seed: int = 7, num_pages: int = 1024, busy: bool = True, started: float | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.num_pages, self.busy = num_pages, busy
        self.engine_id = f"fake-{seed}"
        self.start = time.time() if started is None else started
        self.now = self.start
        self.step = 0
        self.seq = 0
        self.states = bytearray(num_pages)
        self.owners = [""] * num_pages
        self.free = list(range(num_pages))
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.finished: deque[Req] = deque(maxlen=500)
        self.passes: deque[o.PassRow] = deque(maxlen=512)
        self.points: deque[o.LatencyPoint] = deque(maxlen=600)
        self.slot: list[tuple[str, float]] = []
        self.slot_tokens = [0, 0]
        self.received = 0
        self.ends: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.violations: dict[str, int] = {}
        self.checked = True
        self.lock = threading.RLock()
        node = self._take(24, 2, "node:1")
        self.nodes = {"node:1": node, "node:2": self._take(18, 3, "node:2"), "node:3": self._take(40, 3, "node:3")}

    # -- the toy scheduler -------------------------------------------------------------------------------------------

    def add(self, prompt: int, max_new: int, rid: str | None = None) -> Req:
        with self.lock:
            self.received += 1
            req = Req(rid or f"req-{self.random.getrandbits(32):08x}-{self.received}", self.now, prompt, max_new)
            req.prefix = min(self.random.choice((0, 0, 64, 384)), (prompt - 1) // PAGE * PAGE)
            self.waiting.append(req)
            self.seq += 1
            return req

    def tick(self, wall: float | None = None) -> None:
        """One step of the toy engine; `wall` is its time, STEP_S later when not given."""
        with self.lock:
            self.now = self.now + STEP_S if wall is None else wall
            if self.busy and self.random.random() < 0.42 * (1 - len(self.waiting) / 40):
                for _ in range(self.random.choice((1, 1, 2, 5))):
                    self.add(self.random.randint(24, 900), self.random.randint(8, 90))
            self.step += 1
            self.seq += 1
            self._pass()
            self._decode()
            if self.step % 20 == 0:
                self._close_slot()

    def _pass(self) -> None:
        decoding = [r for r in self.running if r.state == "decode"]
        current = len(self.free) + self._count(3)
        promised = sum(r.max_new - r.outputs + r.prompt - r.prefix - r.done + PAGE for r in self.running)
        limit = o.Ledgers(
            rem_input=INPUT,
            rem_chunk=CHUNK,
            remaining_total=current * PAGE - promised,
            remaining_current=current * PAGE,
            rows=ROWS,
        )
        left = {
            "rem_input": INPUT - len(decoding),
            "rem_chunk": CHUNK - len(decoding),
            "remaining_total": limit.remaining_total - len(decoding),
            "remaining_current": current * PAGE - len(decoding),
        }
        opened = o.Ledgers(**left, rows=ROWS - len(self.running))
        partial = [r for r in self.running if r.state == "prefill"]
        rows: list[o.DecisionRow] = []
        queue, waiting_before = list(self.waiting), len(self.waiting)
        end, end_reason, end_rid, prefill = "queue_end", None, None, 0
        for order, req in enumerate([*partial, *list(self.waiting)]):
            row = self._examine(req, order, left, is_next=order < len(partial))
            rows.append(row)
            req.decisions = [*req.decisions[-255:], row]
            prefill += row.selected_extend
            if row.stopped_pass:
                end, end_reason, end_rid = "result", row.reason, req.rid
                break
        if end == "queue_end":
            end_reason = "queue_end" if rows else None
        behind = [r for r in self.waiting if r.seen != self.step]
        for req in behind:
            req.blocker, req.reason, req.who, req.need, req.have = "order", end_reason, end_rid, None, None
        for req in self.waiting:
            req.passes += 1
            req.over += any(row.admitted for row in rows) and req in behind and self.random.random() < 0.05
        moves = [
            o.QueueMove(rid=r.rid, before=at, after=at if r.seen == self.step else None, key=at)
            for at, r in enumerate(queue[:24])
        ]
        closed = o.Ledgers(**left, rows=ROWS - len(self.running))
        kind = ("mixed" if decoding else "extend") if prefill else ("decode" if decoding else "idle")
        self.passes.append(
            o.PassRow(
                step=self.step,
                t_wall_s=self.now,
                kind=kind,
                policy="fcfs",
                limits=limit,
                budget_open=opened,
                budget_close=closed,
                mixed_rows=len(decoding) if prefill else 0,
                prefill_tokens=prefill,
                decode_rows=len(decoding),
                candidates=tuple(rows),
                end=end if rows else None,
                end_reason=end_reason,
                end_rid=end_rid,
                not_considered=len(behind),
                num_waiting=len(self.waiting),
                num_running=len(self.running),
                new_token_ratio=0.7,
                step_s=STEP_S,
                order_key="entry",
                moves=tuple(moves),
                waiting_before=waiting_before,
            )
        )
        self.totals["prefill"] += prefill
        self.slot_tokens[1] += prefill

    def _examine(self, req: Req, order: int, left: dict[str, float], *, is_next: bool) -> o.DecisionRow:
        before = o.Ledgers(**left)
        start = req.prefix + req.done
        candidate = req.prompt - start
        selected = min(candidate, int(left["rem_chunk"]))
        if selected < candidate:
            selected = selected // PAGE * PAGE
        charge = -(-selected // PAGE) * PAGE
        grow = 0 if is_next else req.max_new + PAGE
        reason, need, have = "", None, None
        if not is_next and len(self.running) >= ROWS:
            reason, need, have, req.blocker = "rows_exhausted", 1, 0, "rows"
        elif candidate + grow > left["remaining_total"]:
            reason, need, have, req.blocker = (
                "kv_total_exhausted",
                candidate + grow,
                left["remaining_total"],
                "kv_total",
            )
        elif selected <= 0:
            reason, need, have, req.blocker = "chunk_exhausted", candidate, max(0, left["rem_chunk"]), "chunk"
        elif charge > left["rem_input"]:
            reason, need, have, req.blocker = "compute_exhausted", charge, left["rem_input"], "compute"
        req.seen, req.reason, req.need, req.have, req.who = self.step, reason or None, need, have, None
        if reason:
            return self._row(req, order, before, before, candidate, 0, reason, need, have, is_next)
        for name in left:
            left[name] -= charge
        left["remaining_total"] -= grow
        whole = selected == candidate
        reason = "admitted_whole" if whole and not is_next else "admitted_first_chunk"
        if is_next:
            reason = "admitted_last_chunk" if whole else "admitted_next_chunk"
        row = self._row(req, order, before, o.Ledgers(**left), candidate, selected, reason, None, None, is_next)
        self._admit(req, selected, whole)
        return row

    def _row(self, req, order, before, after, candidate, selected, reason, need, have, is_next) -> o.DecisionRow:
        admitted = reason.startswith("admitted")
        start = req.prefix + req.done
        return o.DecisionRow(
            rid=req.rid,
            step=self.step,
            t_wall_s=self.now,
            order=order,
            is_continuation=is_next,
            prefix_len=start,
            candidate_extend=candidate,
            selected_extend=selected,
            extend_end=start + selected,
            before=before,
            after=after,
            reserved_new_tokens=0 if is_next else req.max_new,
            is_chunked=selected < candidate,
            admitted=admitted,
            result="CONTINUE" if admitted else "NO_TOKEN" if reason.startswith("kv") else "OTHER",
            reason=reason,
            need=need,
            have=have,
            stopped_pass=not admitted,
            times_passed_over=req.over,
        )

    def _admit(self, req: Req, selected: int, whole: bool) -> None:
        now_ns = self._ns(self.now)
        if req in self.waiting:
            self.waiting.remove(req)
            self.running.append(req)
            req.admitted = self.now
            self.totals["cached"] += req.prefix
        req.chunks.append(
            o.ChunkRow(
                step=self.step,
                prefix_len=req.prefix + req.done,
                extend_len=selected,
                is_last=whole,
                admitted_ns=now_ns,
                launched_ns=now_ns + 200_000,
                ready_ns=now_ns + 38_000_000,
                applied_ns=now_ns + 39_000_000,
            )
        )
        req.done += selected
        self._grow(req)
        req.state = "decode" if whole else "prefill"
        if whole:
            req.outputs, req.first, req.last = 1, self.now + 0.04, self.now + 0.04
            self.slot.append(("ttft", req.first - req.came))
            self.slot_tokens[0] += 1

    def _decode(self) -> None:
        for req in [r for r in self.running if r.state == "decode" and r.last is not None and r.last < self.now]:
            gap = self.now + 0.04 - req.last + self.random.choice((0, 0, 0, 0.03)) * self.random.random()
            req.last += gap
            req.gaps.append(gap)
            req.outputs += 1
            self.slot.append(("tbt", gap))
            self.slot_tokens[0] += 1
            self._grow(req)
            if req.outputs >= req.max_new:
                self._end(req, "length" if self.random.random() < 0.3 else "stop")
        self.totals["out"] = self.totals["out"] + len([r for r in self.running if r.state == "decode"])

    def _end(self, req: Req, finish: str) -> None:
        req.state, req.finish, req.ended = "finished", finish, self.now
        self.running.remove(req)
        self.ends[finish] += 1
        self.finished.appendleft(req)
        keep = len(req.pages) // 2
        name = f"node:{10 + sum(self.ends.values())}"
        for page in req.pages[:keep]:
            self.states[page], self.owners[page] = 3, name
        for page in req.pages[keep:]:
            self.states[page], self.owners[page] = 0, ""
            self.free.append(page)
        if keep:
            self.nodes[name] = list(req.pages[:keep])
        req.pages = []

    def _grow(self, req: Req) -> None:
        need = -(-(req.done + req.outputs) // PAGE) - len(req.pages)
        if need > 0:
            req.pages += self._take(need, 1, f"req:{req.rid}")

    def _take(self, count: int, state: int, owner: str) -> list[int]:
        while len(self.free) < count:
            victim = next(name for name in self.nodes if self.states[self.nodes[name][0]] == 3)
            for page in self.nodes.pop(victim):
                self.states[page], self.owners[page] = 0, ""
                self.free.append(page)
            self.totals["evicted"] += 1
        # Taken from a random place, so that the map looks like a used pool.
        taken = [self.free.pop(self.random.randrange(max(1, len(self.free) // 8))) for _ in range(count)]
        for page in taken:
            self.states[page], self.owners[page] = state, owner
        return taken

    def _count(self, state: int) -> int:
        return self.states.count(state)

    def _close_slot(self) -> None:
        def q(name: str, share: float) -> float | None:
            seen = sorted(v for n, v in self.slot if n == name)
            return seen[min(len(seen) - 1, int(share * len(seen)))] if seen else None

        counts = Counter(n for n, _ in self.slot)
        self.points.append(
            o.LatencyPoint(
                t_wall_s=self.now,
                ttft_count=counts["ttft"],
                ttft_p50_s=q("ttft", 0.5),
                ttft_p99_s=q("ttft", 0.99),
                tbt_count=counts["tbt"],
                tbt_p50_s=q("tbt", 0.5),
                tbt_p99_s=q("tbt", 0.99),
                tokens_per_s=self.slot_tokens[0],
                prefill_tokens_per_s=self.slot_tokens[1],
                waiting=len(self.waiting),
                running=len(self.running),
                steps=20,
            )
        )
        self.slot, self.slot_tokens = [], [0, 0]

    def _ns(self, wall: float) -> int:
        return round((wall - self.start) * 1e9)
