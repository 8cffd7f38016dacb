"""Who got a token. Owns: the names of a step's rows, and how they differ from those of the step before.

Several listeners of one engine ask this of the same steps, one listener after the other, and with the same answer to
the step before. So the latest answers are kept: each depends on what it was asked for and on nothing else.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from engine.events import StepPlanned
from engine.scheduler.plan import OutcomeRow

#: As many newcomers are put in order one by one; more by a walk over all rows.
_FEW: Final = 4
#: Answers kept: more than the steps that one listener is handed before the next listener is (`shared_sink.BATCH`).
_KEPT: Final = 20


class RowChange(NamedTuple):
    """From the rows of one step to those of the next.

    rids   of all rows, in order
    came   those that the step before did not have, in order
    gone   those that only the step before had, in any order
    """

    rids: tuple[str, ...]
    came: tuple[str, ...]
    gone: tuple[str, ...]


class _Answer(NamedTuple):
    before: tuple[str, ...]
    rows: tuple[OutcomeRow, ...]
    change: RowChange
    members: frozenset[str]


#: The latest first. One thread reads them while another sets them: both see whole answers, theirs or not.
_latest: tuple[_Answer, ...] = (_Answer((), (), RowChange((), (), ()), frozenset()),)


def change_of(before: tuple[str, ...], rows: tuple[OutcomeRow, ...]) -> RowChange:
    """What changed from the step whose rows were `before`, in the words of an earlier answer."""
    global _latest  # noqa: PLW0603 - a pure function remembers its last answers
    answers = _latest
    for answer in answers:
        if rows is answer.rows and before is answer.before:
            return answer.change
    latest = answers[0]
    rids = tuple([row.rid for row in rows])
    if rids == before:
        change, members = RowChange(before, (), ()), latest.members if before is latest.change.rids else frozenset(rids)
    else:
        old = latest.members if before is latest.change.rids else frozenset(before)
        members = frozenset(rids)
        came = members - old
        if len(came) <= _FEW:
            ordered = tuple(sorted(came, key=rids.index))
        else:
            ordered = tuple([rid for rid in rids if rid in came])
        change = RowChange(rids, ordered, tuple(old - members))
    _latest = (_Answer(before, rows, change, members), *answers[: _KEPT - 1])
    return change


def has_row(plan: StepPlanned, rid: str) -> bool:
    """Whether the step computes something of a request."""
    return rid in plan.sampling or any(row.rid == rid for row in plan.prefills)
