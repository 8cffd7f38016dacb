"""`python bench/accounting.py [TRACE ...]`: reference and exact accounting side by side on real traffic.

Owns: reading traces, a virtual clock with a linear cost model, and two comparisons:

1. Whole runs: the same arrivals under each accounting. Waits, retractions, prefills, pages in use.
2. Pass by pass: at every pass of the reference's run exact plans on the very same state (a plan writes nothing). Where
   it admits fewer requests, the promise that kept the first one out is named.

TRACE is an Azure file (TIMESTAMP,ContextTokens,GeneratedTokens; .csv or .csv.gz) or a Mooncake file (.jsonl; a hash
block of 512 tokens becomes the keys of its pages, so equal blocks are cached once). Default: the packaged Azure sample.
max_new_tokens of a request is the power of two at or above its recorded output, at which it stops.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from engine.config import EngineConfig
from engine.errors import RequestRefused
from engine.events import NullSink
from engine.request import FinishReason
from engine.scheduler.decision import Reason
from engine.scheduler.exact import ExactAccounting
from engine.scheduler.plan import OutcomeRow, StepKind, StepOutcome, StepPlan, StepTimes
from engine.scheduler.planner import plan_step
from engine.scheduler.scheduler import Arrival, Scheduler
from telemetry.demo.trace import DATA_DIR

PACKAGED: Final = DATA_DIR / "azure_conv_2023.csv.gz"
BLOCK_TOKENS: Final = 512
#: Cost of a step: 6 ms, 10 us a query token, 20 ns a token of context that decode reads.
BASE_NS, QUERY_NS, CONTEXT_NS = 6_000_000, 10_000, 20


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. `blocks`: Mooncake's ids, empty where prompts share nothing."""

    at_ns: int
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def _azure(path: Path) -> Iterator[Row]:
    with (
        path.open("rb") as raw,
        gzip.open(raw) if path.suffix == ".gz" else raw as file,
        io.TextIOWrapper(file, "ascii", newline="") as text,
    ):
        first = None
        for line in csv.DictReader(text):
            seconds, _, fraction = line["TIMESTAMP"].partition(".")
            at = int(datetime.fromisoformat(seconds).timestamp()) * 10**9 + int(fraction.ljust(9, "0")[:9])
            first = at if first is None else first
            yield Row(at - first, int(line["ContextTokens"]), max(1, int(line["GeneratedTokens"])))


def _mooncake(path: Path) -> Iterator[Row]:
    with path.open() as file:
        for line in file:
            raw = json.loads(line)
            blocks = tuple(raw["hash_ids"])
            yield Row(
                int(raw["timestamp"]) * 10**6, int(raw["input_length"]), max(1, int(raw["output_length"])), blocks
            )


def rows_of(path: Path, count: int) -> list[Row]:
    """The first `count` requests of a trace, in arrival order."""
    return list(islice(_mooncake(path) if path.suffix == ".jsonl" else _azure(path), count))


def page_keys(row: Row, index: int, page: int) -> bytes:
    """Keys of the whole pages of a prompt."""
    pages = row.prompt // page
    if not row.blocks:
        return (np.arange(pages, dtype="<i8") + ((index + 1) << 24)).tobytes()
    per_block = BLOCK_TOKENS // page
    place = np.arange(pages, dtype="<i8")
    blocks = np.array(row.blocks, dtype="<i8")
    return ((blocks[place // per_block] + 1) * 4096 + place % per_block + (1 << 50)).astype("<i8").tobytes()


@dataclass(slots=True)
class Score:
    """What came of a run; times in virtual nanoseconds."""

    waits_ns: list[int] = field(default_factory=list)
    ends_ns: int = 0
    finished: int = 0
    refused: int = 0
    steps: int = 0
    passes: int = 0
    admitted: int = 0
    computed: int = 0
    retractions: int = 0
    busy_pages: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    fewer: int = 0
    more: int = 0
    same: int = 0


class Run:
    """A scheduler driven by a trace on a virtual clock."""

    def __init__(self, config: EngineConfig, rows: Sequence[Row], *, speed: float, compare: bool) -> None:
        pages = config.cache.num_pages
        assert pages is not None
        self.config = config
        self.rows = rows
        self.speed = speed
        self.scheduler = Scheduler(config, num_pages=pages, sink=NullSink())
        self.exact = ExactAccounting(
            page_size=config.cache.page_size, clip_max_new_tokens=config.scheduler.clip_max_new_tokens
        )
        self.compare = compare
        self.score = Score()
        self.now_ns = 0
        self.next_row = 0
        self.arrived: dict[str, int] = {}

    def play(self) -> Score:
        """Until everyone has finished."""
        state = self.scheduler.state
        while self.next_row < len(self.rows) or state.has_work:
            self._arrivals()
            if not state.has_work:
                self.now_ns = int(self.rows[self.next_row].at_ns / self.speed)
                continue
            self._step()
        self.score.ends_ns = self.now_ns
        return self.score

    def _arrivals(self) -> None:
        page = self.config.cache.page_size
        while self.next_row < len(self.rows) and self.rows[self.next_row].at_ns / self.speed <= self.now_ns:
            row, index = self.rows[self.next_row], self.next_row
            self.next_row += 1
            try:
                self.scheduler.add(
                    Arrival(
                        rid=str(index),
                        prompt_len=row.prompt,
                        max_new_tokens=1 << (row.output - 1).bit_length(),
                        page_keys=page_keys(row, index, page),
                        head32_key=row.blocks[0] if row.blocks else index + (1 << 40),
                    ),
                    self.now_ns,
                )
                self.arrived[str(index)] = int(row.at_ns / self.speed)
            except RequestRefused:
                self.score.refused += 1

    def _step(self) -> None:
        scheduler, state, score = self.scheduler, self.scheduler.state, self.score
        scheduler.prepare(self.now_ns)
        plan = scheduler.plan(self.now_ns)
        if self.compare and plan.pass_end is not None and plan.pass_end.stop != "skipped":
            self._compare(plan)
        plan = scheduler.commit(plan)
        query = sum(row.extend_len for row in plan.prefills) + len(plan.decodes)
        context = sum(row.extend_end for row in plan.prefills)
        context += sum(state.requests[rid].computed_len + 1 for rid in plan.decodes)
        if plan.kind is not StepKind.IDLE:
            self.now_ns += BASE_NS + QUERY_NS * query + CONTEXT_NS * context
        score.steps += 1
        score.passes += bool(plan.decisions)
        score.admitted += sum(not d.is_continuation and d.is_admitted for d in plan.decisions)
        score.computed += sum(row.extend_len for row in plan.prefills)
        score.retractions += len(plan.retractions)
        score.busy_pages += state.kv.num_pages - state.kv.free_pages - state.kv.evictable_pages
        rows = tuple(self._outcome(rid) for rid in plan.sampling)
        times = StepTimes(*[self.now_ns] * 7)
        scheduler.apply(plan, StepOutcome(plan.step, rows, times))
        scheduler.complete(times)

    def _outcome(self, rid: str) -> OutcomeRow:
        request, page = self.scheduler.state.requests[rid], self.config.cache.page_size
        if request.output_len == 0:
            self.score.waits_ns.append(self.now_ns - self.arrived[rid])
        length = request.seq_len + 1
        key = (1 << 60) + (int(rid) << 24) + length if length % page == 0 else None
        done = request.output_len + 1 >= min(self.rows[int(rid)].output, request.max_new_tokens)
        self.score.finished += done
        return OutcomeRow(rid, key, None, FinishReason.LENGTH if done else None)

    # -- pass by pass ----------------------------------------------------------------------------------------------

    def _compare(self, plan: StepPlan) -> None:
        """What exact would do with the same state."""
        state, score = self.scheduler.state, self.score
        reference, state.accounting = state.accounting, self.exact
        try:
            other = plan_step(state, self.now_ns)
        finally:
            state.accounting = reference
        ours = sum(d.is_admitted and not d.is_continuation for d in other.decisions)
        theirs = sum(d.is_admitted and not d.is_continuation for d in plan.decisions)
        score.same += ours == theirs
        score.more += ours > theirs
        score.fewer += ours < theirs
        if ours < theirs:
            score.causes[self._cause(plan, other)] += 1

    def _cause(self, plan: StepPlan, other: StepPlan) -> str:
        """The promise, or the limit, that made exact stop earlier."""
        stop = other.decisions[-1]
        reason, state = stop.reason, self.scheduler.state
        held = self.exact.continuation_promise(state.continuation) if state.continuation is not None else 0
        cuts = sum(d.before.remaining_total - d.after.remaining_total for d in other.decisions if d.is_chunked)
        if stop.is_continuation:
            return f"continuation waits: its promise of the prompt is not whole ({reason})"
        if reason is Reason.COMPUTE_EXHAUSTED:
            return "input limit: the reference overdraws it with chunking on"
        if reason is not Reason.KV_TOTAL_EXHAUSTED and not stop.is_admitted:
            return f"slice: {reason} after a longer or aligned continuation"
        need, have = (stop.need or 0, stop.have or 0) if not stop.is_admitted else (1, stop.after.remaining_total)
        if need <= have + held + cuts and held + cuts > 0:
            return "promise to the half-prefilled prompt: its unpaid rest and output"
        if need <= have + held + cuts + max(0.0, other.promised_tokens - held - plan.promised_tokens):
            return "promise to the running: their growth in whole pages"
        return "promises of this pass, in whole pages"


def config_of(options: argparse.Namespace, accounting: str) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "scheduler": {
                "kv_accounting": accounting,
                "chunked_prefill_size": options.chunk,
                "max_prefill_tokens": options.input,
                "max_running_requests": options.rows,
                "schedule_policy": options.policy,
            },
            "cache": {"page_size": options.page, "num_pages": options.pool // options.page},
            "executor": {"kind": "simulated"},
        }
    )


def line_of(name: str, accounting: str, score: Score, pages: int) -> str:
    waits = np.array(score.waits_ns, dtype=np.float64) / 1e9
    cells = (
        f"{name:<28.28}",
        f"{accounting:<9}",
        f"{score.finished:>6}",
        f"{score.refused:>4}",
        f"{score.ends_ns / 1e9:>8.1f}",
        f"{score.admitted / max(1, score.steps):>9.3f}",
        f"{waits.mean():>9.2f}",
        f"{np.percentile(waits, 50):>8.2f}",
        f"{np.percentile(waits, 99):>8.2f}",
        f"{score.retractions:>7}",
        f"{score.computed:>10}",
        f"{100 * score.busy_pages / max(1, score.steps) / pages:>6.1f}",
    )
    return " ".join(cells)


HEAD: Final = (
    f"{'trace':<28} {'kv':<9} {'done':>6} {'ref.':>4} {'end s':>8} {'adm/step':>9} {'ttft avg':>9} {'p50 s':>8} "
    f"{'p99 s':>8} {'retract':>7} {'prefilled':>10} {'busy %':>6}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables; JSON lines with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, default=[PACKAGED])
    parser.add_argument("--count", type=int, default=1000, help="requests of each trace")
    parser.add_argument("--speed", type=float, default=4.0, help="arrivals this many times as fast as recorded")
    parser.add_argument("--pool", type=int, default=131_072, help="tokens of the KV pool")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--input", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    print(HEAD)
    notes: list[str] = []
    for path in options.traces:
        rows = rows_of(path, options.count)
        for accounting in ("reference", "exact"):
            run = Run(config_of(options, accounting), rows, speed=options.speed, compare=accounting == "reference")
            score = run.play()
            print(line_of(path.name, accounting, score, options.pool // options.page), flush=True)
            if run.compare:
                notes.append(
                    f"{path.name}: on the reference's own states exact admits as many at {score.same} passes, more at "
                    f"{score.more}, fewer at {score.fewer}"
                )
                notes += [f"    fewer, {count:>5} x  {cause}" for cause, count in score.causes.most_common()]
            if options.json:
                figures = {"steps": score.steps, "retractions": score.retractions, "end_s": score.ends_ns / 1e9}
                print(json.dumps({"bench": "accounting", "trace": path.name, "kv_accounting": accounting, **figures}))
    print("\n".join(notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
