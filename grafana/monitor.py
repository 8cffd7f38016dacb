"""`make monitor`. Owns: real Prometheus and Alertmanager against one engine, without Docker, until Ctrl-C.

    python -m grafana.monitor [URL]        URL of the engine, http://127.0.0.1:8000 unless given

Alerts that Alertmanager sends out are printed here. Both servers listen on loopback only; what they store lies in a
temporary folder and goes with them. The key of an engine that has one is in ADMITSCOPE_API_KEY.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

import httpx

from engine.errors import ConfigError
from grafana.boards.shared import LIVE, PAGES, TTFT_QUANTILES, TTFT_STACK, WAITING_BY_BLOCKER
from grafana.queries import INTERVAL, ONE
from grafana.receiver import Notice, Receiver
from grafana.rules import FOLDER as RULES
from grafana.servers import HOST, Server, ServerError, prometheus_config, start_alertmanager, start_prometheus
from telemetry.ports import bind_listener

USAGE_STATUS: Final = 2
#: Panels worth a link of their own.
SHOWN: Final = (WAITING_BY_BLOCKER, LIVE, PAGES, TTFT_QUANTILES, TTFT_STACK)
_POLL_S: Final = 0.5


def query(expr: str) -> str:
    """A board's query as Prometheus takes it: every engine, rates over a minute."""
    return expr.replace(INTERVAL, "1m").replace(f"{{{ONE}}}", "").replace(f"{ONE},", "")


def graph(pages: str, *expressions: str) -> str:
    """A link below Prometheus's `pages` with `expressions` drawn over the last 15 minutes."""
    words = []
    for number, expr in enumerate(expressions):
        words += [(f"g{number}.expr", query(expr)), (f"g{number}.tab", "0"), (f"g{number}.range_input", "15m")]
    return f"{pages}/graph?{urllib.parse.urlencode(words)}"


def target_of(url: str) -> str:
    """host:port of an engine's URL. Raises ServerError when it is none that can be scraped."""
    parts = urllib.parse.urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ServerError(f"engine URL {url!r}: {error}") from error
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise ServerError(f"engine URL {url!r}: http://HOST:PORT is needed")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port or 80}"


def refuse_taken(ports: Mapping[str, int]) -> None:
    """Raise ServerError for the first port that somebody has: their own logs say it less clearly, and later."""
    for name, port in ports.items():
        try:
            bind_listener(HOST, port).close()
        except (ConfigError, OverflowError) as error:
            raise ServerError(f"--{name}-port {port}: {error}") from error


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _told(notice: Notice) -> None:
    _say(f"  {notice.route:7}{notice.status:10}{notice.name} {notice.instance}: {notice.summary}")


def _pages(prometheus: Server) -> str:
    """Where Prometheus has its pages: Debian builds it with the older ones only."""
    new = httpx.get(f"{prometheus.url}/rules", trust_env=False, timeout=5)
    return prometheus.url if new.status_code == httpx.codes.OK else f"{prometheus.url}/classic"


def _announce(engine: str, prometheus: Server, alertmanager: Server) -> None:
    _say(f"Prometheus    {prometheus.url}         scrapes {engine}")
    pages = _pages(prometheus)
    _say(f"  rules       {pages}/rules")
    _say(f"  alerts      {pages}/alerts")
    for panel in SHOWN:
        _say(f"  {panel.title}:\n    {graph(pages, *(target.expr for target in panel.targets))}")
    # Debian's Alertmanager comes without pages of its own.
    _say(f"Alertmanager  {alertmanager.url}  what fires: amtool --alertmanager.url={alertmanager.url} alert")
    _say("Alerts appear below as they are sent. Ctrl-C ends both servers.")


def _answers(engine: str) -> bool:
    try:
        return httpx.get(f"{engine}/health", trust_env=False, timeout=5).status_code < httpx.codes.BAD_REQUEST
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT, SIGTERM and SIGHUP set; what they did before comes back afterwards."""
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def monitor(engine: str, *, prometheus_port: int, alertmanager_port: int, receiver_port: int) -> int:
    """Run both until a signal. Returns 0 then, 1 when one of them ended by itself. Raises ServerError."""
    target = target_of(engine)
    refuse_taken({"prometheus": prometheus_port, "alertmanager": alertmanager_port, "receiver": receiver_port})
    with contextlib.ExitStack() as stack:
        ended = stack.enter_context(_ended_by_signals())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="admitscope-monitor-")))
        receiver = stack.enter_context(Receiver(receiver_port, told=_told))
        alertmanager = start_alertmanager(folder=folder, port=alertmanager_port, receiver=receiver.url)
        stack.enter_context(alertmanager)
        config = prometheus_config(
            [target],
            rules=RULES / "admitscope.yml",
            alertmanager=f"{HOST}:{alertmanager_port}",
            api_key=os.environ.get("ADMITSCOPE_API_KEY"),
        )
        prometheus = stack.enter_context(start_prometheus(config, folder=folder, port=prometheus_port))
        for server in (alertmanager, prometheus):
            server.wait_ready()
        if not _answers(engine):
            _say(f"No engine answers at {engine} yet: `make demo` or `admitscope serve` starts one.")
        _announce(engine, prometheus, alertmanager)
        while not ended.wait(_POLL_S):
            for server in (alertmanager, prometheus):
                if server.process.poll() is not None:
                    _say(f"{server.name} ended with status {server.process.returncode}:\n{server.tail()}")
                    return 1
        _say("Ending both.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Take the command line. Returns the exit status; 2 for what a person must change first."""
    parser = argparse.ArgumentParser(prog="python -m grafana.monitor", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="the engine")
    parser.add_argument("--prometheus-port", type=int, default=9190)
    parser.add_argument("--alertmanager-port", type=int, default=9193)
    parser.add_argument("--receiver-port", type=int, default=9199, help="where Alertmanager sends to")
    words = parser.parse_args(argv)
    try:
        return monitor(
            words.url.rstrip("/"),
            prometheus_port=words.prometheus_port,
            alertmanager_port=words.alertmanager_port,
            receiver_port=words.receiver_port,
        )
    except (ServerError, OSError) as error:
        sys.stderr.write(f"monitor: {error}\n")
        return USAGE_STATUS


if __name__ == "__main__":
    raise SystemExit(main())
