"""`admitscope top`. Owns: a live table of waiting and running requests in a terminal, read like the dashboard reads.

Waiting requests say which limit holds them, with need and have; running ones what they hold and how their tokens come.
A lost engine leaves the last table on the screen, marked with its age, and comes back by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from telemetry.client import Source, SourceError, SourceUnavailable
from telemetry.explain_words import amount, span, times
from telemetry.live_explain import IN_REQUESTS
from telemetry.observe import EngineStatus, QueueAnswer, QueueEntry, RequestRow, RequestsAnswer
from telemetry.settings import TopCommand, TopSort
from telemetry.short_ids import shortened

_READ_ROWS: Final = 5_000
_STATE_ORDER: Final = {"waiting": 0, "retracted": 0, "prefill": 1, "decode": 2, "emitting": 3}


class Reading:
    """One look at an engine: what a frame shows."""

    def __init__(self, status: EngineStatus, queue: QueueAnswer, requests: RequestsAnswer) -> None:
        self.status = status
        self.queue = queue
        self.requests = requests

    @classmethod
    def of(cls, source: Source) -> Reading:
        """Ask `source`. Raises SourceError."""
        return cls(source.status(), source.queue(_READ_ROWS), source.requests(_READ_ROWS))


def _key(sort: TopSort) -> Callable[[tuple[RequestRow, QueueEntry | None, float]], tuple[float, str]]:
    """What rows are sorted by; larger first, but for places in the queue."""

    def key(item: tuple[RequestRow, QueueEntry | None, float]) -> tuple[float, str]:
        row, entry, age_s = item
        number = {
            "place": -(entry.position if entry is not None else _READ_ROWS + _STATE_ORDER.get(row.state, 9)),
            "age": age_s,
            "queue": entry.age_s if entry is not None else (row.queue_s or 0.0),
            "prompt": row.prompt_len,
            "outputs": row.outputs,
            "gap": row.tbt_max_s or 0.0,
            "passed": entry.times_passed_over if entry is not None else 0,
            "retractions": row.retractions,
        }[sort]
        return (-number, row.rid)

    return key


#: From this width of terminal, in characters, ids are shown whole.
_WIDE: Final = 130

#: Columns with the width of terminal from which there is room for them, and whether they are numbers.
_COLUMNS: Final = (
    ("#", 0, True),
    ("request", 0, False),
    ("state", 0, False),
    ("age", 0, True),
    ("prompt", 130, True),
    ("cached", 150, True),
    ("out", 110, True),
    ("TTFT", 140, True),
    ("worst gap", 160, True),
    ("retr", 160, True),
    ("passed", 130, True),
    ("why it waits: need of have", 0, False),
)


def frame(
    reading: Reading,
    *,
    sort: TopSort = "place",
    limit: int = 40,
    stale_s: float | None = None,
    width: int = 200,
) -> RenderableType:
    """One frame: the head line, the table, and how many rows are not shown.

    width  of the terminal, in characters: a narrow one gets fewer columns, and ids as the page shortens them
    """
    status = reading.status
    entries = {entry.rid: entry for entry in reading.queue.entries}
    now_s = status.t_wall_s + status.heartbeat_age_s
    items = [(row, entries.get(row.rid), max(0.0, now_s - row.accepted_wall_s)) for row in reading.requests.live]
    items.sort(key=_key(sort))
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    is_narrow = width < _WIDE
    shown = [wanted <= width for _, wanted, _ in _COLUMNS]
    for name, wanted, right in _COLUMNS:
        if wanted <= width:
            whole = name in {"request", "why it waits: need of have"}
            table.add_column(
                name, justify="right" if right else "left", no_wrap=not whole, overflow="fold" if whole else "ellipsis"
            )
    for row, entry, age_s in items[:limit]:
        cells: tuple[RenderableType, ...] = (
            str(entry.position) if entry is not None else "",
            shortened(row.rid) if is_narrow else row.rid,
            Text(row.state, style={"waiting": "yellow", "retracted": "red", "decode": "green"}.get(row.state, "")),
            _seconds(age_s),
            str(row.prompt_len),
            "" if row.cached_tokens is None else str(row.cached_tokens),
            str(row.outputs),
            _seconds(row.ttft_s),
            _seconds(row.tbt_max_s),
            str(row.retractions or ""),
            str(entry.times_passed_over) if entry is not None else "",
            _why(entry, is_narrow=is_narrow) if entry is not None else "",
        )
        table.add_row(*(cell for cell, is_shown in zip(cells, shown, strict=True) if is_shown))
    parts: list[RenderableType] = [_head(status, stale_s), table]
    if len(items) > limit:
        parts.append(Text(f"{len(items) - limit} more; --limit shows them", style="dim"))
    if not items:
        parts.append(Text("no live request", style="dim"))
    return Group(*parts)


def _head(status: EngineStatus, stale_s: float | None) -> Text:
    pages = status.kv_pages
    blockers = ", ".join(f"{name} {count}" for name, count in status.waiting_by_blocker.items() if count)
    line = Text.assemble(
        (status.model, "bold"),
        f"  step {status.step}  running {status.running}  waiting {status.waiting}",
        f" ({blockers})" if blockers else "",
        f"  pages free {pages.free} cached {pages.evictable} held {pages.private + pages.protected}/{pages.capacity}",
        f"  {status.tokens_per_s:.0f} tok/s  ratio {status.new_token_ratio:.2f}",
    )
    if status.violations_total:
        line.append(f"  {status.violations_total} broken laws", style="bold red")
    if stale_s is not None:
        line.append(f"  no answer for {stale_s:.0f} s: this is what it was", style="bold red")
    return line


def _why(entry: QueueEntry, *, is_narrow: bool) -> str:
    """The blocker, and the two sides of the test that decided; a dash where it had no two sides."""
    reason = f" ({entry.reason})" if entry.reason and entry.reason != entry.blocker else ""
    behind = ""
    if entry.who_stopped and entry.who_stopped != entry.rid:
        behind = f" behind {shortened(entry.who_stopped) if is_narrow else entry.who_stopped}"
        reason = "" if is_narrow else reason  # who it is behind tells more, and both take two lines
    if entry.need is not None and entry.have is not None:
        test = f": {amount(entry.need)} of {amount(entry.have)} tok"
        if entry.blocker in IN_REQUESTS:
            unit = "row" if entry.blocker == "rows" else "prompt"
            test = f": needs {times(round(entry.need), unit)}, has {amount(entry.have)}"
            reason = "" if is_narrow else reason
    else:
        test = "" if behind else ": –"
    return f"{entry.blocker}{reason}{behind}{test}"


def _seconds(value: float | None) -> str:
    return "" if value is None else span(round(value * 1e9))


def run_top(command: TopCommand, source: Source, console: Console) -> int:
    """Show frames until Ctrl-C; one frame with `--once`. Returns the exit status: 1 when nothing could be read.

    What is no terminal gets one table after another, and the first question must be answered: a file fills for nobody.
    """
    if command.once:
        try:
            console.print(_frame(command, console, Reading.of(source)))
        except SourceError as error:
            console.print(f"admitscope: {error}", style="red", highlight=False)
            return 1
        return 0
    try:
        if console.is_terminal:
            _look_on(command, source, console)
        while True:
            console.print(_frame(command, console, Reading.of(source)))
            time.sleep(command.interval_s)
    except SourceError as error:  # a question that is refused will be refused again
        console.print(f"admitscope: {error}", style="red", highlight=False)
    return 1


def _frame(command: TopCommand, console: Console, reading: Reading, stale_s: float | None = None) -> RenderableType:
    return frame(reading, sort=command.sort, limit=command.limit, stale_s=stale_s, width=console.width)


def _look_on(command: TopCommand, source: Source, console: Console) -> NoReturn:
    """Frame after frame. Raises BadQuestion."""
    last: Reading | None = None
    seen_at = time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                last, seen_at = Reading.of(source), time.monotonic()
                shown: RenderableType = _frame(command, console, last)
            except SourceUnavailable as error:
                shown = Text(f"{error}; trying again", style="red")
                if last is not None:
                    shown = _frame(command, console, last, stale_s=time.monotonic() - seen_at)
            live.update(shown, refresh=True)
            time.sleep(command.interval_s)
