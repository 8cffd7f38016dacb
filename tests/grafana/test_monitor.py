"""`make monitor` against a real engine: ready, scraping, alerts told on its own output, and ended by one Ctrl-C."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import httpx
import promql_parser
import pytest

from grafana.monitor import SHOWN, graph, main, target_of
from grafana.receiver import Notice, Receiver
from grafana.servers import ServerError, find, prometheus_config
from telemetry.ports import free_port
from tests.grafana.needs import needs
from tests.grafana.stack import wait_for
from tests.telemetry.test_launch import serving

ROOT = Path(__file__).parents[2]
TAKEN = "stop who holds it, or choose another"


class Monitor:
    """A running `python -m grafana.monitor`; `lines` is what it said until it was ready."""

    def __init__(self, engine: str, folder: Path) -> None:
        ports = [str(free_port("127.0.0.1", 0)) for _ in range(3)]
        self.prometheus = f"http://127.0.0.1:{ports[0]}"
        self.alertmanager = f"http://127.0.0.1:{ports[1]}"
        names = ("--prometheus-port", "--alertmanager-port", "--receiver-port")
        words = [word for pair in zip(names, ports, strict=True) for word in pair]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grafana.monitor", engine, *words],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if "Ctrl-C" in line:
                break

    def end(self) -> tuple[int, str]:
        """Ctrl-C; exit status and the rest of what it said."""
        self.process.send_signal(signal.SIGINT)
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the monitor keeps what it stores."""
    made = tmp_path / "temporary"
    made.mkdir()
    return made


@pytest.fixture
def monitored(tmp_path: Path, folder: Path) -> Iterator[Monitor]:
    with serving(tmp_path) as served:
        running = Monitor(served.url, folder)
        try:
            yield running
        finally:
            running.process.kill()
            running.process.communicate()


@needs("prometheus", "prometheus-alertmanager")
def test_it_scrapes_tells_alerts_and_leaves_nothing(monitored: Monitor, folder: Path) -> None:
    said = "\n".join(monitored.lines)
    assert "No engine answers" not in said
    links = re.findall(rf"{monitored.prometheus}/\S+", said)
    assert len(links) == 2 + len(SHOWN)
    with httpx.Client(trust_env=False, timeout=30) as client:
        for link in links:
            page = client.get(link, follow_redirects=True)
            assert page.status_code == httpx.codes.OK, link
            # Prometheus may send its reader on to another page, which must still know what was asked.
            assert page.url.query == httpx.URL(link).query

        def query(expr: str) -> list[object]:
            found = client.get(f"{monitored.prometheus}/api/v1/query", params={"query": expr}).json()
            return list(found["data"]["result"])

        wait_for(lambda: bool(query('up{job="admitscope"} == 1')), lambda: "the engine is not scraped")
        rules = client.get(f"{monitored.prometheus}/api/v1/rules").json()["data"]["groups"]
        assert sum(len(group["rules"]) for group in rules) > 20
        alert = {
            "labels": {"alertname": "AdmitscopeDown", "severity": "page", "instance": "somewhere:1"},
            "annotations": {"summary": "A test says so."},
        }
        sent = client.post(f"{monitored.alertmanager}/api/v2/alerts", json=[alert])
        assert sent.status_code == httpx.codes.OK
    assert monitored.process.stdout is not None
    told = monitored.process.stdout.readline()
    assert told.split() == ["page", "firing", "AdmitscopeDown", "somewhere:1:", "A", "test", "says", "so."]
    shown = subprocess.run(
        [find("amtool"), f"--alertmanager.url={monitored.alertmanager}", "alert"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"amtool --alertmanager.url={monitored.alertmanager} alert" in said
    assert "AdmitscopeDown" in shown.stdout
    code, rest = monitored.end()
    assert (code, rest.strip()) == (0, "Ending both.")
    assert list(folder.iterdir()) == []
    for url in (monitored.prometheus, monitored.alertmanager):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/-/ready", trust_env=False)


@needs("prometheus", "prometheus-alertmanager")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs Debian's util-linux: apt-get install")
def test_nothing_outlives_a_monitor_that_was_killed(folder: Path) -> None:
    monitor = Monitor("http://127.0.0.1:1", folder)
    said = "\n".join(monitor.lines)
    monitor.process.kill()
    monitor.process.communicate()
    assert "No engine answers at http://127.0.0.1:1 yet" in said

    def answers(url: str) -> bool:
        try:
            return httpx.get(f"{url}/-/ready", trust_env=False).status_code > 0
        except httpx.TransportError:
            return False

    for url in (monitor.prometheus, monitor.alertmanager):
        wait_for(lambda url=url: not answers(url), lambda url=url: f"{url} still answers")


def test_a_port_that_is_taken_is_said_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with Receiver() as taken:
        port = taken.url.rpartition(":")[2]
        assert main(["--alertmanager-port", port, "--receiver-port", "0", "--prometheus-port", "0"]) == 2
    said = capfd.readouterr().err
    assert said == f"monitor: --alertmanager-port {port}: port {port} on 127.0.0.1 is taken: {TAKEN}\n"


def test_a_missing_program_is_said_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["--receiver-port", "0"]) == 2
    assert "apt-get install prometheus-alertmanager" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "https://a:1", "http://", "http://a:b", "http://a:1/v1"])
def test_what_is_no_engine_is_refused(url: str) -> None:
    with pytest.raises(ServerError, match="engine URL"):
        target_of(url)


def test_addresses_of_engines() -> None:
    assert target_of("http://127.0.0.1:8000/") == "127.0.0.1:8000"
    assert target_of("http://[::1]:8000") == "[::1]:8000"
    assert target_of("http://host") == "host:80"


@pytest.mark.parametrize("panel", SHOWN, ids=[panel.title for panel in SHOWN])
def test_links_carry_queries_that_parse(panel: object) -> None:
    link = graph("http://p", *(target.expr for target in panel.targets))
    asked = urllib.parse.parse_qs(urllib.parse.urlsplit(link).query)
    assert len(asked) == 3 * len(panel.targets)
    for number in range(len(panel.targets)):
        promql_parser.parse(asked[f"g{number}.expr"][0])
    assert "$" not in link
    assert "instance" not in link


def test_a_key_reaches_the_scrape_and_the_committed_file_stays_as_it_is(tmp_path: Path) -> None:
    config = prometheus_config(["a:1", "b:2"], rules=tmp_path / "r.yml", alertmanager=None, api_key="secret-key")
    [job] = config["scrape_configs"]
    assert job["authorization"] == {"credentials": "secret-key"}
    assert job["static_configs"] == [{"targets": ["a:1", "b:2"]}]
    assert "alerting" not in config
    again = prometheus_config(["c:3"], rules=tmp_path / "r.yml", alertmanager="d:4", scrape_s=1)
    assert again["global"]["scrape_interval"] == "1000ms"
    assert "authorization" not in again["scrape_configs"][0]


def test_a_receiver_keeps_what_it_is_told() -> None:
    body = {
        "alerts": [
            {"status": "resolved", "labels": {"alertname": "A", "instance": "x:1"}, "annotations": {"summary": "S."}},
            {"status": "firing", "labels": {"alertname": "B"}, "annotations": {}},
        ]
    }
    told: list[Notice] = []
    with Receiver(told=told.append) as receiver:
        assert httpx.post(f"{receiver.url}/ticket", json=body, trust_env=False).status_code == httpx.codes.OK
        assert httpx.post(receiver.url, content=b"no JSON", trust_env=False).status_code == httpx.codes.BAD_REQUEST
        assert httpx.post(receiver.url, json={"no": "alerts"}, trust_env=False).status_code == httpx.codes.BAD_REQUEST
    assert told == receiver.notices
    assert told == [Notice("ticket", "resolved", "A", "x:1", "S."), Notice("ticket", "firing", "B", "", "")]
