"""Report of a replay. Owns: what a replay found, as a value and as text."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict

from telemetry.journal_gaps import Gap
from telemetry.journal_reader import Line


class FieldDifference(BaseModel):
    """One field that differs; None stands for null, and for a field that one side does not have."""

    model_config = ConfigDict(frozen=True)

    field: str
    recorded: Any
    replayed: Any


class RequestThen(BaseModel):
    """The request that a divergence is about, as the replay has it. Lengths in tokens."""

    model_config = ConfigDict(frozen=True)

    rid: str
    state: str
    prompt_len: int
    output_len: int
    computed_len: int
    num_retractions: int
    times_passed_over: int


class Surroundings(BaseModel):
    """The replay's scheduler at the moment of a divergence: up to there it is the recorded one.

    waiting, running  how many; `first_waiting` and `first_running` name the first of them
    pages             free, private, protected and evictable pages
    request           None when the divergence is about none, or about one that the replay does not have
    agreed            the last lines that were still equal, oldest first
    """

    model_config = ConfigDict(frozen=True)

    step: int
    waiting: int
    first_waiting: tuple[str, ...]
    running: int
    first_running: tuple[str, ...]
    continuation: str | None
    pages: dict[str, int]
    new_token_ratio: float
    batch_is_full: bool
    request: RequestThen | None
    agreed: tuple[str, ...]


class Divergence(BaseModel):
    """The first place where the replay leaves the record.

    where     file:line of the journal
    why       one sentence
    recorded  the journal's line; empty when it has none
    replayed  the replay's line; empty when it has none
    around    the state in which it happened
    """

    model_config = ConfigDict(frozen=True)

    where: str
    seq: int | None
    step: int | None
    why: str
    recorded: str = ""
    replayed: str = ""
    fields: tuple[FieldDifference, ...] = ()
    around: Surroundings | None = None


class ReplayReport(BaseModel):
    """What a replay found.

    verdict      identical: everything that was recorded came out again, to the end or to the tear.
                 incomplete: identical up to where the journal lacks events. diverged: see `divergence`.
    events       core events that came out identical; `hash` covers exactly these
    checkpoints  recorded hashes that agreed
    responses    records of answers sent: the HTTP layer's, which no replay makes
    unchecked    recorded events after the last input (a step cut off in the middle): nothing to compare them with
    open_end     why the journal has no clean end, where its last line is whole: events may be missing behind it
    gap          events that the middle of the journal lacks without a line that says so. Unless it diverged in front of
                 them, everything up to there came out again, and nothing behind them was replayed
    """

    model_config = ConfigDict(frozen=True)

    verdict: Literal["identical", "incomplete", "diverged"]
    events: int
    steps: int
    hash: str
    checkpoints: int
    responses: int = 0
    unchecked: int = 0
    torn: str | None = None
    open_end: str | None = None
    note: str = ""
    gap: Gap | None = None
    divergence: Divergence | None = None

    @property
    def exit_code(self) -> int:
        """0 identical, 1 diverged, 2 incomplete."""
        return {"identical": 0, "diverged": 1, "incomplete": 2}[self.verdict]


def difference(line: Line, replayed: bytes, why: str) -> Divergence:
    """Two lines where one should be: every field that differs. `replayed` empty: the replay made nothing."""
    recorded = line.raw.decode(errors="replace")  # an altered line may hold anything
    left = json.loads(recorded)
    right = msgspec.json.decode(replayed) if replayed else {}
    names = dict.fromkeys([*left, *right])
    fields = tuple(
        FieldDifference(field=name, recorded=left.get(name), replayed=right.get(name))
        for name in names
        if left.get(name) != right.get(name)
    )
    return Divergence(
        where=str(line),
        seq=left.get("seq"),
        step=left.get("step", left.get("last_step")),
        why=why,
        recorded=recorded,
        replayed=replayed.decode(),
        fields=fields if replayed else (),
    )


def render(report: ReplayReport) -> str:
    """The report for a terminal."""
    out = []
    if report.gap is not None:
        out.append(report.gap.judged_text() if report.divergence is None else report.gap.text())
    if report.divergence is None:
        out.append(
            f"{report.verdict}, {report.events:,} events, {report.steps:,} steps, hash {report.hash} "
            f"({report.checkpoints} recorded {'checkpoint agrees' if report.checkpoints == 1 else 'checkpoints agree'})"
        )
    else:
        out += _render_divergence(report.divergence, report)
    if report.responses:
        are = "record of an answer sent, which is" if report.responses == 1 else "records of answers sent, which are"
        out.append(f"beside these, {report.responses:,} {are} not the scheduler's")
    if report.note:
        out.append(f"not replayed further: {report.note}")
    if report.torn:
        out.append(f"the journal ends early: {report.torn}")
    if report.open_end:
        out.append(f"the journal has no clean end: {report.open_end}")
    if report.unchecked:
        out.append(f"{report.unchecked} events of a step that was cut off have nothing to be compared with")
    return "\n".join(out)


def _render_divergence(divergence: Divergence, report: ReplayReport) -> list[str]:
    place = f"{divergence.where} (step {divergence.step}, seq {divergence.seq})"
    out = [f"diverged at {place} after {report.events:,} identical events", divergence.why]
    if divergence.fields:
        width = max(len(difference.field) for difference in divergence.fields)
        out += [f"  {d.field:<{width}}  recorded {d.recorded!r}  replayed {d.replayed!r}" for d in divergence.fields]
    if divergence.recorded:
        out.append(f"recorded: {divergence.recorded}")
    if divergence.replayed:
        out.append(f"replayed: {divergence.replayed}")
    if divergence.around is not None:
        out += _render_surroundings(divergence.around)
    return out


def _render_surroundings(around: Surroundings) -> list[str]:
    pages = ", ".join(f"{count} {name}" for name, count in around.pages.items())
    out = [
        f"the scheduler then, in step {around.step}:",
        f"  waiting {_some(around.waiting, around.first_waiting)}",
        f"  running {_some(around.running, around.first_running)}",
        f"  continuation {around.continuation or 'none'}; new_token_ratio {around.new_token_ratio:.4g}; "
        + ("batch is full" if around.batch_is_full else "batch is not full"),
        f"  pages: {pages}",
    ]
    if around.request is not None:
        it = around.request
        out.append(
            f"  {it.rid} is {it.state}: prompt {it.prompt_len}, output {it.output_len}, computed {it.computed_len} "
            f"tokens; retracted {it.num_retractions} times, passed over {it.times_passed_over} times"
        )
    if around.agreed:
        out.append("the last lines that agree:")
        out += [f"  {line}" for line in around.agreed]
    return out


def _some(count: int, first: tuple[str, ...]) -> str:
    if not count:
        return "0"
    return f"{count} ({', '.join(first)}{', …' if count > len(first) else ''})"
