"""Step rows. Owns: what is kept of one step: its plan, what its pass looked at, and how it ended."""

from __future__ import annotations

from typing import Final

import msgspec

from engine.events import AdmissionDecided, StepCompleted, StepPlanned
from engine.scheduler.decision import Reason
from telemetry.queue_watch import QueueWatch

#: Waiting requests whose places before a pass are kept, beside those it looked at.
KEPT_FIRST_WAITING: Final = 24


class SeenPass:
    """What a pass looked at, and the queue as it found it.

    places         of each decision's request by entry to the queue; None: it did not wait
    first_waiting  the first by entry, whoever was looked at
    """

    __slots__ = ("decisions", "first_waiting", "places", "waiting")

    def __init__(self, queue: QueueWatch) -> None:
        self.decisions: list[AdmissionDecided] = []
        self.places: list[int | None] = []
        self.waiting = len(queue.waiting)
        self.first_waiting = queue.first(KEPT_FIRST_WAITING)


class StepRow:
    """One step as kept: its plan, the decisions of its pass, and, once applied, its completion.

    Neither has the names of those who decode and of those who get tokens, which no answer shows: 512 steps of 256 are
    megabytes, in which the memory of new events would go round, and be in no cache when the engine thread comes to it.

    decode_rows  how many decode
    full_by      of a step that stood at the full flag: the refusal that set it, and the step of that
    """

    __slots__ = (
        "completed",
        "decisions",
        "decode_rows",
        "first_waiting",
        "full_by",
        "places",
        "planned",
        "waiting_before",
    )

    def __init__(self, planned: StepPlanned, seen: SeenPass, full_by: tuple[Reason, int] | None = None) -> None:
        self.planned = msgspec.structs.replace(planned, decodes=(), sampling=())
        self.decode_rows = len(planned.decodes)
        self.decisions = seen.decisions
        self.places = seen.places
        self.first_waiting = seen.first_waiting
        self.waiting_before = seen.waiting
        stands = planned.pass_end is not None and planned.pass_end.stopped_by is Reason.FULL_FLAG_SET
        # A pass that reached the end of the queue refused nobody: what marked the batch full is then not known.
        self.full_by = full_by if stands and full_by is not None and full_by[0] is not Reason.QUEUE_END else None
        self.completed: StepCompleted | None = None
