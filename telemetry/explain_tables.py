"""Explain by tables. Owns: the records of a run, read back from its Parquet tables, and the same story told from them.

A journal counts refusals that repeat; tables have each of them, or, where an export could not make them again, the
same count. A count stands in a journal before the event that ended it: it is put there again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from telemetry.explain import AmbiguousRequest, Explanation, UnknownRequest, explain_records
from telemetry.recorded_tables import TableEvents
from telemetry.schema import Record, record_of
from telemetry.schema_events import AdmissionDecidedRecord, RequestTransitionedRecord
from telemetry.schema_journal import RefusalsFoldedRecord
from telemetry.short_ids import meant
from telemetry.words import ENGLISH, Lang


def explain_tables(folder: Path, rid: str, lang: Lang = ENGLISH) -> tuple[Explanation, list[str]]:
    """The life of `rid` by the tables in `folder`, and what these lack, in sentences.

    A shortened id will do where one request only fits it. Raises UnknownRequest, AmbiguousRequest, JournalError;
    ConfigError where Parquet files cannot be read here.
    """
    tables = TableEvents(folder)
    # Without them a wait of many passes would be told as a wait for the first.
    tables.need("steps", "it cannot be told what a request waited for")
    try:
        explanation = explain_records(_records(tables), rid, lang)
    except UnknownRequest as error:
        ids = meant(rid, error.known)
        if not ids:
            raise
        if len(ids) > 1:
            raise AmbiguousRequest(rid, ids) from error
        explanation = explain_records(_records(tables), ids[0], lang)
    return explanation, tables.lacks()


def _records(tables: TableEvents) -> Iterator[Record]:
    """Everything that a story is told from, in the order of a journal."""
    folds: dict[str, list[RefusalsFoldedRecord]] = defaultdict(list)
    for fold in tables.folds():
        folds[fold.rid].append(fold)
    for event in tables.all_events(memory=False):
        record = record_of(event)
        if isinstance(record, (AdmissionDecidedRecord, RequestTransitionedRecord)):
            own = folds.get(record.rid)
            while own and own[0].last_seq < record.seq:
                yield own.pop(0)
        yield record
    for left in folds.values():
        yield from left
