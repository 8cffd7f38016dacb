"""Real servers for tests. Owns: Prometheus, and Alertmanager with a receiver behind it, and asking them things."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from grafana.receiver import Receiver
from grafana.rules import Scale, rules
from grafana.servers import HOST, prometheus_config, start_alertmanager, start_prometheus
from telemetry.ports import free_port

#: A tenth of every window, `for` and threshold: an hour is six minutes, and most pages take half a minute.
TENTH = Scale(0.1)
GROUP_INTERVAL = "6s"
DEADLINE_S = 120.0


class Prometheus:
    """The HTTP API of a running Prometheus."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def ask(self, path: str, **words: str) -> Any:
        """`data` of an answer; AssertionError with the reason when there is none."""
        answer = self._client.post(path, data=words) if words else self._client.get(path)
        body = answer.json()
        assert body["status"] == "success", f"{words}: {body.get('error')}"
        return body["data"]

    def query(self, expr: str, at_s: float | None = None) -> list[Any]:
        """The vector that `expr` is at a moment; now when it is None."""
        words = {"query": expr} if at_s is None else {"query": expr, "time": f"{at_s:.3f}"}
        result = self.ask("/api/v1/query", **words)["result"]
        assert isinstance(result, list)
        return result

    def ranged(self, expr: str, start_s: float, end_s: float) -> list[Any]:
        """The matrix that `expr` is in a stretch, second by second."""
        words = {"query": expr, "start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": "1"}
        result = self.ask("/api/v1/query_range", **words)["result"]
        assert isinstance(result, list)
        return result

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health."""
        return [rule for group in self.ask("/api/v1/rules")["groups"] for rule in group["rules"]]


class Stack(NamedTuple):
    """What runs."""

    prometheus: Prometheus
    receiver: Receiver


@contextlib.contextmanager
def stack(folder: Path, targets: Sequence[str], *, scale: Scale = TENTH) -> Iterator[Stack]:
    """The committed files with other addresses, one scrape a second, and rules `scale` times as slow."""
    rule_file = folder / "rules.yml"
    rule_file.write_text(rules(scale), encoding="utf-8")
    alerts, web = free_port(HOST, 0), free_port(HOST, 0)
    config = prometheus_config(targets, rules=rule_file, alertmanager=f"{HOST}:{alerts}", scrape_s=1)
    with (
        Receiver() as receiver,
        start_alertmanager(
            folder=folder, port=alerts, receiver=receiver.url, group_interval=GROUP_INTERVAL
        ) as alertmanager,
        start_prometheus(config, folder=folder, port=web) as prometheus,
        httpx.Client(base_url=prometheus.url, trust_env=False, timeout=30) as client,
    ):
        for server in (alertmanager, prometheus):
            server.wait_ready()
        yield Stack(Prometheus(client), receiver)


def wait_for(enough: Callable[[], bool], why: Callable[[], str], timeout_s: float = DEADLINE_S) -> None:
    """Until `enough` says so; AssertionError with `why` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not enough():
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.1)
