"""One stay in the queue. Owns: counting what kept a request waiting, pass by pass.

Where the journal folded repeated refusals, which passes they fell into is known once the fold is read; until then a
pass in which the request was not seen is set aside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from engine.request import Cause
from engine.scheduler.decision import Reason
from telemetry.life_facts import HeldShare, NoPass, NotReached, Refusals, SliceShare, Wait
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
    first_ns: int | None = None

    def add(self, count: int, first: int, last: int) -> None:
        """`count` more, between two steps."""
        self.count += count
        self.first_step = min(self.first_step, first)
        self.last_step = max(self.last_step, last)


@dataclass(slots=True)
class Waiting:
    """One stay of `rid` in the queue, being counted. `place` is its place in arrival order."""

    rid: str
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
    #: By step: when it was planned, and what held this request in it: (reason, whether it was refused itself).
    planned_ns: dict[int, int] = field(default_factory=dict)
    held: dict[int, tuple[Reason, bool]] = field(default_factory=dict)
    #: The same of steps that only repeat an earlier pass: who was refused itself then still is, by what it was.
    repeated: dict[int, tuple[Reason, bool]] = field(default_factory=dict)
    overtaken_ns: int | None = None
    slices_ns: int | None = None

    def passed(
        self,
        step: int,
        end: PassEndPart,
        full_by: tuple[str, Reason, Tally] | None,
        prefills: tuple[PrefillPart, ...] = (),
        *,
        t_ns: int,
        is_stopper: bool,
    ) -> None:
        """A step was planned at `t_ns` while it waited; `full_by` is the refusal that marked the batch full.

        is_stopper  it is the one at which the step ended, or made no pass: nobody's earlier refusal stands for that
        """
        self.planned_ns[step] = t_ns
        if end.stopped_by in _BUDGET_SPENT:
            self.slices_ns = t_ns if self.slices_ns is None else self.slices_ns
            for row in prefills:
                self.slices[row.rid] += row.extend_len
        if end.stopped_by is Reason.FULL_FLAG_SET:
            # Of a mark that outlived its refusal, the mark itself is what holds the head.
            ahead = full_by[1] if full_by is not None else end.stopped_by
            self.repeated[step] = (end.stopped_by, True) if is_stopper else (ahead, False)
        if end.stop != "skipped":
            self.passes += 1
            if all(tally.last_step != step for tally in self.refusals.values()):
                self.unseen.append((step, end))
            return
        cause = full_by[0] if full_by is not None and end.stopped_by is Reason.FULL_FLAG_SET else None
        tally = self.no_pass.setdefault((end.stopped_by, cause), Tally(0, step, step))
        tally.add(1, step, step)
        if step not in self.repeated:
            self.held[step] = (end.stopped_by, is_stopper)
        if cause is not None and full_by is not None:
            self.full_causes[cause] = full_by[1:]

    def overtaken(self, policy: str | None, t_ns: int) -> None:
        """A pass computed prompt of a later comer, and left this one waiting."""
        self.overtaken_passes += 1
        self.overtaken_ns = t_ns if self.overtaken_ns is None else self.overtaken_ns
        self.overtaken_by += self.later
        if policy is not None:
            self.overtaken_under[policy] = None

    def refused(
        self, reason: Reason, count: int, first: int, last: int, test: tuple[float | None, float | None]
    ) -> None:
        """`count` refusals between two steps, none of them counted yet; `test` is need and have of the last."""
        if count == 1:
            self.held[last] = (reason, True)
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
        self.held |= dict.fromkeys(known, (line.reason, True))
        self.unseen = [entry for entry in self.unseen if entry[0] not in known]

    def settle(self) -> None:
        """No fold is open: what is still set aside did not reach it, or (in a cut record) ended at it."""
        for step, end in self.unseen:
            if end.rid == self.rid:
                self.refused(end.stopped_by, 1, step, step, (None, None))
            else:
                tally = self.not_reached.setdefault((end.stopped_by, end.rid), Tally(0, step, step))
                tally.add(1, step, step)
                if step not in self.repeated:
                    self.held[step] = (end.stopped_by, False)
        self.unseen.clear()

    def shares(self, to_ns: int) -> tuple[HeldShare, ...]:
        """The stay up to `to_ns` by what held it, longest first."""
        spent: Counter[tuple[Reason | None, bool]] = Counter()
        at_ns = self.from_ns
        by: tuple[Reason | None, bool] = (None, False)
        for step, t_ns in self.planned_ns.items():
            spent[by] += t_ns - at_ns
            at_ns, by = t_ns, self.held.get(step) or self._repeated(step, by)
        spent[by] += to_ns - at_ns
        return tuple(HeldShare(reason=by[0], is_own=by[1], ns=ns) for by, ns in spent.most_common() if ns > 0)

    def _repeated(self, step: int, by: tuple[Reason | None, bool]) -> tuple[Reason | None, bool]:
        """What holds it in a step that did not find anything itself, held by `by` before."""
        return by if by[1] else self.repeated.get(step, by)


class Stoppers:
    """Who is held by a refusal of its own, as `QueueWatch` has it: whom the last pass refused or ended at, or, where
    none was made, the head of the queue. What only repeats a pass leaves them, as long as one of them waits.
    """

    def __init__(self) -> None:
        self._held: set[str] = set()
        self._refused: set[str] = set()

    def refused(self, rid: str) -> None:
        """The pass whose plan is still to come refused `rid`."""
        self._refused.add(rid)

    def left(self, rid: str) -> None:
        """It does not wait any more, or anew."""
        self._held.discard(rid)
        self._refused.discard(rid)

    def planned(self, end: PassEndPart, at: str | None) -> str | None:
        """A step was planned, and ended at `at`. Returns that one; None where an earlier end still stands."""
        refused, self._refused = self._refused, set()
        if end.stopped_by is Reason.FULL_FLAG_SET and (refused or self._held):
            self._held |= refused
            return None
        self._held = refused if at is None or end.stopped_by is Reason.QUEUE_END else refused | {at}
        return at


def refusals(reason: Reason, tally: Tally, planned_ns: Mapping[int, int] | None = None) -> Refusals:
    """The tally as a fact. `planned_ns`: when each step was planned, where the tally does not know."""
    first_ns = tally.first_ns if planned_ns is None else planned_ns.get(tally.first_step)
    return Refusals(
        reason=reason,
        count=tally.count,
        first_step=tally.first_step,
        last_step=tally.last_step,
        need=tally.need,
        have=tally.have,
        first_ns=first_ns,
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
                first_ns=wait.planned_ns.get(tally.first_step),
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
        refusals=tuple(refusals(reason, tally, wait.planned_ns) for reason, tally in wait.refusals.items()),
        not_reached=tuple(
            NotReached(
                reason=reason,
                rid=rid,
                count=tally.count,
                first_step=tally.first_step,
                last_step=tally.last_step,
                first_ns=wait.planned_ns.get(tally.first_step),
            )
            for (reason, rid), tally in wait.not_reached.items()
        ),
        no_pass=tuple(no_pass),
        ahead_admitted=wait.ahead_admitted,
        overtaken_by=tuple(wait.overtaken_by),
        overtaken_passes=wait.overtaken_passes,
        overtaken_under=tuple(wait.overtaken_under),
        slices_taken=tuple(SliceShare(rid=rid, tokens=tokens) for rid, tokens in wait.slices.most_common()),
        overtaken_ns=wait.overtaken_ns,
        slices_ns=wait.slices_ns,
        held=wait.shares(to_ns),
        end=end,
    )
