"""The records behind a wait. Owns: finding the pass that decided in a journal, and writing it out."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from telemetry.explain_words import amount
from telemetry.journal_reader import JournalReader
from telemetry.schema_events import AdmissionDecidedRecord, StepPlannedRecord

_FEW = 6


class Pass:
    """One step of a journal: what its pass decided, in full lines, and what was planned."""

    def __init__(self, planned: StepPlannedRecord, decisions: list[AdmissionDecidedRecord]) -> None:
        self.planned = planned
        self.decisions = decisions


def passes(journal: Path) -> Iterable[Pass]:
    """Every step with its decisions. Repeated refusals are folded in a journal: the first of a run stands in full."""
    decisions: list[AdmissionDecidedRecord] = []
    for record in JournalReader(journal).records(without=("PagesMoved", "LockChanged", "StepCompleted")):
        if isinstance(record, AdmissionDecidedRecord):
            decisions.append(record)
        elif isinstance(record, StepPlannedRecord):
            yield Pass(record, decisions)
            decisions = []


def words(found: Pass, capacity: int) -> list[str]:
    """The pass as a table, and what the step was left with."""
    planned = found.planned
    first = (
        f"step {planned.step}, {planned.kind}: {len(planned.prefills)} prompt(s), {len(planned.decodes)} decode rows; "
        f"{planned.num_waiting} waiting; new_token_ratio {planned.new_token_ratio:.3f}, "
        f"promised {amount(round(planned.promised_tokens))} tokens"
    )
    out = [first]
    free, private, protected, evictable = planned.pages
    out.append(f"pages of {capacity}: free {free}, private {private}, protected {protected}, evictable {evictable}")
    if planned.pass_end is not None:
        at = f" at {planned.pass_end.rid}" if planned.pass_end.rid else ""
        out.append(
            f"pass ended{at} by {planned.pass_end.stopped_by} ({planned.pass_end.stop}); "
            f"{planned.pass_end.not_considered} not considered"
        )
    out += [
        f"retracted {victim.rid} ({victim.cause}): {victim.output_len} output tokens kept, K/V of "
        f"{victim.lost_tokens} tokens lost"
        for victim in planned.retractions
    ]
    for decision in found.decisions[:_FEW]:
        out += _decision(decision)
    if len(found.decisions) > _FEW:
        out.append(f"… {len(found.decisions) - _FEW} more decisions")
    return out


def _decision(one: AdmissionDecidedRecord) -> list[str]:
    test = "" if one.need is None or one.have is None else f"  need {amount(one.need)}, have {amount(one.have)}"
    chunk = "off" if one.rem_chunk_before is None else f"{one.rem_chunk_before:,} → {one.rem_chunk_after:,}"
    left = f"{amount(round(one.remaining_total_before))} → {amount(round(one.remaining_total_after))}"
    now = f"{one.remaining_current_before:,} → {one.remaining_current_after:,}"
    given = f"extend {one.selected_extend:,} of {one.candidate_extend:,} after prefix {one.prefix_len:,}"
    return [
        f"{one.order}  {one.rid}  {one.reason}{test}",
        f"     {given}, reserved_new_tokens {one.reserved_new_tokens:,}",
        f"     rem_chunk {chunk}, remaining_total {left}, remaining_current {now}",
    ]
