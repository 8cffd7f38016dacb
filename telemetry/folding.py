"""Folding. Owns: which repeated refusals a journal counts instead of writing, and the running hash of the core.

A request that waits behind a full cache is refused in every pass, often with the same numbers. The first refusal of
such a run is written in full; those that follow are counted and leave as one `refusals_folded` line when something
about them changes, when the request moves on or ends, and at every checkpoint. What is folded away is reproduced by a
replay, and the hash, which covers every event before folding, shows that it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from engine.events import AdmissionDecided, AnyEvent, RequestTransitioned
from engine.scheduler.decision import Reason, Result, Verdict
from telemetry.schema_journal import RefusalsFoldedRecord

#: A refusal that a later pass may repeat; `never_fits` ends the request and notes are not about it.
_REPEATABLE: Final = frozenset({Verdict.STOP, Verdict.NEXT})

#: What makes two refusals of one request the same: reason, result, prefix, candidate, need, have.
FoldKey = tuple[Reason, Result, int, int, float | None, float | None]


def fold_key(event: AnyEvent) -> FoldKey | None:
    """The identity of a refusal; None when `event` is anything else."""
    if not isinstance(event, AdmissionDecided) or event.reason.verdict not in _REPEATABLE:
        return None
    return (event.reason, event.result, event.prefix_len, event.candidate_extend, event.need, event.have)


@dataclass(slots=True)
class _Run:
    """Refusals of one request since its last written one. `count` 0: nothing folded yet."""

    key: FoldKey
    count: int = 0
    stopped_passes: int = 0
    first: AdmissionDecided | None = None
    last: AdmissionDecided | None = None

    def add(self, event: AdmissionDecided) -> None:
        self.first = self.first or event
        self.last = event
        self.count += 1
        self.stopped_passes += event.stopped_pass

    def take(self) -> RefusalsFoldedRecord | None:
        """The line for what was folded; the run starts again from 0 under the same key."""
        if self.first is None or self.last is None:
            return None
        first, last = self.first, self.last
        line = RefusalsFoldedRecord(
            rid=first.rid,
            reason=first.reason,
            result=first.result,
            prefix_len=first.prefix_len,
            candidate_extend=first.candidate_extend,
            need=first.need,
            have=first.have,
            first_step=first.step,
            last_step=last.step,
            first_seq=first.seq,
            last_seq=last.seq,
            times_passed_over=last.times_passed_over,
            stopped_passes=self.stopped_passes,
            count=self.count,
        )
        self.count = self.stopped_passes = 0
        self.first = self.last = None
        return line


class RefusalFolder:
    """Decides, event by event, what a journal writes. Holds one run per waiting request that was refused."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no request has a run: then `push` has nothing to say, but of a refusal."""
        return not self._runs

    def push(self, event: AnyEvent) -> tuple[RefusalsFoldedRecord | None, bool]:
        """(line to write before the event, whether to write the event itself)."""
        if isinstance(event, AdmissionDecided):
            key = fold_key(event)
            run = self._runs.get(event.rid)
            if key is not None and run is not None and run.key == key:
                run.add(event)
                return None, False
            if key is None:
                self._runs.pop(event.rid, None)
            else:
                self._runs[event.rid] = _Run(key)
            return (run.take() if run else None), True
        if isinstance(event, RequestTransitioned):
            run = self._runs.pop(event.rid, None)
            return (run.take() if run else None), True
        return None, True

    def flush(self) -> Iterator[RefusalsFoldedRecord]:
        """Lines for everything folded so far. Runs stay open: the next equal refusal is folded on."""
        for run in self._runs.values():
            if line := run.take():
                yield line


class EventHash:
    """Running hash over the core's events: blake2b, 16 bytes, of each event's msgspec JSON and a newline."""

    __slots__ = ("_hash", "events")

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self.events = 0

    def add(self, encoded: bytes) -> None:
        """One event other than ResponseSent, as msgspec JSON."""
        self._hash.update(encoded)
        self._hash.update(b"\n")
        self.events += 1

    def add_all(self, encoded: Sequence[bytes], events: int) -> None:
        """`events` of them, each with its newline: one long update, which leaves the interpreter to others."""
        if events:
            self._hash.update(b"".join(encoded))
            self.events += events

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
