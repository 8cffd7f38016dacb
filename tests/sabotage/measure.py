"""How soon faults are noticed. Owns: running each of them twice, and telling when its law could first have known.

A law can know of a fault once something that it looks at - events, snapshots, the sampled order, metrics' readings -
differs from the same run without the fault; both runs are deterministic, so the first difference says when. A law that
is about certain events, or allows a number of steps, begins to count at the first such event, and is given its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import pytest
from msgspec.structs import replace

from engine.events import AdmissionDecided, AnyEvent, StepPlanned
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.scheduler.decision import ADMITTED
from engine.scheduler.plan import StepKind
from invariants import InvariantChecker, Violation
from invariants.meter_books import Readings
from invariants.span_laws import SpanReading
from tests.sabotage.scenario import GAP_STEPS, PROGRESS_STEPS, Fault, run_with

#: What a checker is shown.
CHANNELS: Final = ("events", "state", "order", "meters", "lives", "spans")
#: What is compared, by law; every other law looks at events and snapshots.
LOOKS_AT: Final = {
    "INV-INDEX-01": ("order",),
    "INV-METER-01": ("meters",),
    "INV-METER-02": ("meters",),
    "INV-METER-03": ("meters",),
    "INV-TIME-02": ("lives",),
    "INV-SPAN-01": ("spans",),
    "INV-SPAN-02": ("spans",),
}
#: Steps that a law allows by its own words before it is broken.
ALLOWED_STEPS: Final = {"INV-PROG-01": PROGRESS_STEPS, "INV-REQ-01": GAP_STEPS, "INV-REQ-02": 2}


def _is_idle(event: AnyEvent) -> bool:
    return isinstance(event, StepPlanned) and event.kind is StepKind.IDLE and event.num_waiting > 0


def _admits(event: AnyEvent) -> bool:
    return isinstance(event, AdmissionDecided) and event.reason in ADMITTED and not event.is_continuation


#: The event from which on a law can be broken, where it is not the first that differs.
BEGINS_AT: Final[dict[str, Callable[[AnyEvent], bool]]] = {
    "INV-PROG-01": _is_idle,  # no work done
    "INV-REQ-03": _admits,  # somebody is let past
}

Digest = tuple[int, int]


class Witness(InvariantChecker):
    """A checker that also keeps what it was shown, as (step, digest), and whose audits may be left out."""

    def __init__(self, *, audits: bool) -> None:
        self.told: list[Violation] = []
        super().__init__(
            on_violation="record", progress_steps=PROGRESS_STEPS, gap_steps=GAP_STEPS, listener=self.told.append
        )
        self._audits = audits
        self.heard: list[AnyEvent] = []
        #: Channel → (step, digest) of everything that was shown on it.
        self.shown: dict[str, list[Digest]] = {name: [] for name in CHANNELS}

    def emit(self, event: AnyEvent) -> None:
        self.heard.append(event)
        self.shown["events"].append((event.step, hash(msgspec.json.encode(event))))
        super().emit(event)

    def audit(self, snapshot: SchedulerSnapshot) -> bool:
        state = replace(snapshot, order=None)
        self.shown["state"].append((snapshot.step, hash(msgspec.json.encode(state))))
        self.shown["order"].append((snapshot.step, hash(msgspec.json.encode(snapshot.order))))
        return self._audits and super().audit(snapshot)

    def audit_readings(self, readings: Readings) -> bool:
        step = self.shown["state"][-1][0]
        self.shown["lives"].append((step, hash(repr(readings.lives))))
        self.shown["meters"].append((step, hash(repr((readings.counters, readings.gauges, readings.observations)))))
        return self._audits and super().audit_readings(readings)

    def audit_spans(self, reading: SpanReading) -> bool:
        drafts = (sorted(reading.drafts), sorted(reading.awaiting))
        digest = hash(repr((drafts, reading._replace(drafts=frozenset(), awaiting=frozenset()))))
        self.shown["spans"].append((self.shown["state"][-1][0], digest))
        return self._audits and super().audit_spans(reading)

    def first_step(self, law: str | None = None) -> int | None:
        """Step of the first violation, of `law` or of any; None: there was none."""
        return next((one.step for one in self.told if law in (None, one.id)), None)


@dataclass(frozen=True, slots=True)
class Caught:
    """What became of one fault.

    kind     engine: one of its methods broken. events: a lie in a true stream. metrics, spans: a listener that is wrong
    checkable  step at which its law could first know
    laws     laws that noticed, first ones first, with audits after every step
    lag      steps from `checkable` to its own law's first violation; None: it did not notice
    alone, alone_laws  the same by tier 1 alone, without any audit
    """

    fault: Fault
    kind: str
    checkable: int
    laws: tuple[str, ...]
    lag: int | None
    alone_laws: tuple[str, ...]
    alone: int | None
    internal_error: str | None


def kind_of(fault: Fault) -> str:
    """Where the fault is put in."""
    for kind in ("engine", "metrics", "spans"):
        if getattr(fault, kind) is not None:
            return kind
    return "events"


def _run(fault: Fault, *, audits: bool) -> Witness:
    witness = Witness(audits=audits)
    with pytest.MonkeyPatch.context() as patch:
        run_with(fault, witness, patch)
    return witness


def _first_difference(sound: list[Digest], broken: list[Digest]) -> int | None:
    """Step of the first entry that differs; None when one list is where the other begins and nothing else."""
    for left, right in zip(sound, broken, strict=False):
        if left != right:
            return min(left[0], right[0])
    if len(broken) == len(sound) or not broken:
        return None
    return (broken[len(sound)] if len(broken) > len(sound) else sound[len(broken)])[0]


class _NoPatch(pytest.MonkeyPatch):
    """Lets the function of a fault prepare its run, and break nothing."""

    def setattr(self, *_args: object, **_kwargs: object) -> None:
        """Leave everything as it is."""


class Measure:
    """Measures faults; runs without a fault are shared as far as they are the same."""

    def __init__(self) -> None:
        self._sound: dict[str, Witness] = {}

    def sound(self, fault: Fault) -> Witness:
        """The same run without the fault. Raises AssertionError when laws break in it all the same."""
        engine = fault.engine
        key = repr(sorted(fault.settings.items())) + (fault.name if engine is not None else "")
        if key not in self._sound:
            prepare = None if engine is None else lambda run, _patch: engine(run, _NoPatch())
            witness = _run(Fault(fault.law, "none", engine=prepare, settings=fault.settings), audits=True)
            assert not witness.told, f"{fault.name}: its preparation breaks {witness.told[0]}"
            self._sound[key] = witness
        return self._sound[key]

    def of(self, fault: Fault) -> Caught:
        """Run `fault` with audits after every step, and again without any."""
        sound, broken, alone = self.sound(fault), _run(fault, audits=True), _run(fault, audits=False)
        channels = LOOKS_AT.get(fault.law, ("events", "state"))
        steps = [_first_difference(sound.shown[name], broken.shown[name]) for name in channels]
        checkable = min((step for step in steps if step is not None), default=0)
        begins = BEGINS_AT.get(fault.law)
        if begins is not None:
            checkable = next((e.step for e in broken.heard if e.step >= checkable and begins(e)), checkable)
        checkable += ALLOWED_STEPS.get(fault.law, 0)
        return Caught(
            fault=fault,
            kind=kind_of(fault),
            checkable=checkable,
            laws=tuple(dict.fromkeys(one.id for one in broken.told)),
            lag=_lag(checkable, broken.first_step(fault.law)),
            alone_laws=tuple(dict.fromkeys(one.id for one in alone.told)),
            alone=_lag(checkable, alone.first_step(fault.law)),
            internal_error=broken.last_internal_error or alone.last_internal_error,
        )


def _lag(checkable: int, found: int | None) -> int | None:
    return None if found is None else max(found - checkable, 0)
