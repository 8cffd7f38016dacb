"""Exemplars. Owns: which request stands for a bucket of a histogram, as the id of a trace that is going to be kept.

A trace is kept or dropped at a request's end (`telemetry.spans.keep`), a bucket is counted before: only those are taken
of which it is known by then. That the export is bounded per second is not known: in a storm an exemplar may point to a
trace that was left out. Written on the engine thread, read by scrapes; at most one per bucket and second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from telemetry.request_timeline import RequestTimeline
from telemetry.spans.keep import KeepRule

_EVERY_NS: Final = 1_000_000_000


class Exemplar(NamedTuple):
    """One observation and its trace. `value` in stored units; `t_ns` of the engine's clock, `wall_ns` since 1970."""

    trace_id: str
    value: int
    t_ns: int
    wall_ns: int


class Exemplars:
    """The latest exemplar of each bucket, by its cell.

    rule  of the sink that keeps traces
    """

    def __init__(self, rule: KeepRule) -> None:
        self._rule = rule
        self._by_cell: dict[int, Exemplar] = {}
        self.wall_offset_ns = 0

    def note(self, cell: int, request: RequestTimeline, value: int, t_ns: int, *, late: bool = False) -> None:
        """`value` was counted in `cell` at `t_ns`. `late`: this value alone keeps the trace."""
        if not request.trace_id:
            return
        before = self._by_cell.get(cell)
        if before is not None and t_ns - before.t_ns < _EVERY_NS:
            return
        if late or request.trace_sampled or self._rule.is_drawn(int(request.trace_id, 16)):
            self._by_cell[cell] = Exemplar(request.trace_id, value, t_ns, t_ns + self.wall_offset_ns)

    def snapshot(self) -> Mapping[int, Exemplar]:
        """All of them now. Any thread: the copy is one step of the interpreter."""
        return self._by_cell.copy()
