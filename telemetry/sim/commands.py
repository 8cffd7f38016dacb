"""The commands of the simulator as data. Owns: flags, defaults and help of `sim`, `sweep`, `whatif` and `tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from telemetry.settings_page import SubCommand

_MOST: Final = 10**9
_MOST_LOADS: Final = 64


def chosen_arrivals(rate_scale: float, rate: float | None, concurrency: int | None) -> None:
    """Raise ValueError when more than one of these says when requests come."""
    chosen = {"--rate-scale": rate_scale != 1.0, "--rate": rate is not None, "--concurrency": concurrency is not None}
    named = [flag for flag, is_set in chosen.items() if is_set]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} contradict each other: each says when requests come")


class SimCommand(SubCommand):
    """Simulate a trace: the real scheduler and cache under a virtual clock, with times from a cost model.

    TRACE is a Mooncake trace (JSON lines), an Azure one (CSV), a request log of SGLang (JSON lines), a journal of this
    engine or its folder, the folder of its Parquet tables, or the name of a trace that comes with this program:
    mooncake, azure-conv. Files may end in .gz or .xz.
    Exit status 0 when all was simulated, 1 when a law of the engine broke, 2 when something cannot be read or is set
    wrongly. Nothing leaves this machine.

    examples:
      admitscope sim azure-conv --limit 500 --cost h200-8b
      admitscope sim azure-conv --limit 500 --cost h200-8b --set chunked_prefill_size=512 --json
      admitscope sim mooncake --cost h200-8b --rate-scale 0.5 --journal sims
      admitscope sim journals/RUN.jsonl --concurrency 16 --plot pictures
    """

    trace: CliPositionalArg[str]
    """File, folder of a journal, or mooncake, azure-conv."""
    set: tuple[str, ...] = ()
    """A setting of the engine, as scheduler.chunked_prefill_size=256 or chunked_prefill_size=256; several times."""
    rate_scale: float = Field(1.0, gt=0, le=1e6)
    """Requests come this many times as fast as recorded."""
    rate: float | None = Field(None, gt=0, le=1e6)
    """Requests a second on average, with gaps by chance (Poisson, of --seed), instead of the recorded times."""
    concurrency: int | None = Field(None, ge=1, le=2**20)
    """Closed loop: so many clients, each sending its next request when the last one ended."""
    limit: int | None = Field(None, ge=1, le=_MOST)
    """Simulate the first so many requests only."""
    ask_for: int | None = Field(None, ge=1, le=2**24)
    """Tokens that each request of a trace asks for at most. Unset: as many as its answer has."""
    seed: int = Field(0, ge=0)
    """Of --rate and of the `random` order."""
    cost: str | None = None
    """Cost model: smollm2-cpu, h200-8b, or a file of --save-cost. Unset: a journal's own steps, else smollm2-cpu."""
    save_cost: Path | None = None
    """Write the cost model to this file too."""
    journal: Path | None = None
    """Folder to write a journal of the simulated run to; `explain`, `check`, `replay` and `export` read it."""
    plot: Path | None = None
    """Folder to draw queue.svg, ttft.svg and tbt.svg in; needs the extra `plot`."""
    check: bool = True
    """Judge every event by the laws of the engine (docs/reference/invariants.md)."""
    hash: bool = False
    """Hash all events also when no journal is written: equal hashes, equal runs."""
    json_output: bool = Field(False, alias="json")
    """Print one JSON object instead of a table."""
    progress_lines: bool = False
    """Print progress as lines on stderr, for programs."""

    @model_validator(mode="after")
    def _one_kind_of_arrivals(self) -> SimCommand:
        chosen_arrivals(self.rate_scale, self.rate, self.concurrency)
        return self


#: Of each value that a load can have: type, limits, and what it must be in words.
_LOADS: Final[dict[str, tuple[type[int] | type[float], float, float, str]]] = {
    "rate_scale": (float, 0.0, 1e6, "a number above 0, at most 1,000,000"),
    "rate": (float, 0.0, 1e6, "a number above 0, at most 1,000,000"),
    "concurrency": (int, 0, 2**20, "a whole number from 1 to 1,048,576"),
}


class SweepCommand(SubCommand):
    """Simulate a trace at several loads, one after the other: where do waits begin to grow?

    Exactly one of --rate-scale, --rate and --concurrency, with two values or more. Everything but the load is the same
    at each; requests, lengths and shared prefixes are those of TRACE, which is read as `sim` reads it.
    With --at-most it says up to which of these loads the limits are kept.
    Exit status 0 when all were simulated, 1 when a law of the engine broke, 2 for what cannot be read or is set so.

    examples:
      admitscope sweep azure-conv --limit 500 --cost h200-8b --rate 2,4,8,16 --at-most ttft_p99=1s
      admitscope sweep mooncake --limit 500 --cost h200-8b --rate-scale 0.1,0.2,0.4 --plot load.svg
      admitscope sweep journals/RUN.jsonl --concurrency 1,4,16,64 --json
    """

    trace: CliPositionalArg[str]
    """File, folder of a journal, or mooncake, azure-conv."""
    rate_scale: tuple[str, ...] = ()
    """Requests come this many times as fast as recorded; values with commas."""
    rate: tuple[str, ...] = ()
    """Requests a second on average, with gaps by chance (Poisson, of --seed); values with commas."""
    concurrency: tuple[str, ...] = ()
    """Closed loop: so many clients, each sending its next request when the last one ended; values with commas."""
    at_most: tuple[str, ...] = ()
    """A limit to keep, as ttft_p99=1s, or tbt_p99=2x of the lowest load; several times."""
    set: tuple[str, ...] = ()
    """A setting of the engine, as chunked_prefill_size=256; several times."""
    limit: int | None = Field(None, ge=1, le=_MOST)
    """The first so many requests only."""
    ask_for: int | None = Field(None, ge=1, le=2**24)
    """Tokens that each request of a trace asks for at most. Unset: as many as its answer has."""
    seed: int = Field(0, ge=0)
    """Of --rate and of the `random` order; the same at each load."""
    cost: str | None = None
    """Cost model: a preset or a file. Unset: a journal's own steps, else smollm2-cpu."""
    plot: Path | None = None
    """SVG file to draw TTFT, TBT and throughput over the load in; needs the extra `plot`."""
    check: bool = True
    """Judge every event by the laws of the engine."""
    json_output: bool = Field(False, alias="json")
    """Print one JSON object instead of a table."""
    progress_lines: bool = False
    """Print progress as lines on stderr, for programs."""

    @model_validator(mode="after")
    def _one_kind_of_loads(self) -> SweepCommand:
        named = [flag for flag in _LOADS if getattr(self, flag)]
        flags = [f"--{flag.replace('_', '-')}" for flag in named or _LOADS]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(flags)} contradict each other: each says when requests come")
        count = len(self.loads()) if named else 0
        if count < 2:
            raise ValueError(f"{' or '.join(flags)}: a sweep needs two values or more, as in {flags[0]} 1,2,4")
        if count > _MOST_LOADS:
            raise ValueError(f"{flags[0]}: {count} values are too many; at most {_MOST_LOADS}")
        return self

    @property
    def by(self) -> str:
        """What is swept: rate_scale, rate or concurrency."""
        return next(flag for flag in _LOADS if getattr(self, flag))

    def loads(self) -> list[float]:
        """The values, each once, lowest first. Raises ValueError for what is no load."""
        words = (word.strip() for text in getattr(self, self.by) for word in text.split(","))
        return sorted({_load(self.by, word) for word in words})

    def simulation(self, load: float | None = None) -> SimCommand:
        """The run at one of the loads; None: as recorded."""
        arrivals = {} if load is None else {self.by: load}
        return SimCommand(
            trace=self.trace,
            set=self.set,
            limit=self.limit,
            ask_for=self.ask_for,
            seed=self.seed,
            cost=self.cost,
            **arrivals,
        )


def _load(by: str, word: str) -> float:
    kind, least, most, words = _LOADS[by]
    try:
        value = kind(word)
    except ValueError:
        value = -1
    if not least < value <= most:  # not a number is neither
        raise ValueError(f"--{by.replace('_', '-')} {word or 'without a value'}: each load is {words}")
    return value


class WhatifCommand(SubCommand):
    """What would another configuration have done with a recorded run? Both are simulated and compared.

    Arrivals, lengths and shared prefixes are the journal's. The baseline is its own configuration under the same
    simulator, and how far that is from the recorded times is printed beside the answer.
    Exit status 0 when both were simulated, 1 when a law of the engine broke, 2 for what cannot be read or is set so.

    examples:
      admitscope whatif journals/RUN.jsonl --set chunked_prefill_size=256
      admitscope whatif journals --set schedule_policy=fcfs --set kv_accounting=exact --json
    """

    journal: CliPositionalArg[Path]
    """The first file of a journal, or the folder of a run."""
    set: tuple[str, ...] = ()
    """A setting to change, as scheduler.chunked_prefill_size=256 or chunked_prefill_size=256; several times."""
    limit: int | None = Field(None, ge=1, le=_MOST)
    """Compare the first so many requests only."""
    from_s: float | None = Field(None, ge=0)
    """Only requests that came from this second of the run on; the engine begins without those before."""
    to_s: float | None = Field(None, gt=0)
    """Only requests that came before this second of the run."""
    cost: str | None = None
    """Cost model: a preset or a file. Unset: fitted from the journal's own steps."""
    seed: int = Field(0, ge=0)
    """Of the resampling behind the intervals."""
    resamples: int = Field(500, ge=50, le=10_000)
    """How often the requests are drawn anew for the intervals."""
    write_journals: Path | None = None
    """Folder to write journals of both simulated runs to, in `before` and `after`."""
    memory_mib: int | None = Field(None, ge=256)
    """End with status 2 rather than use more memory than this. Unset: no limit of its own."""
    niceness: int = Field(0, ge=0, le=19)
    """Give way to other programs so much: for a simulation beside a running engine."""
    json_output: bool = Field(False, alias="json")
    """Print one JSON object instead of tables."""
    progress_lines: bool = False
    """Print progress as lines on stderr, for programs."""

    @model_validator(mode="after")
    def _changes_something(self) -> WhatifCommand:
        if not self.set:
            raise ValueError("nothing to compare: --set name=value says what would have been different")
        if self.from_s is not None and self.to_s is not None and self.to_s <= self.from_s:
            raise ValueError(f"to_s={self.to_s:g} is not after from_s={self.from_s:g}: no request comes between them")
        return self


class TuneCommand(SubCommand):
    """Search for a better configuration of a recorded run or a trace; every candidate is simulated.

    Says what to change, what it is expected to gain, and how sure that is; and which configurations cannot be bettered
    in TTFT p99, TBT p99 and throughput together. Needs the extra `tune`. The same seed gives the same answer, unless
    --timeout-s ends the search.
    Exit status 0 when the search was done, 1 when a law of the engine broke, 2 for what cannot be read or is set so.

    examples:
      admitscope tune journals/RUN.jsonl --objective ttft_p99
      admitscope tune journals/RUN.jsonl --objective ttft_p99 --at-most tbt_p99=200ms --plot front.svg
      admitscope tune mooncake --cost h200-8b --limit 500 --rate-scale 0.4 --trials 30
      admitscope tune journals --vary chunked_prefill_size=64,128,256 --vary schedule_policy --json
    """

    source: CliPositionalArg[str]
    """A journal, its folder, a trace, or mooncake, azure-conv; as `sim` takes them."""
    objective: str = "ttft_p99"
    """What to make better: ttft_p50, ttft_p90, ttft_p99, tbt_p50, tbt_p99, e2e_p50, e2e_p99, throughput."""
    at_most: tuple[str, ...] = ()
    """A limit that a recommendation keeps, as tbt_p99=200ms, or tbt_p99=1.1x of the baseline; several times."""
    vary: tuple[str, ...] = ()
    """A setting to vary, with values as name=A,B,C or without; several times. Unset: chunk, budgets, policy, ratio,
    mixed."""
    set: tuple[str, ...] = ()
    """A setting of the baseline and of every candidate, as num_pages=4096; several times."""
    trials: int = Field(40, ge=2, le=100_000)
    """Configurations to search, the baseline among them; then one for each change of the best, to see whether it can
    be left out."""
    timeout_s: float = Field(300.0, gt=0, le=604_800)
    """Seconds after which no further configuration is tried."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Of the search, of --rate and of the resampling behind intervals."""
    resamples: int = Field(500, ge=50, le=10_000)
    """How often the requests are drawn anew for the interval of the gain."""
    rate_scale: float = Field(1.0, gt=0, le=1e6)
    """Requests come this many times as fast as recorded."""
    rate: float | None = Field(None, gt=0, le=1e6)
    """Requests a second on average, with gaps by chance, instead of the recorded times."""
    concurrency: int | None = Field(None, ge=1, le=2**20)
    """Closed loop: so many clients, each sending its next request when the last one ended."""
    limit: int | None = Field(None, ge=1, le=_MOST)
    """The first so many requests only."""
    cost: str | None = None
    """Cost model: a preset or a file. Unset: a journal's own steps, else smollm2-cpu."""
    plot: Path | None = None
    """SVG file to draw all that was tried in; needs the extra `plot`."""
    json_output: bool = Field(False, alias="json")
    """Print one JSON object instead of tables."""
    progress_lines: bool = False
    """Print progress as lines on stderr, for programs."""

    def simulation(self) -> SimCommand:
        """The baseline as a simulation. Raises ValueError when arrivals are named twice."""
        return SimCommand(
            trace=self.source,
            set=self.set,
            rate_scale=self.rate_scale,
            rate=self.rate,
            concurrency=self.concurrency,
            limit=self.limit,
            seed=self.seed,
            cost=self.cost,
        )

    @model_validator(mode="after")
    def _one_kind_of_arrivals(self) -> TuneCommand:
        chosen_arrivals(self.rate_scale, self.rate, self.concurrency)
        return self
