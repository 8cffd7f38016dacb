"""Servers beside an engine. Owns: Debian's Prometheus and Alertmanager on loopback: their settings, start and end.

Both get the committed files of this folder with other addresses; nothing else about them differs from production.
Data, settings and logs lie in a folder that the caller gives and removes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import yaml

HERE: Final = Path(__file__).parent
HOST: Final = "127.0.0.1"
#: Program -> the Debian package that has it.
PACKAGES: Final = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
}
READY_S: Final = 60.0
_POLL_S: Final = 0.1
_STOP_S: Final = 10.0


class ServerError(Exception):
    """A server cannot be started. The message says what to do, or what the server said."""


def find(name: str) -> str:
    """Path of a program of PACKAGES. Raises ServerError that names the package."""
    found = shutil.which(name)
    if found is None:
        raise ServerError(f"{name} is not installed; on Debian or Ubuntu: apt-get install {PACKAGES[name]}")
    return found


def _ends_with_parent() -> tuple[str, ...]:
    """Words before a command that have Linux end it when the thread that starts it is gone, even after SIGKILL."""
    program = shutil.which("setpriv")
    return () if program is None else (program, "--pdeathsig", "TERM", "--")


class Server:
    """One running server; use as a context manager. `url` is where it answers, `log` what it said."""

    def __init__(self, command: Sequence[str], *, url: str, log: Path) -> None:
        self.name = Path(command[0]).name
        self.url, self.log = url, log
        with log.open("wb") as file:
            # A session of its own: the terminal's Ctrl-C reaches the caller, who ends both in order.
            self.process = subprocess.Popen(  # noqa: S603 - a program of PACKAGES with arguments made here
                [*_ends_with_parent(), *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until `/-/ready` says so. Raises ServerError with the end of its log when it ends or takes longer."""
        deadline_s = time.monotonic() + timeout_s
        with httpx.Client(trust_env=False, timeout=5) as client:
            while time.monotonic() < deadline_s:
                if self.process.poll() is not None:
                    raise ServerError(f"{self.name} ended with status {self.process.returncode}:\n{self.tail()}")
                try:
                    if client.get(f"{self.url}/-/ready").status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(_POLL_S)
        raise ServerError(f"{self.name} was not ready within {timeout_s:g} s:\n{self.tail()}")

    def tail(self, lines: int = 10) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-lines:])

    def stop(self) -> int:
        """SIGTERM, and SIGKILL when that was not heard. Returns the exit status; safe to call again."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def prometheus_config(
    targets: Sequence[str],
    *,
    rules: Path,
    alertmanager: str | None,
    scrape_s: float | None = None,
    api_key: str | None = None,
) -> dict[str, Any]:
    """grafana/prometheus.yml for other addresses.

    targets       host:port of each engine
    rules         the rule file
    alertmanager  host:port; None: alerts are evaluated and told to nobody
    scrape_s      seconds between scrapes; None: as committed
    """
    config: dict[str, Any] = yaml.safe_load((HERE / "prometheus.yml").read_text(encoding="utf-8"))
    config["rule_files"] = [str(rules.resolve())]
    if scrape_s is not None:
        interval = f"{scrape_s * 1000:.0f}ms"
        config["global"] |= {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval}
    if alertmanager is None:
        del config["alerting"]
    else:
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    [job] = config["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    if api_key is not None:
        job["authorization"] = {"credentials": api_key}
    return config


def start_prometheus(config: dict[str, Any], *, folder: Path, port: int) -> Server:
    """Prometheus on a loopback port, its exemplars kept. Raises ServerError."""
    program = find("prometheus")
    return Server(
        (
            program,
            f"--config.file={_written(folder / 'prometheus.yml', config)}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address={HOST}:{port}",
            "--enable-feature=exemplar-storage",
        ),
        url=f"http://{HOST}:{port}",
        log=folder / "prometheus.log",
    )


def start_alertmanager(*, folder: Path, port: int, receiver: str, group_interval: str | None = None) -> Server:
    """Alertmanager on a loopback port with the committed routes; `receiver` is the URL that webhooks go to.

    group_interval  instead of the committed one: news of a group that was told before, its end too, waits that long
    """
    program = find("prometheus-alertmanager")
    config: dict[str, Any] = yaml.safe_load((HERE / "alertmanager.yml").read_text(encoding="utf-8"))
    if group_interval is not None:
        config["route"]["group_interval"] = group_interval
    for one in config["receivers"]:
        for hook in one["webhook_configs"]:
            hook["url"] = f"{receiver}/{one['name']}"
    return Server(
        (
            program,
            f"--config.file={_written(folder / 'alertmanager.yml', config)}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address={HOST}:{port}",
            "--cluster.listen-address=",
        ),
        url=f"http://{HOST}:{port}",
        log=folder / "alertmanager.log",
    )


def _written(file: Path, config: dict[str, Any]) -> Path:
    # JSON is YAML; quoting it is nobody's problem then.
    file.touch(mode=0o600)  # it may hold a key
    file.write_text(json.dumps(config, indent=1), encoding="utf-8")
    return file
