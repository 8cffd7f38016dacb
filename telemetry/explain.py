"""Explain. Owns: telling one request's life, as recorded, in plain sentences with numbers.

`explain(journal, rid)` reads a journal once; `telemetry.explain_life` makes the sentences.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from engine.errors import AdmitscopeError
from telemetry.explain_ids import abbreviated, ids_in
from telemetry.explain_life import Sentence, told
from telemetry.explain_words import span
from telemetry.journal_gaps import Gap, GapWatch, number_of
from telemetry.journal_reader import JournalReader
from telemetry.life import LifeBuilder
from telemetry.life_facts import Life
from telemetry.schema import Record, decode
from telemetry.schema_events import RequestArrivedRecord
from telemetry.short_ids import meant
from telemetry.words import ENGLISH, Lang, speaking, t

#: Beginnings of events that are about no request: what they hold is not read.
_PASSED_OVER: Final = (b'{"type":"PagesMoved",', b'{"type":"LockChanged",')
_LISTED: Final = 20


class UnknownRequest(AdmitscopeError):
    """The record has no request of this id; the message lists the nearest ids it has, and says what it lacks itself."""

    def __init__(self, rid: str, known: Iterable[str], lacks: Sequence[str] = ()) -> None:
        ids = list(dict.fromkeys(known))
        nearest = difflib.get_close_matches(rid, ids, n=5, cutoff=0.4) or ids[:5]
        has = f"it has {len(ids)} requests, nearest ids: {', '.join(nearest)}" if ids else "it has no request at all"
        super().__init__("\n".join([f"no request {rid!r} in this record; {has}", *lacks]))
        self.nearest = tuple(nearest)
        self.known = tuple(ids)


class AmbiguousRequest(AdmitscopeError):
    """A shortened id may mean several requests; the message lists them, at most twenty."""

    def __init__(self, rid: str, ids: Sequence[str]) -> None:
        more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
        super().__init__(f"{rid!r} may be {len(ids)} requests: {', '.join(ids[:_LISTED])}{more}")


class Explanation(BaseModel):
    """A request's life: the facts and the sentences.

    torn      where the record ends early because its last line is damaged
    open_end  file:line of its last line, when that is not the one with which a writer closes a journal
    gap       events that its middle lacks without a line that says so; its `more` counts those behind it
    warnings  all of this in sentences: what the story may lack
    """

    model_config = ConfigDict(frozen=True)

    rid: str
    sentences: tuple[Sentence, ...]
    life: Life
    torn: str | None = None
    open_end: str | None = None
    gap: Gap | None = None
    warnings: tuple[str, ...] = ()

    def text(self, lang: Lang = ENGLISH) -> str:
        """For a terminal: one sentence a line, each with when it began. `lang`: the one that the sentences are in.

        That the record has a gap comes first, that it ends early last.
        A long id is whole where it is first met, and short after that; `sentences` have it whole.
        """
        stamps = [f"{'+' if s.at_ns >= 0 else ''}{span(s.at_ns)}" for s in self.sentences]
        width = max(map(len, stamps))
        texts = abbreviated((s.text for s in self.sentences), ids_in(self.life))
        lines = [f"{stamp:>{width}}  {text}" for stamp, text in zip(stamps, texts, strict=True)]
        lacks = self.lacks(lang)
        in_middle = 1 if self.gap is not None else 0
        return "\n".join([*lacks[:in_middle], *lines, *lacks[in_middle:]])

    def lacks(self, lang: Lang = ENGLISH) -> tuple[str, ...]:
        """What the story may lack, in sentences: that of a gap first, that of an early end last."""
        with speaking(lang):
            in_middle = [_in_middle(self.gap, self.life)] if self.gap is not None else []
            return (*in_middle, *_at_end(self.torn, self.open_end))


def explain(journal: Path, rid: str, lang: Lang = ENGLISH) -> Explanation:
    """The life of `rid` by the journal at `journal`; a shortened id will do where one request only fits it.

    lang  of the sentences; errors are English

    Raises UnknownRequest, AmbiguousRequest, JournalError.
    """
    reading = _Reading(journal)
    try:
        explanation = explain_records(reading.records(), rid, lang)
    except UnknownRequest as error:
        ids = meant(rid, error.known)
        if not ids:
            gap = reading.gap
            lacks = [_in_middle(gap, None)] if gap is not None else []
            raise UnknownRequest(rid, error.known, [*lacks, *_at_end(reading.torn, reading.open_end)]) from error
        if len(ids) > 1:
            raise AmbiguousRequest(rid, ids) from error
        explanation = explain_records(reading.records(), ids[0], lang)
    known = explanation.model_copy(update=reading.told())
    return known.model_copy(update={"warnings": known.lacks(lang)})


class _Reading:
    """A journal's records for an explanation, and what it lacks, once they were all read."""

    def __init__(self, journal: Path) -> None:
        self._reader = JournalReader(journal)
        self._gaps: tuple[Gap, ...] = ()

    def records(self) -> Iterator[Record]:
        """From the beginning, without those that are about nobody; but no number is passed over unread."""
        watch = GapWatch(self._reader.header)
        look = watch.look
        for line, read in self._reader.read(_decoded):
            look(line, read)
            if not isinstance(read, int):
                yield read
        self._gaps = watch.gaps().certain

    @property
    def torn(self) -> str | None:
        return str(self._reader.torn) if self._reader.torn else None

    @property
    def open_end(self) -> str | None:
        return self._reader.ends_at

    @property
    def gap(self) -> Gap | None:
        return self._gaps[0].model_copy(update={"more": len(self._gaps) - 1}) if self._gaps else None

    def told(self) -> dict[str, Any]:
        """What is known about the record, as an Explanation has it."""
        return {"torn": self.torn, "open_end": self.open_end, "gap": self.gap}


def _in_middle(gap: Gap, life: Life | None) -> str:
    """That the record has a gap, and what that means for the story of `life`; None: it was not found."""
    if life is None:
        weight = t("A request may be among them.")
    elif life.end is not None and gap.after_step > life.end.step:
        weight = t("This request had ended before.")
    else:
        weight = t("What is told of this request may lack a part.")
    return f"{gap.text()} {weight}"


def _at_end(torn: str | None, open_end: str | None) -> list[str]:
    """That the record ends early, where it does."""
    if torn:
        return [t("The journal ends early: {why}", why=torn)]
    if open_end:
        return [
            t(
                "The journal ends early: {where} is not the line that closes a run; it was cut there, or is still "
                "being written.",
                where=open_end,
            )
        ]
    return []


def _decoded(raw: bytes) -> int | Record:
    """The number of an event that is about no request, and every other line as a record."""
    return number_of(raw) if raw.startswith(_PASSED_OVER) and raw.endswith(b"}") else decode(raw)


def explain_records(records: Iterable[Record], rid: str, lang: Lang = ENGLISH) -> Explanation:
    """The same from records, wherever they come from."""
    builder, known = LifeBuilder(rid), []
    for record in records:
        if isinstance(record, RequestArrivedRecord):
            known.append(record.rid)
        builder.feed(record)
    life = builder.life()
    if life is None:
        raise UnknownRequest(rid, known)
    with speaking(lang):
        return Explanation(rid=rid, sentences=told(life), life=life)
