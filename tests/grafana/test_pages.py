"""Every page, end to end: a fault in a real engine, a real Prometheus, a real Alertmanager, and the webhook behind it.

One engine per fault, all at once, under rules whose windows are a tenth of what they are in production; promtool has
the full ones (test_rule_windows.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from grafana.receiver import Receiver
from grafana.rules import ALERTS
from tests.grafana.needs import needs
from tests.grafana.stack import stack, wait_for
from tests.grafana.trickle import Trickle, trickling
from tests.telemetry.test_launch import Served, serving

PAGES = {alert.name for alert in ALERTS if alert.severity == "page"}
#: Alerts that a slow machine may raise about an engine in which nothing is wrong.
OF_SPEED = {"AdmitscopeStuck", "AdmitscopeDown"} | {alert.name for alert in ALERTS if "SLO" in alert.name}
#: Ten engines share what may be two cores.
STEP = ("--executor.simulated-step-ms", "20")


class Ill(NamedTuple):
    """An engine with something wrong.

    fault  a name of faulty_engine.FAULTS; None: nothing is patched, flags and load are enough
    pages  what must be received about it
    """

    name: str
    fault: str | None
    pages: frozenset[str]
    flags: tuple[str, ...] = ()
    load: Trickle | None = None


class Told(NamedTuple):
    """What the webhook was sent."""

    alert: str
    instance: str
    status: str


def _told(receiver: Receiver) -> set[Told]:
    return {Told(one.name, one.instance, one.status) for one in receiver.notices}


def ill(name: str, fault: str | None, *pages: str, flags: tuple[str, ...] = (), **load: int) -> Ill:
    return Ill(name, fault, frozenset(f"Admitscope{page}" for page in pages), flags, Trickle("", **load))


ENGINES = (
    ill("violation", "violation", "InvariantViolation"),
    ill("leak", "leak", "KVLeak", flags=("--checker.audit-period-s", "0.5")),
    ill("residue", "residue", "KVIdleResidue", requests=5),
    ill("stuck", "stuck", "Stuck"),
    # Nothing is done either, so that the loop turns in vain: the other half of the same rule.
    ill("claim", "claim", "ClaimFailure", "Stuck"),
    ill("silence", "silence", "CheckerSilent"),
    ill(
        "one at a time",
        None,
        "QueueSLOBurn",
        flags=("--scheduler.max-running-requests", "1"),
        clients=6,
        max_tokens=30,
    ),
    ill(
        "small chunks",
        None,
        "TTFTSLOBurn",
        flags=("--scheduler.chunked-prefill-size", "16", "--executor.simulated-step-ms", "60"),
        prompt_tokens=400,
        max_tokens=2,
    ),
    ill("killed", None, "Down"),
    ill("well", None),
)


def _start(folder: Path, engine: Ill) -> Served:
    home = folder / engine.name.replace(" ", "-")
    home.mkdir()
    flags = (*STEP, *engine.flags)
    if engine.fault is None:
        return Served(home, *flags)
    return Served(home, "--fault", engine.fault, *flags, module="tests.grafana.faulty_engine")


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, Served]]:
    """All engines by name; whatever is left of them is killed."""
    started: dict[str, Served] = {}
    try:
        with ThreadPoolExecutor(len(ENGINES)) as pool:
            futures = {engine.name: pool.submit(_start, folder, engine) for engine in ENGINES}
            for name, future in futures.items():
                started[name] = future.result()
        yield started
    finally:
        for served in started.values():
            served.process.kill()
            served.process.communicate()


def test_the_engines_cover_every_page() -> None:
    assert frozenset().union(*(engine.pages for engine in ENGINES)) == PAGES


@needs("prometheus", "prometheus-alertmanager")
def test_each_page_is_received_behind_alertmanager(tmp_path: Path) -> None:
    with running(tmp_path) as engines:
        targets = {name: served.url.removeprefix("http://") for name, served in engines.items()}
        named = {target: name for name, target in targets.items()}
        wanted = {(page, targets[engine.name]) for engine in ENGINES for page in engine.pages}
        loads = [engine.load._replace(url=engines[engine.name].url) for engine in ENGINES if engine.load is not None]
        with stack(tmp_path, list(targets.values())) as servers, trickling(loads):
            prometheus, receiver = servers

            def up() -> int:
                return len(prometheus.query('up{job="admitscope"} == 1'))

            wait_for(lambda: up() == len(ENGINES), lambda: f"{up()} of {len(ENGINES)} engines are scraped")
            engines["killed"].process.kill()

            def missing() -> set[tuple[str, str]]:
                got = {(one.alert, one.instance) for one in _told(receiver) if one.status == "firing"}
                return {(page, named[target]) for page, target in wanted - got}

            wait_for(
                lambda: not missing(),
                lambda: f"not received: {sorted(missing())}; alerts: {prometheus.ask('/api/v1/alerts')}",
            )
            # What was down comes back, and that is told too.
            (port,) = (int(target.rpartition(":")[2]) for name, target in targets.items() if name == "killed")
            with serving(tmp_path / "killed", *STEP, port=port):
                wait_for(
                    lambda: Told("AdmitscopeDown", targets["killed"], "resolved") in _told(receiver),
                    lambda: f"the end of AdmitscopeDown was not received: {_told(receiver)}",
                )
            received = list(receiver.notices)
            unhealthy = [rule["name"] for rule in prometheus.rules() if rule["health"] != "ok"]
    assert not unhealthy
    meaning = {alert.name: alert.meaning for alert in ALERTS}
    for one in received:
        assert one.route == ("page" if one.name in PAGES else "ticket"), "each goes the way of its severity"
        assert one.summary == meaning[one.name]
    of_the_killed = {one.name for one in received if named[one.instance] == "killed"}
    assert not of_the_killed - OF_SPEED, "an engine that is down raises much else, which the cause inhibits"
    of_the_well = {one.name for one in received if named[one.instance] == "well"}
    assert not of_the_well - OF_SPEED


@pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])
def test_a_fault_that_is_named_exists(engine: Ill) -> None:
    from tests.grafana.faulty_engine import FAULTS

    assert engine.fault is None or engine.fault in FAULTS
