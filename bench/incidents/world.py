"""A real engine under a seeded load on a virtual clock. Owns: driving it, scraping it over HTTP, timing its clients.

Everything is the product's own: scheduler, cache, checker, journal, metrics, read API, spans. Two things are not: the
model, which is simulated, and time, which moves as the steps are priced. Hence a run of minutes takes seconds, and the
same seed gives the same numbers on every machine. While the engine stands still between two steps, its read API and
`/metrics` answer over real HTTP, so `admitscope explain URL RID` sees the moment that an operator would.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import uvicorn
from fastapi import FastAPI

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.executor.base import ForwardBatch, StepResult
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry.cli import main as admitscope
from telemetry.client import LiveSource
from telemetry.demo.scrape import Scrape
from telemetry.journal_cap import CappedJournal
from telemetry.listeners import Listeners
from telemetry.observe import QueueAnswer
from telemetry.read_api import create_router
from telemetry.settings import ServeCommand, parse

#: What a step costs: a small GPU, roughly.
STEP_NS: Final = 6_000_000
PROMPT_TOKEN_NS: Final = 40_000
#: The loop between two steps.
LOOP_NS: Final = 300_000
#: Monday, 30 November 2026, 09:00 UTC: where the virtual clock stands at its zero.
STARTED_NS: Final = 1_796_029_200_000_000_000
_SCRAPE_NS: Final = 500_000_000
START_NS: Final = 1_000_000_000


class Arrival(NamedTuple):
    """One request of a load. Lengths in tokens.

    kind      what the tables call it; rids are `kind-number`
    outputs   it answers with at least so many, then until its end token; all `max_new` when equal to that
    """

    at_s: float
    kind: str
    prompt: int
    max_new: int
    outputs: int


@dataclass
class Client:
    """What one caller saw, in nanoseconds on the engine's clock."""

    rid: str
    kind: str
    accepted_ns: int
    token_ns: list[int] = field(default_factory=list)

    @property
    def ttft_ns(self) -> int | None:
        return self.token_ns[0] - self.accepted_ns if self.token_ns else None


class TimedExecutor(SimulatedExecutor):
    """Made-up tokens that take time."""

    def __init__(self, config: EngineConfig, clock: VirtualClock) -> None:
        super().__init__(config)
        self._clock = clock

    def execute(self, batch: ForwardBatch) -> StepResult:
        # A decode row is one token: what is beyond one token a row are prompts.
        self._clock.advance_ns(STEP_NS + PROMPT_TOKEN_NS * (len(batch.token_ids) - len(batch.rids)))
        return super().execute(batch)


@dataclass
class Run:
    """What one run left behind.

    scrapes     (seconds since the start, `/metrics`), the first before anybody came
    looked      rid that was explained while it waited, in `look_step`; `live` is what was said
    violations  laws broken; more than none makes the figures worthless
    """

    journal: Path
    clients: dict[str, Client]
    scrapes: list[tuple[float, Scrape]]
    looked: str | None
    look_step: int
    live: str
    ended_s: float
    violations: int


class World:
    """One engine with all its listeners; a load is played on it once.

    flags   of `admitscope serve`
    folder  where its journal goes
    traces  URL of a collector
    """

    def __init__(self, flags: Mapping[str, str], folder: Path, traces: str) -> None:
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        command = parse(
            ["serve", "--executor.kind", "simulated", "--traces.endpoint", traces, "--traces.sample-ratio", "0", *words]
        )
        assert isinstance(command, ServeCommand)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "journal.jsonl"
        for old in folder.glob("journal*.jsonl"):
            old.unlink()
        self.clock = VirtualClock(START_NS)
        journal = CappedJournal(path, max_mib=512)
        self.listeners = Listeners(command, clock=self.clock, journal=journal, engine_id="incident", version="0")
        config = command.engine_config()
        self.engine = LLMEngine(
            config,
            executor=TimedExecutor(config, self.clock),
            clock=self.clock,
            sink=self.listeners.hears,
            key_secret=b"incidents",
            engine_id="incident",
            wall_ns=STARTED_NS,
        )
        self._journal = path
        self._clients: dict[str, Client] = {}
        self._scrapes: list[tuple[float, Scrape]] = []

    @property
    def now_s(self) -> float:
        return (self.clock.now_ns() - START_NS) / 1e9

    def play(
        self,
        load: Sequence[Arrival],
        *,
        look_s: float | None = None,
        pick: Callable[[QueueAnswer], str | None] = lambda _: None,
    ) -> Run:
        """Until all have ended. At `look_s` the waiting request that `pick` names is explained by the live engine."""
        looked, look_step, live = None, 0, ""
        with served(self.listeners) as url, httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            self._scrape(client)
            due, next_scrape = 0, self.clock.now_ns()
            while due < len(load) or self.engine.has_work:
                while due < len(load) and self.now_s >= load[due].at_s:
                    self._arrive(load[due], due)
                    due += 1
                if self.clock.now_ns() >= next_scrape:
                    self._scrape(client)
                    next_scrape += _SCRAPE_NS
                if look_s is not None and self.now_s >= look_s:
                    look_step, look_s = self.engine.steps_done, None
                    looked, live = self._look(url, pick)
                if self.engine.has_work:
                    self._step()
                elif due < len(load):
                    self.clock.advance_ns(max(LOOP_NS, round(load[due].at_s * 1e9) + START_NS - self.clock.now_ns()))
            self._scrape(client)
            ended_s = self.now_s
        self.listeners.close()
        violations = self.listeners.checking.checker.total_violations
        return Run(self._journal, self._clients, self._scrapes, looked, look_step, live, ended_s, violations)

    def _arrive(self, arrival: Arrival, number: int) -> None:
        rid = f"{arrival.kind}-{number}"
        accepted_ns = round(arrival.at_s * 1e9) + START_NS
        self._clients[rid] = Client(rid, arrival.kind, accepted_ns)
        # Tokens that nobody else has: what the cache might share is not what these incidents are about.
        prompt = tuple(number // 400**place % 400 + 40 for place in (0, 1)) + (7,) * (arrival.prompt - 2)
        params = SamplingParams(max_new_tokens=arrival.max_new, min_new_tokens=arrival.outputs)
        self.engine.add_request(EngineRequest(rid=rid, prompt_ids=prompt, params=params, accepted_ns=accepted_ns))

    def _step(self) -> None:
        front_end = self.listeners.metrics.front_end
        for output in self.engine.step():
            client, now = self._clients[output.rid], self.clock.now_ns()
            if output.token_id is not None:
                if not client.token_ns:
                    front_end.on_first_byte(output.rid, now)
                client.token_ns.append(now)
            if output.finish is not None:
                first = client.token_ns[0] if client.token_ns else None
                self.engine.record_response(output.rid, first, now, 4 * len(client.token_ns), 20_000, False)
        self.clock.advance_ns(LOOP_NS)

    def _look(self, url: str, pick: Callable[[QueueAnswer], str | None]) -> tuple[str | None, str]:
        """Who waits, and what `admitscope explain URL RID` says of the one that is picked."""
        self._catch_up()
        with LiveSource(url, timeout_s=30) as source:
            looked = pick(source.queue())
        return looked, "" if looked is None else said("explain", url, looked)

    def _catch_up(self) -> None:
        for queue in self.listeners.queues:
            queue.flush(30)

    def _scrape(self, client: httpx.Client) -> None:
        """Read `/metrics` while the engine stands and no listener is behind: nothing is lost, times are true."""
        self._catch_up()
        self.listeners.checking.checker.audit(self.engine.snapshot())
        self._scrapes.append((self.now_s, Scrape(client.get("/metrics").raise_for_status().text)))


@contextlib.contextmanager
def served(listeners: Listeners) -> Iterator[str]:
    """The read API and `/metrics` of `listeners` on a free port of 127.0.0.1; yields the URL."""
    app = FastAPI()
    app.include_router(create_router(listeners.read_model, listeners.exposition))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def said(*words: str) -> str:
    """What the command line prints: `admitscope WORDS`. Raises RuntimeError when it has no answer."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = admitscope(words)
    if status != 0:
        raise RuntimeError(f"admitscope {' '.join(words)}: exit status {status}")
    return out.getvalue().rstrip("\n")
