"""The plugin for SGLang. Owns: the entry point `sglang.srt.plugins`, and what it starts in a scheduler's process.

SGLang calls `register` early in each of its processes. It does something only where a scheduler can run and
`SGLANG_ADMITSCOPE_JOURNAL` names a folder: each scheduler of its own then writes one journal there, which `admitscope
explain`, `check` and the dashboard read. docs/sglang.md says what is recorded, what is not, and what it costs.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Final

from engine.events import SCHEMA_VERSION, EngineStarted
from telemetry.journal import new_journal_path
from telemetry.journal_cap import CappedJournal
from telemetry.schema_parts import SourcePart
from telemetry.sglang.facts import AnyFact
from telemetry.sglang.hooks import Hooks
from telemetry.sglang.mapping import Mapper
from telemetry.sglang.seams import SEAMS, TESTED, differences
from telemetry.sglang.support import Described, Unsupported, config_json, describe
from telemetry.sglang.worker import Worker

_log = logging.getLogger(__name__)

FOLDER_NAME: Final = "SGLANG_ADMITSCOPE_JOURNAL"
SIZE_NAME: Final = "SGLANG_ADMITSCOPE_MAX_MIB"
DEFAULT_MIB: Final = 512
_SCHEDULER_MODULE: Final = "sglang.srt.managers.scheduler"


class JournalTarget:
    """Facts of one scheduler into one journal. Lives on the worker's thread."""

    def __init__(self, described: Described, path: Path, *, max_mib: int, began: tuple[int, int]) -> None:
        source = SourcePart(
            name="sglang", version=described.version, overlaps=described.overlaps, absent=described.absent
        )
        self._journal = CappedJournal(path, max_mib=max_mib, source=source)
        t_ns, wall_ns = began
        started = EngineStarted(
            0,
            0,
            t_ns,
            SCHEMA_VERSION,
            described.version,
            config_json(described),
            described.model,
            described.attention_backend,
            described.page_size,
            described.num_pages,
            described.rows,
            wall_ns,
            uuid.uuid4().hex,
        )
        self.mapper = Mapper(started, clip=described.clip, out=self._journal.emit)

    def take(self, fact: AnyFact) -> None:
        """Record one fact."""
        self.mapper.take(fact)

    def flush(self) -> None:
        self._journal.flush()

    def close(self) -> None:
        """Write everything, and say in the log what could not be followed."""
        self._journal.close()
        if self.mapper.unmapped or self.mapper.lost:
            found = ", ".join(f"{what}: {count}" for what, count in sorted(self.mapper.unmapped.items()))
            _log.warning("admitscope: %d facts lost; not followed: %s", self.mapper.lost, found or "none")


class Recorder:
    """Starts a journal when the first scheduler of the process is seen. `worker` is None until then."""

    def __init__(self, folder: Path, *, max_mib: int = DEFAULT_MIB) -> None:
        self._folder = folder
        self._max_mib = max_mib
        self.worker: Worker | None = None
        self.path: Path | None = None

    def begin(self, scheduler: Any) -> bool:
        """Whether this scheduler is recorded; a log line says why not, or where to."""
        try:
            described = describe(scheduler)
        except Unsupported as error:
            _log.warning("admitscope: this scheduler is not recorded: %s", error)
            return False
        began = time.perf_counter_ns(), time.time_ns()
        path = new_journal_path(self._folder, began[1])
        if described.rank:
            path = path.with_name(f"{path.stem}-{described.rank}{path.suffix}")
        self.path = path

        def make() -> JournalTarget:
            self._folder.mkdir(parents=True, exist_ok=True)
            return JournalTarget(described, path, max_mib=self._max_mib, began=began)

        self.worker = Worker(make)
        _log.info("admitscope: recording the decisions of this scheduler to %s", path)
        return True

    def put(self, fact: AnyFact) -> None:
        """Hand one fact to the worker."""
        if self.worker is not None:
            self.worker.put(fact)


def register() -> Hooks | None:
    """SGLang's entry point. Returns the hooks that were registered; None when this process is not recorded."""
    folder = os.environ.get(FOLDER_NAME, "")
    if not folder or _SCHEDULER_MODULE not in sys.modules:
        return None
    size = os.environ.get(SIZE_NAME, str(DEFAULT_MIB))
    if not size.isdecimal() or int(size) < 1:
        _log.error("admitscope: %s is %r; a whole number of MiB, at least 1, is needed: not recording", SIZE_NAME, size)
        return None
    found = differences()
    version = getattr(importlib.import_module("sglang"), "__version__", "unknown")
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        listed = "; ".join(found[:5])
        words = "admitscope: SGLang %s is not recorded, it differs from %s where it is read: %s%s"
        _log.error(words, version, TESTED, listed, more)
        return None
    if version != TESTED:
        _log.warning("admitscope: SGLang %s is untested (%s is), but has all that is read of it", version, TESTED)
    hooks = Hooks(Recorder(Path(folder), max_mib=int(size)))
    install(hooks)
    return hooks


def install(hooks: Hooks) -> None:
    """Register the hooks with SGLang's own registry, which applies them after all plugins have run."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    around = hooks.around()
    for seam in SEAMS:
        registry.HookRegistry.register(seam.target, around[f"{seam.owner}.{seam.name}"], registry.HookType.AROUND)
