"""Explain. Owns: telling one request's life, as recorded, in plain sentences with numbers.

`explain(journal, rid)` reads a journal once; `telemetry.explain_life` makes the sentences.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from engine.errors import AdmitscopeError
from telemetry.explain_ids import abbreviated, ids_in
from telemetry.explain_life import Sentence, told
from telemetry.explain_words import span
from telemetry.journal_reader import JournalReader
from telemetry.life import LifeBuilder
from telemetry.life_facts import Life
from telemetry.schema import Record
from telemetry.schema_events import RequestArrivedRecord
from telemetry.short_ids import meant
from telemetry.words import ENGLISH, Lang, speaking, t

_NOT_ABOUT_REQUESTS: Final = ("PagesMoved", "LockChanged")
_LISTED: Final = 20


class UnknownRequest(AdmitscopeError):
    """The record has no request of this id; the message lists the nearest ids it has."""

    def __init__(self, rid: str, known: Iterable[str]) -> None:
        ids = list(dict.fromkeys(known))
        nearest = difflib.get_close_matches(rid, ids, n=5, cutoff=0.4) or ids[:5]
        has = f"it has {len(ids)} requests, nearest ids: {', '.join(nearest)}" if ids else "it has no request at all"
        super().__init__(f"no request {rid!r} in this record; {has}")
        self.nearest = tuple(nearest)
        self.known = tuple(ids)


class AmbiguousRequest(AdmitscopeError):
    """A shortened id may mean several requests; the message lists them, at most twenty."""

    def __init__(self, rid: str, ids: Sequence[str]) -> None:
        more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
        super().__init__(f"{rid!r} may be {len(ids)} requests: {', '.join(ids[:_LISTED])}{more}")


class Explanation(BaseModel):
    """A request's life: the facts and the sentences."""

    model_config = ConfigDict(frozen=True)

    rid: str
    sentences: tuple[Sentence, ...]
    life: Life
    torn: str | None = None

    def text(self, lang: Lang = ENGLISH) -> str:
        """For a terminal: one sentence a line, each with when it began. `lang`: the one that the sentences are in.

        A long id is whole where it is first met, and short after that; `sentences` have it whole.
        """
        stamps = [f"{'+' if s.at_ns >= 0 else ''}{span(s.at_ns)}" for s in self.sentences]
        width = max(map(len, stamps))
        texts = abbreviated((s.text for s in self.sentences), ids_in(self.life))
        lines = [f"{stamp:>{width}}  {text}" for stamp, text in zip(stamps, texts, strict=True)]
        if self.torn:
            with speaking(lang):
                lines.append(t("The journal ends early: {why}", why=self.torn))
        return "\n".join(lines)


def explain(journal: Path, rid: str, lang: Lang = ENGLISH) -> Explanation:
    """The life of `rid` by the journal at `journal`; a shortened id will do where one request only fits it.

    lang  of the sentences; errors are English

    Raises UnknownRequest, AmbiguousRequest, JournalError.
    """
    reader = JournalReader(journal)
    try:
        explanation = explain_records(reader.records(without=_NOT_ABOUT_REQUESTS), rid, lang)
    except UnknownRequest as error:
        ids = meant(rid, error.known)
        if not ids:
            raise
        if len(ids) > 1:
            raise AmbiguousRequest(rid, ids) from error
        reader = JournalReader(journal)
        explanation = explain_records(reader.records(without=_NOT_ABOUT_REQUESTS), ids[0], lang)
    return explanation.model_copy(update={"torn": str(reader.torn) if reader.torn else None})


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
