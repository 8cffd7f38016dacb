"""The demo as a whole. Owns: the order of starting, watching and ending its three processes.

Server first, dashboard while the model loads, load generator once the server is ready. Each is a child under the
watchdog, so that none outlives this process; the end goes the other way round.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

import httpx
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from telemetry.demo.processes import Child
from telemetry.demo.report import Tally, status_line, summary
from telemetry.demo.scrape import Scrape
from telemetry.ports import free_port
from telemetry.program import program
from telemetry.settings import environment_name
from telemetry.settings_page import DemoCommand

HOST: Final = "127.0.0.1"
#: Budgets of the demo: small, so that prompts are cut, rows and pages run out and every reason has its turn.
SERVE_FLAGS: Final = (
    "--cache.page-size", "16",
    "--cache.num-pages", "56",
    "--scheduler.chunked-prefill-size", "96",
    "--scheduler.max-prefill-tokens", "192",
    "--scheduler.max-running-requests", "8",
    "--server.drain-timeout-s", "2",
)  # fmt: skip
_POLL_S: Final = 0.25
_STATUS_S: Final = 1.0
_MISSES: Final = 5
#: On a log instead of a terminal, a status line this often.
_LOG_STATUS_S: Final = 10.0
_READY_TIMEOUT_S: Final = 300.0
_SERVER_STOP_S: Final = 8.0


class DemoFailed(Exception):
    """The demo cannot go on; the message says why, with the end of the child's log."""


class _Ended(Exception):
    """SIGTERM or SIGHUP: end as after Ctrl-C."""


@dataclass(slots=True)
class _Run:
    """What is running, and what is known."""

    console: Console
    api_url: str = ""
    page_url: str | None = None
    misses: int = 0
    children: list[Child] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    scrape: Scrape = field(default_factory=lambda: Scrape(""))

    def check_children(self) -> None:
        """Raise DemoFailed when a server or dashboard has ended by itself."""
        for child in self.children:
            status = child.status()
            if status is not None:
                raise DemoFailed(f"the {child.name} ended with status {status}; the end of its log:\n{child.tail()}")

    def read_metrics(self) -> None:
        """Take a new reading. DemoFailed when a child is gone, or the server was silent _MISSES times in a row."""
        try:
            response = httpx.get(f"{self.api_url}/metrics", timeout=5.0, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError as error:
            self.check_children()
            self.misses += 1
            if self.misses >= _MISSES:
                raise DemoFailed(
                    f"/metrics: {error!r}; the end of the server's log:\n{self.children[0].tail()}"
                ) from error
        else:
            self.misses = 0
            self.scrape = Scrape(response.text)
            self._check_health()

    def _check_health(self) -> None:
        """Raise DemoFailed when the engine behind the server is dead: it would refuse every further request."""
        try:
            health = httpx.get(f"{self.api_url}/health", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            return  # a server that does not answer is found by the next reading
        if health.status_code == 503 and health.json().get("status") == "dead":
            raise DemoFailed(f"the engine stopped: {health.text}; the end of its log:\n{self.children[0].tail()}")


def run_demo(command: DemoCommand, console: Console) -> int:
    """Run until the duration is over or Ctrl-C. 0: all answered, no violation; 1: not so; 130: cut short."""
    run = _Run(console)
    with tempfile.TemporaryDirectory(prefix="admitscope-demo-") as folder, _signals_end_the_demo():
        try:
            return _run(command, run, Path(folder))
        except DemoFailed as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1
        except (KeyboardInterrupt, _Ended):
            console.print("interrupted", style="yellow")
            return 130
        finally:
            # Last started first; a second Ctrl-C still reaches the watchdogs when this process ends.
            for child in reversed(run.children):
                child.stop(_SERVER_STOP_S)


def _run(command: DemoCommand, run: _Run, logs: Path) -> int:
    _start_servers(command, run, logs)
    model = _wait_until_ready(run)
    urls = [("API", f"{run.api_url}/v1"), ("metrics", f"{run.api_url}/metrics"), ("dashboard", run.page_url)]
    for name, url in urls:
        if url is not None:
            run.console.print(f"[dim]{name:<11}[/]{url}", highlight=False, soft_wrap=True)
    started_s = time.monotonic()
    is_interrupted = _run_load(command, run, logs, model)
    seconds = time.monotonic() - started_s
    run.read_metrics()
    run.console.print(summary(run.scrape, run.tally, seconds=seconds))
    if command.journal is not None and run.scrape.total("violations_total"):
        run.console.print(f"evidence of broken laws: {command.journal / 'evidence'}", style="red", highlight=False)
    if command.journal is not None and run.tally.slowest[1]:
        _say_what_next(run, command.journal)
    elif run.page_url is not None:
        run.console.print("the page closes with the demo", highlight=False)
    is_bad = bool(run.tally.failed) or run.scrape.total("violations_total") > 0
    is_short = command.duration > 0 and is_interrupted
    return 1 if is_bad else 130 if is_short else 0


def _say_what_next(run: _Run, folder: Path) -> None:
    """How to ask why the slowest request was slow. Names sort by time, so the last journal is this run's."""
    journal = max(folder.glob("admitscope-*Z.jsonl"), default=None)
    if journal is None:
        return
    seconds, rid = run.tally.slowest
    run.console.print(f"why the slowest first token took {seconds:.1f} s, from this run's journal:", highlight=False)
    page = "this run in the page" if run.page_url is None else "the page closes with the demo: this opens it again"
    commands = {
        f"explain {journal} {rid}": "",
        f"dashboard --journal {journal}": page,
        f"replay {journal}": "the same decisions again",
        f"check {journal}": "every law over the record",
        f"export --perfetto trace.json {journal}": "every request and step, for ui.perfetto.dev",
    }
    for words, what in commands.items():
        line = f"  {program()} {words}" + (f"    # {what}" if what else "")
        run.console.print(line, highlight=False, soft_wrap=True, markup=False)


def _start_servers(command: DemoCommand, run: _Run, logs: Path) -> None:
    api_port = free_port(HOST, command.api_port)
    _say_if_moved(run.console, "API", command.api_port, api_port)
    run.api_url = f"http://{HOST}:{api_port}"
    flags = ["serve", "--server.host", HOST, "--server.port", str(api_port), *SERVE_FLAGS, *_mode(command)]
    flags += ["--journal", str(command.journal) if command.journal is not None else "none"]
    run.children.append(Child("server", "telemetry.cli", flags, log=logs / "server.log"))
    if command.dashboard:
        page_port = free_port(HOST, command.dashboard_port, avoid=frozenset({api_port}))
        _say_if_moved(run.console, "dashboard", command.dashboard_port, page_port)
        flags = ["dashboard", run.api_url, "--host", HOST, "--port", str(page_port)]
        run.children.append(Child("dashboard", "telemetry.cli", flags, log=logs / "dashboard.log"))
        run.page_url = f"http://{HOST}:{page_port}"


def _mode(command: DemoCommand) -> list[str]:
    """A demo stops at the first broken law, unless it was asked for something else: by flag, or by the environment."""
    if command.on_violation is None and environment_name("--on-violation") in os.environ:
        return []
    return ["--on-violation", command.on_violation or "raise"]


def _say_if_moved(console: Console, name: str, wanted: int, got: int) -> None:
    if wanted not in {0, got}:
        console.print(f"port {wanted} is taken: the {name} takes {got}", style="yellow", highlight=False)


def _wait_until_ready(run: _Run) -> str:
    """Show progress until server and dashboard answer. Returns the model's name."""
    if not run.console.is_terminal:
        run.console.print("starting, and loading the model")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=run.console, transient=True) as progress, httpx.Client(trust_env=False) as client:
        progress.add_task("loading the model", total=None)
        _wait_for(run, client, f"{run.api_url}/ready")
        model = str(client.get(f"{run.api_url}/v1/models", timeout=10.0).json()["data"][0]["id"])
        if run.page_url is not None:
            _wait_for(run, client, f"{run.page_url}/_stcore/health")
    return model


def _wait_for(run: _Run, client: httpx.Client, url: str) -> None:
    """Ask `url` until it answers 200."""
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        run.check_children()
        # Nobody listens yet, or the server is busy starting: ask again.
        with contextlib.suppress(httpx.TransportError):
            if client.get(url, timeout=2.0).status_code == httpx.codes.OK:
                return
        time.sleep(_POLL_S)
    logs = "\n".join(child.tail() for child in run.children)
    raise DemoFailed(f"{url} did not answer 200 within {_READY_TIMEOUT_S:.0f} s; the end of the logs:\n{logs}")


def _run_load(command: DemoCommand, run: _Run, logs: Path, model: str) -> bool:
    """Run the load generator to its end, showing the status meanwhile. True when Ctrl-C ended it."""
    flags = ["--base-url", run.api_url, "--model", model, "--seed", str(command.seed)]
    flags += ["--duration", str(command.duration)]
    if command.rate is not None:
        flags += ["--rate", str(command.rate)]
    until = f"for {command.duration:g} s, then finishing" if command.duration else "until Ctrl-C"
    run.console.print(f"[dim]load       [/]rows of the Azure conversation trace, {until}", highlight=False)
    load = Child("load generator", "telemetry.demo.load", flags, log=logs / "load.log", keep_output=True)
    try:
        return _watch_load(load, run)
    finally:
        load.stop(_SERVER_STOP_S)


def _watch_load(load: Child, run: _Run) -> bool:
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_lines, args=(load.output, lines), name="load-lines", daemon=True)
    reader.start()
    is_interrupted = False
    with _status_display(run.console) as display:
        while True:
            try:
                _show_until_end(lines, run, display)
                break
            except (KeyboardInterrupt, _Ended):
                if is_interrupted:
                    raise
                is_interrupted = True
                load.signal(signal.SIGINT)  # it drops what is under way and says its last line
    status = load.stop(_SERVER_STOP_S)
    if run.tally.sent is None:
        raise DemoFailed(f"the load generator ended with status {status} before its time:\n{load.tail()}")
    return is_interrupted


def _show_until_end(lines: queue.SimpleQueue[dict[str, Any] | None], run: _Run, display: _Display) -> None:
    """Take lines until the generator's last one, reading /metrics once a second."""
    before, before_s = run.scrape, time.monotonic()
    while True:
        now_s = time.monotonic()
        if now_s - before_s >= _STATUS_S:
            run.check_children()
            run.read_metrics()
            display.show(status_line(run.scrape, before, now_s - before_s, run.tally))
            before, before_s = run.scrape, now_s
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        if line is None:
            return
        run.tally.take(line)


def _read_lines(stream: IO[bytes], lines: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """On a thread of its own: the generator's lines, then None at its end."""
    try:
        for line in stream:
            lines.put(json.loads(line))
    finally:
        lines.put(None)


class _Display:
    """Draws the status: in place on a terminal, as a line now and then in a log."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live
        self._next_log_s = 0.0

    def show(self, line: Text) -> None:
        if self._live is not None:
            self._live.update(line)
        elif time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + _LOG_STATUS_S
            self._console.print(line, soft_wrap=True)


@contextlib.contextmanager
def _status_display(console: Console) -> Iterator[_Display]:
    if console.is_terminal:
        with Live(Text("starting the load"), console=console, refresh_per_second=4, transient=True) as live:
            yield _Display(console, live)
    else:
        yield _Display(console, None)


@contextlib.contextmanager
def _signals_end_the_demo() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal end the demo in order.

    SIGINT also where a script started the demo in the background, which is with that signal ignored.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        raise _Ended(signal.Signals(number).name)

    wanted = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.signal(number, end) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
