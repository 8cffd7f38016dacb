"""From the symptom to the cause. Owns: playing an incident and its cure, and writing each stage of the diagnosis."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from bench.incidents import record
from bench.incidents.cases import Incident
from bench.incidents.numbers import Numbers
from bench.incidents.receiver import Receiver
from bench.incidents.world import Client, Run, World, said
from engine.config import EngineConfig
from telemetry.explain import Explanation, explain
from telemetry.observe import QueueAnswer

_WIDTH: Final = 118
_MOST_PIECES: Final = 4
_PIECE: Final = re.compile(r"Step \d+: chunk \d+, ")
#: The time in front of a sentence of a journal's story.
_STAMP: Final = re.compile(r" *\+[\d.]+ (?:s|ms|µs) +")

STAGES: Final = ("metrics", "trace", "record", "explain", "cure")


@dataclass
class Diagnosis:
    """One incident, told.

    stages   name -> lines, in the order of STAGES
    table    measure -> (before, after), as numbers
    life     what the journal knows of the request that was followed
    """

    incident: Incident
    before: Run
    after: Run
    rid: str
    life: Explanation
    kept: str
    worst_gap_cause: str
    stages: Mapping[str, Sequence[str]]
    table: Mapping[str, tuple[float, float]]

    def text(self) -> str:
        """All stages, for a terminal."""
        parts = [f"== {self.incident.title} =="]
        for stage in STAGES:
            parts += ["", f"-- {stage} --", *self.stages[stage]]
        return "\n".join(parts)


def diagnose(incident: Incident, folder: Path, *, share: float = 1.0) -> Diagnosis:
    """Play it, follow one request through every tool, play it again with the cure.

    share  of the load's length; below 1 for a quick look
    """
    load = incident.load(share)
    picks: dict[str, Callable[[QueueAnswer], str | None]] = {"waiting": _oldest, "retracted": _pushed_back}
    pick = picks.get(incident.subject)
    look_s = incident.look_s * share
    with Receiver() as receiver:
        world = World(incident.flags, folder / "before", receiver.url)
        before = world.play(load, look_s=look_s if pick else None, pick=pick or _oldest)
    with Receiver() as unheard:
        after = World({**incident.flags, **incident.cure}, folder / "after", unheard.url).play(load)
    rid = before.looked or _worst_gap(receiver)
    life = explain(before.journal, rid)
    root = receiver.roots().get(rid)
    gaps = [span.attributes.get("worst_gap_cause", "") for span in receiver.of(rid) if span.name == "engine.decode"]
    table = _table(before, after)
    stages = {
        "metrics": _columns(incident.readings(Numbers(before.scrapes), look_s)),
        "trace": receiver.tree(rid),
        "record": _record(incident, before, life),
        "explain": _explained(before, rid),
        "cure": _cured(incident, table),
    }
    kept = str(root.attributes.get("admitscope.kept_because")) if root is not None else ""
    return Diagnosis(incident, before, after, rid, life, kept, " ".join(gaps), stages, table)


def _oldest(queue: QueueAnswer) -> str | None:
    return max(queue.entries, key=lambda entry: entry.age_s).rid if queue.entries else None


def _pushed_back(queue: QueueAnswer) -> str | None:
    """Of those that were pushed back, the one that waits longest now."""
    pushed = [entry for entry in queue.entries if entry.state == "retracted"]
    return max(pushed, key=lambda entry: (entry.num_retractions, entry.age_s)).rid if pushed else None


def _worst_gap(receiver: Receiver) -> str:
    worst = max(
        (span for span in receiver.spans if span.name == "engine.decode"),
        key=lambda span: (span.attributes.get("worst_gap_ms", 0.0), -span.start_ns),
    )
    return next(rid for rid, root in receiver.roots().items() if root.trace_id == worst.trace_id)


def _columns(readings: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in readings)
    return [f"{name:<{width}}  {value}" for name, value in readings]


def _record(incident: Incident, run: Run, explanation: Explanation) -> list[str]:
    """The pass that holds the answer: the last full one before the look, the retraction, or the late token's step."""
    life, found, admitted = explanation.life, None, None
    capacity = Numbers(run.scrapes).most("kv_pages_capacity")
    until = life.worst_gap.step if incident.subject == "gap" and life.worst_gap is not None else run.look_step
    for each in record.passes(run.journal):
        if each.planned.step > until:
            break
        if incident.subject == "retracted":
            if any(victim.rid == life.rid for victim in each.planned.retractions):
                found = each
            if any(decision.rid == life.rid for decision in each.decisions) and found is None:
                admitted = each
        elif each.decisions:
            found = each
    assert found is not None, f"{incident.name}: no pass decided anything up to step {until}"
    lines = record.words(admitted, round(capacity)) if admitted is not None else []
    return [*lines, *([""] if lines else []), *record.words(found, round(capacity))]


def _explained(run: Run, rid: str) -> list[str]:
    """What the command line says, live and of the journal; many pieces of one prompt are cut to the first and last."""
    lines = [f"$ admitscope explain URL {rid}        # while it waited", *_wrapped(run.live), ""] if run.live else []
    told = said("explain", str(run.journal), rid).splitlines()
    pieces = [number for number, line in enumerate(told) if _PIECE.search(line)]
    if len(pieces) > _MOST_PIECES:
        told[pieces[1] : pieces[-1]] = [f"… {len(pieces) - 2} more chunks"]
    return [*lines, f"$ admitscope explain JOURNAL {rid}    # afterwards", *_wrapped("\n".join(told))]


def _wrapped(text: str) -> list[str]:
    """Lines of at most `_WIDTH`, what follows set in below the words of the first."""
    lines = []
    for line in text.splitlines():
        stamp = _STAMP.match(line)
        indent = " " * (stamp.end() if stamp else 2)
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent=indent, drop_whitespace=True) or [""]
    return lines


# -- before and after ----------------------------------------------------------------------------------------------


def _table(before: Run, after: Run) -> dict[str, tuple[float, float]]:
    rows: dict[str, tuple[float, float]] = {}
    for kind in dict.fromkeys(client.kind for client in before.clients.values()):
        for q in (0.5, 0.99):
            pair = [
                _quantile([c.ttft_ns or 0 for c in run.clients.values() if c.kind == kind], q)
                for run in (before, after)
            ]
            rows[f"{kind} TTFT p{q * 100:.0f}, ms"] = (pair[0], pair[1])
    measures: list[tuple[str, Callable[[Run], float]]] = [
        ("TBT p50, ms", lambda run: _quantile(_gaps(run), 0.5)),
        ("TBT p99, ms", lambda run: _quantile(_gaps(run), 0.99)),
        (
            "longest gap of a request, median, ms",
            lambda run: _quantile([max(_of(c)) for c in run.clients.values()], 0.5),
        ),
        ("retractions", lambda run: Numbers(run.scrapes).increase("retractions_total")),
        ("prompt tokens computed", lambda run: Numbers(run.scrapes).increase("selected_tokens_total", kind="computed")),
        ("most waiting", _most_waiting),
        ("pool in use at most, %", lambda run: 100 * (1 - min(share for _, share in Numbers(run.scrapes).to_be_had()))),
        ("all answered after, s", lambda run: run.ended_s),
    ]
    rows.update({name: (measure(before), measure(after)) for name, measure in measures})
    return rows


def _of(client: Client) -> list[int]:
    return [later - earlier for earlier, later in zip(client.token_ns, client.token_ns[1:], strict=False)] or [0]


def _gaps(run: Run) -> list[int]:
    return [gap for client in run.clients.values() for gap in _of(client)]


def _quantile(values_ns: Sequence[int], q: float) -> float:
    """In milliseconds; a value that occurred."""
    return float(np.quantile(np.array(values_ns), q, method="inverted_cdf")) / 1e6


def _most_waiting(run: Run) -> float:
    numbers = Numbers(run.scrapes)
    waiting, back = numbers.series("requests", state="waiting"), numbers.series("requests", state="retracted")
    return max(value + more for (_, value), (_, more) in zip(waiting, back, strict=True))


def _cured(incident: Incident, table: Mapping[str, tuple[float, float]]) -> list[str]:
    was = {flag: incident.flags.get(flag) or f"{_default(flag)}, the default" for flag in incident.cure}
    lines = [f"--{flag} {value}    (was: {was[flag]})" for flag, value in incident.cure.items()]
    width = max(map(len, table))
    lines += ["", f"{'':<{width}}  {'before':>10}  {'after':>10}"]
    for name, (old, new) in table.items():
        lines.append(f"{name:<{width}}  {_figure(old):>10}  {_figure(new):>10}")
    return lines


def _default(flag: str) -> str:
    """Of a flag such as `scheduler.clip-max-new-tokens`."""
    part, _, name = flag.partition(".")
    value = EngineConfig().model_dump()[part][name.replace("-", "_")]
    return "none" if value is None else str(value)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.1f}"
