"""The dashboard as a child process. Owns: starting Streamlit on `dashboard/app.py`, by path, and ending it with us."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Final

from engine.errors import ConfigError
from telemetry.client import engine_url, refuse_odd
from telemetry.journal_reader import segment_files
from telemetry.ports import PortTaken, free_port
from telemetry.recorded_tables import is_tables, refuse_one_table
from telemetry.settings_page import DashboardCommand

#: Beside this package, in a checkout and in a wheel. By path: the layers below the dashboard do not import it.
APP: Final = Path(__file__).resolve().parent.parent / "dashboard" / "app.py"
_STOP_S: Final = 5.0


def streamlit_command(command: DashboardCommand, port: int) -> list[str]:
    """The command line of the child. Nothing leaves the machine: no statistics, no address look-up, no browser."""
    return [
        sys.executable, "-m", "telemetry.watchdog", "streamlit", "run", str(APP),
        "--server.address", command.host,
        "--server.port", str(port),
        *(word for name in [*names_of(command.host), *command.allow_host] for word in ("--server.allowedHosts", name)),
        "--server.headless", "true",
        "--server.fileWatcherType", "none",
        "--browser.serverAddress", command.host,
        "--browser.gatherUsageStats", "false",
        "--", *_places(command),
    ]  # fmt: skip


def names_of(host: str) -> list[str]:
    """Names and addresses that browsers may call the page by: those of this machine, and `host`.

    Streamlit takes any name unless told: a web page whose name is made to point here would then be of the same origin
    as this one, and could read what the engine says. For "all addresses" that is also this machine's own name and
    what it stands for.
    """
    names = ["localhost", "127.0.0.1", "::1"]
    bare = host.strip("[]")
    if bare not in {"", "0.0.0.0", "::"}:  # noqa: S104 - not bound here
        return list(dict.fromkeys([*names, bare]))
    own = socket.gethostname()
    try:
        names += [own, *(str(found[4][0]) for found in socket.getaddrinfo(own, None))]
    except OSError:
        names.append(own)
    return list(dict.fromkeys(names))


def _places(command: DashboardCommand) -> list[str]:
    """What the page is to show, as `dashboard/app.py` takes it."""
    words = [word for url in command.urls() for word in ("--url", url)]
    words += [word for journal in command.journals() for word in ("--journal", str(journal.absolute()))]
    words += [] if command.lessons is None else ["--lessons", str(command.lessons.absolute())]
    words += [] if command.trace_url is None else ["--trace-url", command.trace_url]
    words += [] if command.ttft_ms is None else ["--ttft-ms", str(command.ttft_ms)]
    return words + ([] if command.tbt_ms is None else ["--tbt-ms", str(command.tbt_ms)])


def run_page(command: DashboardCommand) -> int:
    """Show the page until SIGINT (Ctrl-C) or SIGTERM. Raises ConfigError when it cannot start."""
    if not APP.exists():
        raise ConfigError(f"{APP} is missing: the dashboard is not part of this installation")
    for url in command.urls():
        refuse_odd(url)
    for journal in command.journals():
        # Raises for a path that is no recording, before a page is promised.
        refuse_one_table(journal)
        if not is_tables(journal):
            segment_files(journal)
    port = free_port(command.host, command.port)
    if command.port not in {0, port}:
        if not command.pick_port:
            raise PortTaken(
                f"port {command.port} on {command.host} is taken: give another --port, or --pick-port for any"
            )
        print(f"port {command.port} is taken: taking {port}", flush=True)
    shown = ", ".join([*map(engine_url, command.urls()), *map(str, command.journals())])
    print(f"the page of {shown} is on http://{command.host}:{port}", flush=True)
    # The pipe ends with this process, however it ends, and the watchdog ends Streamlit with it.
    child = subprocess.Popen(streamlit_command(command, port), stdin=subprocess.PIPE)  # noqa: S603 - ours

    def end(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # A script starts its background jobs with SIGINT ignored; `serve` heeds one all the same.
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return child.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        child.terminate()
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert child.stdin is not None
        child.stdin.close()
