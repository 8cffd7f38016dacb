"""A made-up engine: the toy scheduler's state as answers of the read API, and a server for them.

Run it by hand and point the page at it: `python tests/dashboard/fake_engine.py --port 8723`.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

# pytest imports tests by path, so a neighbour is not importable by itself.
sys.path.insert(0, str(Path(__file__).parent))

import fake_kv
import fake_latency
from toy_scheduler import PAGE, ROWS, STEP_S, Req, ToyScheduler

from telemetry import observe as o


class FakeEngine(ToyScheduler):
    """The toy scheduler with the answers that a running engine would give about itself."""

    def head(self) -> dict[str, object]:
        return {
            "engine_id": self.engine_id,
            "observe_seq": self.seq,
            "step": self.step,
            "t_ns": self._ns(self.now),
            "t_wall_s": self.now,
        }

    def kv(self) -> o.KvPages:
        return o.KvPages(
            free=self._count(0),
            private=self._count(1),
            protected=self._count(2),
            evictable=self._count(3),
            capacity=self.num_pages,
        )

    def by_blocker(self) -> dict[str, int]:
        return dict(Counter(r.blocker for r in self.waiting))

    def status(self) -> o.EngineStatus:
        last = self.passes[-1] if self.passes else None
        point = self.points[-1] if self.points else o.LatencyPoint(t_wall_s=self.now)
        return o.EngineStatus(
            **self.head(),
            version="0.1.0",
            model="SmolLM2-135M-Instruct",
            attention_backend="cpu",
            policy="fcfs",
            uptime_s=self.now - self.start,
            heartbeat_age_s=0.01,
            steps_total=self.step,
            last_step_kind=last.kind if last else None,
            last_step_s=STEP_S,
            waiting=len(self.waiting),
            running=len(self.running),
            requests=dict(Counter(r.state for r in (*self.waiting, *self.running))),
            waiting_by_blocker=self.by_blocker(),
            waiting_tokens=sum(r.prompt for r in self.waiting),
            waiting_oldest_s=max((self.now - r.came for r in self.waiting), default=0.0),
            kv_pages=self.kv(),
            page_size=PAGE,
            limits=last.limits if last else o.Ledgers(rows=ROWS),
            remaining=(last.budget_close if last else None) or o.Ledgers(),
            new_token_ratio=0.7,
            promised_tokens=0.0,
            tokens_per_s=point.tokens_per_s,
            prefill_tokens_per_s=point.prefill_tokens_per_s,
            rate_window_s=5.0,
            requests_received=self.received,
            requests_finished=dict(self.ends),
            requests_rejected={},
            prompt_tokens_computed=self.totals["prefill"],
            prompt_tokens_cached=self.totals["cached"],
            generation_tokens=self.totals["out"],
            retractions=0,
            evicted_pages=self.totals["evicted"],
            invariants_checked=self.checked,
            violations_total=sum(self.violations.values()),
            violations=self.violations,
        )

    def queue(self, limit: int) -> o.QueueAnswer:
        return o.QueueAnswer(
            **self.head(),
            total=len(self.waiting),
            by_blocker=self.by_blocker(),
            entries=tuple(self._entry(r, i) for i, r in enumerate(self.waiting[:limit])),
        )

    def _entry(self, r: Req, position: int) -> o.QueueEntry:
        return o.QueueEntry(
            rid=r.rid,
            position=position,
            age_s=self.now - r.came,
            prompt_len=r.prompt,
            matched_len=r.prefix,
            blocker=r.blocker,
            reason=r.reason,
            need=r.need,
            have=r.have,
            who_stopped=r.who,
            last_evaluated_step=r.seen,
            times_passed_over=r.over,
            passes_waited=r.passes,
        )

    def request_row(self, r: Req) -> o.RequestRow:
        gaps = sorted(r.gaps)
        return o.RequestRow(
            rid=r.rid,
            state=r.state,
            accepted_wall_s=r.came,
            prompt_len=r.prompt,
            max_new_tokens=r.max_new,
            cached_tokens=r.prefix if r.admitted else None,
            outputs=r.outputs,
            queue_s=(r.admitted or self.now) - r.came,
            ttft_s=r.first - r.came if r.first else None,
            tbt_p50_s=gaps[len(gaps) // 2] if gaps else None,
            tbt_max_s=gaps[-1] if gaps else None,
            duration_s=r.ended - r.came if r.ended else None,
            chunks=len(r.chunks),
            finish=r.finish,
        )

    def requests(self, limit: int) -> o.RequestsAnswer:
        live = [*self.running, *self.waiting][:limit]
        return o.RequestsAnswer(
            **self.head(),
            live=tuple(map(self.request_row, live)),
            finished=tuple(map(self.request_row, list(self.finished)[:limit])),
        )

    def find(self, rid: str) -> Req | None:
        return next((r for r in (*self.waiting, *self.running, *self.finished) if r.rid == rid), None)

    def parts(self, r: Req) -> tuple[int | None, dict[str, int]]:
        """TTFT, and its parts so far, in nanoseconds."""
        ttft = self._ns(r.first) - self._ns(r.came) if r.first else None
        forward = sum(c.ready_ns - c.launched_ns for c in r.chunks)
        queue = self._ns(r.admitted or self.now) - self._ns(r.came)
        parts = {"queue": queue, "chunk_forward": forward, "commit": len(r.chunks) * 1_000_000}
        if ttft is not None:
            parts["between_chunks"] = max(0, ttft - sum(parts.values()))
        return ttft, parts

    def detail(self, rid: str) -> o.RequestDetail | None:
        r = self.find(rid)
        if r is None:
            return None
        ttft, parts = self.parts(r)
        queue = parts["queue"]
        line = o.Timeline(
            accepted_ns=self._ns(r.came),
            enqueued_ns=self._ns(r.came),
            ttft_ns=ttft,
            parts_ns=parts,
            blockers_ns={r.blocker: queue},
            chunks=tuple(r.chunks),
        )
        entry = self._entry(r, self.waiting.index(r)) if r in self.waiting else None
        return o.RequestDetail(
            **self.head(),
            request=self.request_row(r),
            queue=entry,
            timeline=line,
            decisions=tuple(r.decisions[-256:]),
            lane=fake_latency.lane(self, r),
        )

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
            said.append(
                f"It was admitted after {r.admitted - r.came:.2f} s; {r.prefix} tokens were found in the cache."
            )
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
            owners.append(
                o.PageOwner(
                    owner=name,
                    kind="request" if kind == "req" else "node",
                    pages=n,
                    state=state,
                    label=label if kind == "req" else f"node {label}",
                    lock_count=1 if kind == "req" else len(held),
                    holders=tuple(held),
                )
            )
        packed = np.array([rank[name] + 1 if name else 0 for name in self.owners], dtype="<u2").tobytes()
        return o.PageMap(
            **self.head(),
            page_size=PAGE,
            num_pages=self.num_pages,
            counts=self.kv(),
            states_b64=base64.b64encode(bytes(self.states)).decode(),
            owners_b64=base64.b64encode(packed).decode(),
            owners=tuple(owners),
            owners_total=len(sizes),
        )

    def _tree(self, query: dict[str, list[str]]) -> o.TreeAnswer:
        node = int(query["node"][0]) if "node" in query else None
        opened = {int(name) for name in query.get("open", [""])[0].split(",") if name}
        return fake_kv.tree(self, node=node, opened=opened, top=int(query.get("top", ["20"])[0]))

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
                "/observe/pool": lambda: fake_kv.pool(self),
                "/observe/laws": lambda: fake_kv.laws(self),
                "/observe/evidence": lambda: fake_kv.evidence(self),
                "/observe/tree": lambda: self._tree(query),
                "/observe/breakdown": lambda: fake_latency.breakdown(self),
                "/observe/lanes": lambda: fake_latency.lanes(self, last),
            }
            if path in plain:
                return plain[path]()
            rid = unquote(path.rsplit("/", 1)[-1])
            if path.startswith("/observe/pages/"):
                return fake_kv.page(self, int(rid))
            if path.startswith("/observe/evidence/"):
                return fake_kv.bundle(self, rid)
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
