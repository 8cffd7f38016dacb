"""Recorded memory and laws. Owns: what a recording says of the pool, the tree and the laws at its moment."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from pathlib import Path

from telemetry.evidence import FOLDER
from telemetry.law_answers import LawBook
from telemetry.observe import EvidenceAnswer, EvidenceDetail, LawsAnswer, PageFact, PoolAnswer, TreeAnswer
from telemetry.program import program
from telemetry.read_model import ReadModel
from telemetry.recorded_tables import is_tables


class RecordedMemory:
    """The part of `RecordedSource` about memory and laws; that class owns the state, and names the journal."""

    _lock: threading.RLock
    _model: ReadModel
    _path: Path

    def page(self, page: int) -> PageFact | None:
        """Who holds one page at the moment."""
        with self._lock:
            return self._model.page(page)

    def pool(self) -> PoolAnswer:
        """Memory over the ten minutes before the moment."""
        with self._lock:
            return self._model.pool_over_time()

    def tree(self, *, node: int | None = None, opened: Sequence[int] = (), top: int = 20) -> TreeAnswer:
        """The tree at the moment; the order of last uses is that of the events alone."""
        with self._lock:
            return self._model.tree(node=node, opened=tuple(opened), top=top)

    def laws(self) -> LawsAnswer:
        """The catalogue: a recording is judged by `admitscope check`."""
        with self._lock:
            return self._laws().laws()

    def evidence(self) -> EvidenceAnswer:
        """Evidence bundles beside the journal."""
        with self._lock:
            return self._laws().evidence()

    def bundle(self, name: str) -> EvidenceDetail | None:
        """One of them, opened."""
        with self._lock:
            return self._laws().bundle(name)

    def _laws(self) -> LawBook:
        path = self._path
        beside = path if path.is_dir() else path.parent
        why = f"a recording is judged by `{program()} check {shlex.quote(str(path))}`"
        if is_tables(path):
            why = f"tables are not judged: `{program()} check` needs the journal that they were made of"
        return LawBook(self._model, folder=beside / FOLDER, run=path.name.partition(".jsonl")[0], why=why)
