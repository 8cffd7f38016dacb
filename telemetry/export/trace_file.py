"""Trace files. Owns: a Chrome trace-event JSON, sorted by time, in bounded memory, under its name only when whole.

Entries come in any order: 100,000 are kept, sorted and put aside as a run; at the end the runs are merged into the
file. The format is the JSON object form with `traceEvents`, which ui.perfetto.dev and chrome://tracing open: `X` spans,
`i` instants, `C` counters, `M` names. `ts` and `dur` are microseconds with three decimals, so whole nanoseconds.
"""

from __future__ import annotations

import heapq
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

import msgspec

SPILL: Final = 100_000
_LONGEST: Final = 10**19


class TraceFile:
    """Collects entries; `finish` writes the file. Use it as a context: what it put aside is removed at the end.

    other  shown under "Info and stats"
    """

    def __init__(self, path: Path, other: Mapping[str, str | int], *, spill: int = SPILL) -> None:
        self._path = path
        self._other = dict(other)
        self._spill = spill
        self._lines: list[str] = []
        self._count = 0
        self._runs: list[Path] = []
        self._aside = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._aside.cleanup()

    @property
    def entries(self) -> int:
        """How many entries came."""
        return self._count

    def name(self, what: str, *, pid: int, tid: int, **args: str | int) -> None:
        """A metadata entry (`process_name`, `thread_name`, …); all of them stand first."""
        self._add(0, 0, {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}, "")

    def span(
        self, name: str, category: str, start_ns: int, end_ns: int, *, pid: int, tid: int, args: Mapping[str, Any]
    ) -> None:
        """A stretch of time; of two that start together the longer one stands first, as the one around."""
        entry = {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, "args": args}
        times = f'"ts":{_us(start_ns)},"dur":{_us(end_ns - start_ns)},'
        self._add(start_ns + 1, end_ns - start_ns, entry, times)

    def instant(self, name: str, category: str, t_ns: int, *, pid: int, tid: int, args: Mapping[str, Any]) -> None:
        """One moment on a track."""
        entry = {"name": name, "cat": category, "ph": "i", "s": "t", "pid": pid, "tid": tid, "args": args}
        self._add(t_ns + 1, 0, entry, f'"ts":{_us(t_ns)},')

    def counter(self, name: str, t_ns: int, *, pid: int, values: Mapping[str, int | float]) -> None:
        """Values from this moment on; each is a track of its own."""
        self._add(t_ns + 1, 0, {"name": name, "ph": "C", "pid": pid, "args": values}, f'"ts":{_us(t_ns)},')

    def _add(self, at: int, duration: int, entry: dict[str, Any], times: str) -> None:
        # Fixed width, so that lines sort as their numbers do; the count keeps equal ones as they came.
        body = "{" + times + self._encoder.encode(entry).decode()[1:]
        self._lines.append(f"{at:020d}{_LONGEST - duration:020d}{self._count:012d}{body}\n")
        self._count += 1
        if len(self._lines) >= self._spill:
            self._put_aside()

    def _put_aside(self) -> None:
        run = Path(self._aside.name) / f"{len(self._runs):06d}"
        self._lines.sort()
        with run.open("w", encoding="utf-8") as stream:
            stream.writelines(self._lines)
        self._lines.clear()
        self._runs.append(run)

    def finish(self) -> int:
        """Write the file and give it its name. Returns its size in bytes. Raises OSError."""
        part = Path(self._aside.name) / "whole"
        head = msgspec.json.encode({"displayTimeUnit": "ms", "otherData": self._other}).decode()[:-1]
        with ExitStack() as stack:
            out = stack.enter_context(part.open("w", encoding="utf-8"))
            out.write(head + ',"traceEvents":[\n')
            before = ""
            for line in self._merged(stack):
                out.write(before + line[52:-1])
                before = ",\n"
            out.write("\n]}\n")
        size = part.stat().st_size
        part.replace(self._path)
        return size

    def _merged(self, stack: ExitStack) -> Iterator[str]:
        self._lines.sort()
        runs: list[IO[str]] = [stack.enter_context(run.open(encoding="utf-8")) for run in self._runs]
        return heapq.merge(*runs, self._lines)


def _us(ns: int) -> str:
    """Nanoseconds as microseconds, exactly."""
    return f"{ns // 1_000}.{ns % 1_000:03d}"
