"""A small engine for the page to look at. Owns: a toy scheduler whose answers fit together, and its HTTP server.

It is not the engine and proves nothing about scheduling: it exists so that the page's tests and its development need
neither a model nor the real read model. Numbers are consistent where the page could notice: pages add up to the pool,
every ledger goes down by what was charged, queue and passes tell the same story. The clock is the test's own: `tick()`
makes one step. Run it by hand: `python tests/dashboard/fake_engine.py --port 8723`.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

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


class FakeEngine:
    """The toy scheduler. `busy` draws new requests by itself in each tick."""

    def __init__(self, *, seed: int = 7, num_pages: int = 1024, busy: bool = True, started: float | None = None) -> None:
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
        limit = o.Ledgers(rem_input=INPUT, rem_chunk=CHUNK, remaining_total=current * PAGE - promised,
                          remaining_current=current * PAGE, rows=ROWS)
        left = {"rem_input": INPUT - len(decoding), "rem_chunk": CHUNK - len(decoding),
                "remaining_total": limit.remaining_total - len(decoding), "remaining_current": current * PAGE - len(decoding)}
        opened = o.Ledgers(**left, rows=ROWS - len(self.running))
        partial = [r for r in self.running if r.state == "prefill"]
        rows: list[o.DecisionRow] = []
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
        closed = o.Ledgers(**left, rows=ROWS - len(self.running))
        kind = ("mixed" if decoding else "extend") if prefill else ("decode" if decoding else "idle")
        self.passes.append(o.PassRow(
            step=self.step, t_wall_s=self.now, kind=kind, policy="fcfs", limits=limit, budget_open=opened,
            budget_close=closed, mixed_rows=len(decoding) if prefill else 0, prefill_tokens=prefill,
            decode_rows=len(decoding), candidates=tuple(rows), end=end if rows else None, end_reason=end_reason,
            end_rid=end_rid, not_considered=len(behind), num_waiting=len(self.waiting), num_running=len(self.running),
            new_token_ratio=0.7, step_s=STEP_S))
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
            reason, need, have, req.blocker = "kv_total_exhausted", candidate + grow, left["remaining_total"], "kv_total"
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
            rid=req.rid, step=self.step, t_wall_s=self.now, order=order, is_continuation=is_next, prefix_len=start,
            candidate_extend=candidate, selected_extend=selected, extend_end=start + selected, before=before, after=after,
            reserved_new_tokens=0 if is_next else req.max_new, is_chunked=selected < candidate, admitted=admitted,
            result="CONTINUE" if admitted else "NO_TOKEN" if reason.startswith("kv") else "OTHER", reason=reason,
            need=need, have=have, stopped_pass=not admitted, times_passed_over=req.over)

    def _admit(self, req: Req, selected: int, whole: bool) -> None:
        now_ns = self._ns(self.now)
        if req in self.waiting:
            self.waiting.remove(req)
            self.running.append(req)
            req.admitted = self.now
            self.totals["cached"] += req.prefix
        req.chunks.append(o.ChunkRow(step=self.step, prefix_len=req.prefix + req.done, extend_len=selected, is_last=whole,
                                     admitted_ns=now_ns, launched_ns=now_ns + 200_000, ready_ns=now_ns + 38_000_000,
                                     applied_ns=now_ns + 39_000_000))
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
        self.points.append(o.LatencyPoint(
            t_wall_s=self.now, ttft_count=counts["ttft"], ttft_p50_s=q("ttft", 0.5), ttft_p99_s=q("ttft", 0.99),
            tbt_count=counts["tbt"], tbt_p50_s=q("tbt", 0.5), tbt_p99_s=q("tbt", 0.99), tokens_per_s=self.slot_tokens[0],
            prefill_tokens_per_s=self.slot_tokens[1], waiting=len(self.waiting), running=len(self.running), steps=20))
        self.slot, self.slot_tokens = [], [0, 0]

    def _ns(self, wall: float) -> int:
        return round((wall - self.start) * 1e9)

    # -- answers -----------------------------------------------------------------------------------------------------

    def head(self) -> dict[str, object]:
        return {"engine_id": self.engine_id, "observe_seq": self.seq, "step": self.step, "t_ns": self._ns(self.now),
                "t_wall_s": self.now}

    def kv(self) -> o.KvPages:
        return o.KvPages(free=self._count(0), private=self._count(1), protected=self._count(2), evictable=self._count(3),
                         capacity=self.num_pages)

    def by_blocker(self) -> dict[str, int]:
        return dict(Counter(r.blocker for r in self.waiting))

    def status(self) -> o.EngineStatus:
        last = self.passes[-1] if self.passes else None
        point = self.points[-1] if self.points else o.LatencyPoint(t_wall_s=self.now)
        return o.EngineStatus(
            **self.head(), version="0.1.0", model="SmolLM2-135M-Instruct", attention_backend="cpu", policy="fcfs",
            uptime_s=self.now - self.start, heartbeat_age_s=0.01, steps_total=self.step,
            last_step_kind=last.kind if last else None, last_step_s=STEP_S, waiting=len(self.waiting),
            running=len(self.running), requests=dict(Counter(r.state for r in (*self.waiting, *self.running))),
            waiting_by_blocker=self.by_blocker(), waiting_tokens=sum(r.prompt for r in self.waiting),
            waiting_oldest_s=max((self.now - r.came for r in self.waiting), default=0.0), kv_pages=self.kv(),
            page_size=PAGE, limits=last.limits if last else o.Ledgers(rows=ROWS),
            remaining=(last.budget_close if last else None) or o.Ledgers(), new_token_ratio=0.7, promised_tokens=0.0,
            tokens_per_s=point.tokens_per_s, prefill_tokens_per_s=point.prefill_tokens_per_s, rate_window_s=5.0,
            requests_received=self.received, requests_finished=dict(self.ends), requests_rejected={},
            prompt_tokens_computed=self.totals["prefill"], prompt_tokens_cached=self.totals["cached"],
            generation_tokens=self.totals["out"], retractions=0, evicted_pages=self.totals["evicted"],
            invariants_checked=True, violations_total=sum(self.violations.values()), violations=self.violations)

    def queue(self, limit: int) -> o.QueueAnswer:
        return o.QueueAnswer(**self.head(), total=len(self.waiting), by_blocker=self.by_blocker(), entries=tuple(
            self._entry(r, i) for i, r in enumerate(self.waiting[:limit])))

    def _entry(self, r: Req, position: int) -> o.QueueEntry:
        return o.QueueEntry(rid=r.rid, position=position, age_s=self.now - r.came, prompt_len=r.prompt,
                            matched_len=r.prefix, blocker=r.blocker, reason=r.reason, need=r.need, have=r.have,
                            who_stopped=r.who, last_evaluated_step=r.seen, times_passed_over=r.over, passes_waited=r.passes)

    def request_row(self, r: Req) -> o.RequestRow:
        gaps = sorted(r.gaps)
        return o.RequestRow(
            rid=r.rid, state=r.state, accepted_wall_s=r.came, prompt_len=r.prompt, max_new_tokens=r.max_new,
            cached_tokens=r.prefix if r.admitted else None, outputs=r.outputs,
            queue_s=(r.admitted or self.now) - r.came, ttft_s=r.first - r.came if r.first else None,
            tbt_p50_s=gaps[len(gaps) // 2] if gaps else None, tbt_max_s=gaps[-1] if gaps else None,
            duration_s=r.ended - r.came if r.ended else None, chunks=len(r.chunks), finish=r.finish)

    def requests(self, limit: int) -> o.RequestsAnswer:
        live = [*self.running, *self.waiting][:limit]
        return o.RequestsAnswer(**self.head(), live=tuple(map(self.request_row, live)),
                                finished=tuple(map(self.request_row, list(self.finished)[:limit])))

    def find(self, rid: str) -> Req | None:
        return next((r for r in (*self.waiting, *self.running, *self.finished) if r.rid == rid), None)

    def detail(self, rid: str) -> o.RequestDetail | None:
        r = self.find(rid)
        if r is None:
            return None
        ttft = self._ns(r.first) - self._ns(r.came) if r.first else None
        forward = sum(c.ready_ns - c.launched_ns for c in r.chunks)
        queue = self._ns(r.admitted or self.now) - self._ns(r.came)
        parts = {"queue": queue, "chunk_forward": forward, "commit": len(r.chunks) * 1_000_000}
        if ttft is not None:
            parts["between_chunks"] = max(0, ttft - sum(parts.values()))
        line = o.Timeline(accepted_ns=self._ns(r.came), enqueued_ns=self._ns(r.came), ttft_ns=ttft, parts_ns=parts,
                          blockers_ns={r.blocker: queue}, chunks=tuple(r.chunks))
        entry = self._entry(r, self.waiting.index(r)) if r in self.waiting else None
        return o.RequestDetail(**self.head(), request=self.request_row(r), queue=entry, timeline=line,
                               decisions=tuple(r.decisions[-256:]))

    def explain(self, rid: str) -> o.Explanation | None:
        r = self.find(rid)
        if r is None:
            return None
        said = [f"{rid} came with a prompt of {r.prompt} tokens and asks for at most {r.max_new} new ones."]
        if r.admitted is None:
            said.append(f"It has waited {self.now - r.came:.2f} s and {r.passes} passes, now because of {r.blocker}.")
            if r.need is not None:
                said.append(f"In step {r.seen} it needed {r.need:g} tokens and there were {r.have:g}: {r.reason}.")
            if r.who:
                said.append(f"The last pass ended at {r.who} ({r.reason}) before it was looked at.")
        else:
            said.append(f"It was admitted after {r.admitted - r.came:.2f} s; {r.prefix} tokens were found in the cache.")
            said.append(f"Its prompt was computed in {len(r.chunks)} chunks.")
        if r.first:
            said.append(f"Its first token came after {r.first - r.came:.2f} s.")
        if r.finish:
            said.append(f"It ended by {r.finish} after {r.outputs} tokens.")
        return o.Explanation(**self.head(), rid=rid, sentences=tuple(said))

    def pages(self) -> o.PageMap:
        sizes = Counter(owner for owner in self.owners if owner)
        rank = {name: i for i, (name, _) in enumerate(sizes.most_common(1000))}
        users = [r.rid for r in self.running[:3]]
        owners = []
        for name, n in sizes.most_common(1000):
            kind, label = name.split(":", 1)
            state = o.PAGE_STATES[self.states[self.owners.index(name)]]
            held = users if state == "protected" else []
            owners.append(o.PageOwner(owner=name, kind="request" if kind == "req" else "node", pages=n, state=state,
                                      label=label if kind == "req" else f"node {label}",
                                      lock_count=1 if kind == "req" else len(held), holders=tuple(held)))
        packed = np.array([rank[name] + 1 if name else 0 for name in self.owners], dtype="<u2").tobytes()
        return o.PageMap(**self.head(), page_size=PAGE, num_pages=self.num_pages, counts=self.kv(),
                         states_b64=base64.b64encode(bytes(self.states)).decode(),
                         owners_b64=base64.b64encode(packed).decode(), owners=tuple(owners), owners_total=len(sizes))

    def answer(self, path: str, query: dict[str, list[str]]) -> o.Head | None:
        """The answer of one path; None when there is none."""
        with self.lock:
            limit = int(query.get("limit", ["500"])[0])
            last = int(query.get("n", ["32"])[0])
            plain = {
                "/observe/status": self.status,
                "/observe/queue": lambda: self.queue(limit),
                "/observe/passes": lambda: o.PassesAnswer(**self.head(), passes=tuple(self.passes)[-last:]),
                "/observe/latency": lambda: o.LatencyAnswer(**self.head(), slot_s=1.0, points=tuple(self.points)),
                "/observe/requests": lambda: self.requests(limit),
                "/observe/pages": self.pages,
            }
            if path in plain:
                return plain[path]()
            rid = unquote(path.rsplit("/", 1)[-1])
            return self.explain(rid) if path.startswith("/observe/explain/") else self.detail(rid)


class FakeServer:
    """Serves one FakeEngine on loopback. Context manager; `asked` counts requests by path."""

    def __init__(self, engine: FakeEngine, port: int = 0) -> None:
        self.engine = engine
        self.asked: Counter[str] = Counter()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                outer.asked[parts.path] += 1
                found = outer.engine.answer(parts.path, parse_qs(parts.query))
                body = found.model_dump_json().encode() if found else json.dumps({"error": "unknown"}).encode()
                self.send_response(200 if found else 404)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                # So that a stopped server is gone for clients that keep connections, too.
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Ticker:
    """Makes the engine step in real time until left."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(STEP_S):
            self._engine.tick(time.time())

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def warmed(steps: int = 1200, **options: object) -> FakeEngine:
    """An engine that has already run `steps` steps, the last of them now."""
    engine = FakeEngine(started=time.time() - steps * STEP_S, **options)
    for _ in range(steps):
        engine.tick()
    return engine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a made-up engine for the page.")
    parser.add_argument("--port", type=int, default=8723)
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=600.0)
    chosen = parser.parse_args()
    made = warmed(num_pages=chosen.pages)
    with FakeServer(made, chosen.port) as server, Ticker(made):
        print(server.url, flush=True)
        time.sleep(chosen.seconds)
