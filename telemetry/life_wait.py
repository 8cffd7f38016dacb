"""One stay in the queue. Owns: counting what kept a request waiting, pass by pass.

Where the journal folded repeated refusals, which passes they fell into is known once the fold is read; until then a
pass in which the request was not seen is set aside.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal

from engine.request import Cause
from engine.scheduler.decision import Reason
from telemetry.life_facts import NoPass, NotReached, Refusals, SliceShare, Wait
from telemetry.schema_journal import RefusalsFoldedRecord
from telemetry.schema_parts import PassEndPart, PrefillPart

#: Ends of a pass that say: the prefill budget of this step was given to others.
_BUDGET_SPENT: Final = frozenset(
    {Reason.CHUNK_EXHAUSTED, Reason.CHUNK_BELOW_PAGE, Reason.CHUNK_SLOT_TAKEN, Reason.COMPUTE_EXHAUSTED}
)


@dataclass(slots=True)
class Tally:
    """One cause of waiting, counted."""

    count: int
    first_step: int
    last_step: int
    need: float | None = None
    have: float | None = None

    def add(self, count: int, first: int, last: int) -> None:
        """`count` more, between two steps."""
        self.count += count
        self.first_step = min(self.first_step, first)
        self.last_step = max(self.last_step, last)


@dataclass(slots=True)
class Waiting:
    """One stay in the queue, being counted. `place` is its place in arrival order."""

    from_ns: int
    from_step: int
    after: Cause
    ahead: int
    running: int
    place: int
    passes: int = 0
    refusals: dict[Reason, Tally] = field(default_factory=dict)
    not_reached: dict[tuple[Reason, str | None], Tally] = field(default_factory=dict)
    no_pass: dict[tuple[Reason, str | None], Tally] = field(default_factory=dict)
    full_causes: dict[str, tuple[Reason, Tally]] = field(default_factory=dict)
    #: Passes in which it was not seen: examined and folded, or not reached.
    unseen: list[tuple[int, PassEndPart]] = field(default_factory=list)
    ahead_admitted: int = 0
    overtaken_by: list[str] = field(default_factory=list)
    overtaken_passes: int = 0
    overtaken_under: dict[str, None] = field(default_factory=dict)
    #: Later comers of the pass whose plan is still to come: if that takes this one too, they did not overtake it.
    later: list[str] = field(default_factory=list)
    slices: Counter[str] = field(default_factory=Counter)

    def passed(
        self,
        step: int,
        end: PassEndPart,
        full_by: tuple[str, Reason, Tally] | None,
        prefills: tuple[PrefillPart, ...] = (),
    ) -> None:
        """A step was planned while it waited; `full_by` is the refusal that marked the batch full."""
        if end.stopped_by in _BUDGET_SPENT:
            for row in prefills:
                self.slices[row.rid] += row.extend_len
        if end.stop != "skipped":
            self.passes += 1
            if all(tally.last_step != step for tally in self.refusals.values()):
                self.unseen.append((step, end))
            return
        cause = full_by[0] if full_by is not None and end.stopped_by is Reason.FULL_FLAG_SET else None
        tally = self.no_pass.setdefault((end.stopped_by, cause), Tally(0, step, step))
        tally.add(1, step, step)
        if cause is not None and full_by is not None:
            self.full_causes[cause] = full_by[1:]

    def overtaken(self, policy: str | None) -> None:
        """A pass computed prompt of a later comer, and left this one waiting."""
        self.overtaken_passes += 1
        self.overtaken_by += self.later
        if policy is not None:
            self.overtaken_under[policy] = None

    def refused(
        self, reason: Reason, count: int, first: int, last: int, test: tuple[float | None, float | None]
    ) -> None:
        """`count` refusals between two steps; `test` is need and have of the last."""
        tally = self.refusals.setdefault(reason, Tally(0, first, last))
        tally.add(count, first, last)
        if test != (None, None):
            tally.need, tally.have = test

    def folded(self, line: RefusalsFoldedRecord) -> None:
        """`line.count` of the passes set aside were refusals: those that ended at it, then the others."""
        self.refused(line.reason, line.count, line.first_step, line.last_step, (line.need, line.have))
        inside = [entry for entry in self.unseen if line.first_step <= entry[0] <= line.last_step]
        inside.sort(key=lambda entry: entry[1].rid != line.rid)
        known = {step for step, _ in inside[: line.count]}
        self.unseen = [entry for entry in self.unseen if entry[0] not in known]

    def settle(self, rid: str) -> None:
        """No fold is open: what is still set aside did not reach it, or (in a cut record) ended at it."""
        for step, end in self.unseen:
            if end.rid == rid:
                self.refused(end.stopped_by, 1, step, step, (None, None))
            else:
                tally = self.not_reached.setdefault((end.stopped_by, end.rid), Tally(0, step, step))
                tally.add(1, step, step)
        self.unseen.clear()


def refusals(reason: Reason, tally: Tally) -> Refusals:
    """The tally as a fact."""
    return Refusals(
        reason=reason,
        count=tally.count,
        first_step=tally.first_step,
        last_step=tally.last_step,
        need=tally.need,
        have=tally.have,
    )


def wait_fact(wait: Waiting, to_ns: int, to_step: int, end: Literal["admitted", "ended", "waiting"]) -> Wait:
    """The stay as a fact. Call `settle` first."""
    no_pass = []
    for (reason, rid), tally in wait.no_pass.items():
        cause = wait.full_causes.get(rid) if rid is not None else None
        no_pass.append(
            NoPass(
                reason=reason,
                count=tally.count,
                first_step=tally.first_step,
                last_step=tally.last_step,
                set_by=refusals(*cause) if cause is not None else None,
                set_by_rid=rid,
            )
        )
    return Wait(
        from_ns=wait.from_ns,
        to_ns=to_ns,
        from_step=wait.from_step,
        to_step=to_step,
        after=wait.after,
        ahead=wait.ahead,
        running=wait.running,
        passes=wait.passes,
        refusals=tuple(refusals(reason, tally) for reason, tally in wait.refusals.items()),
        not_reached=tuple(
            NotReached(
                reason=reason, rid=rid, count=tally.count, first_step=tally.first_step, last_step=tally.last_step
            )
            for (reason, rid), tally in wait.not_reached.items()
        ),
        no_pass=tuple(no_pass),
        ahead_admitted=wait.ahead_admitted,
        overtaken_by=tuple(wait.overtaken_by),
        overtaken_passes=wait.overtaken_passes,
        overtaken_under=tuple(wait.overtaken_under),
        slices_taken=tuple(SliceShare(rid=rid, tokens=tokens) for rid, tokens in wait.slices.most_common()),
        end=end,
    )
