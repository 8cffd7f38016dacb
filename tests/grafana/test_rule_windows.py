"""Alerts at full length: promtool runs each of them on series that must fire it and on series that must not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from grafana.rules import ALERTS, FOLDER
from grafana.servers import find
from tests.grafana.needs import needs
from tests.grafana.rule_cases import CASES, MINUTES, SECONDS, Case, unit_test

GRAFANA = FOLDER.parent


def told(*words: str) -> str:
    """What a tool says when it is content."""
    done = subprocess.run([find(words[0]), *words[1:]], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    for alert in ALERTS:
        mine = [case.labels is None for case in CASES if case.alert == alert.name]
        assert {True, False} <= set(mine), alert.name


def judged(folder: Path, *cases: Case) -> str:
    """promtool's word on `cases`, all in one run: starting it costs more than a case does."""
    files = []
    for interval in (SECONDS, MINUTES):
        tests = [unit_test(case) for case in cases if case.interval == interval]
        rules = str(FOLDER / "admitscope.yml")
        files.append(folder / f"cases-{interval}.yml")
        files[-1].write_text(json.dumps({"rule_files": [rules], "evaluation_interval": interval, "tests": tests}))
    return told("promtool", "test", "rules", *map(str, files))


@needs("promtool")
def test_each_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert "SUCCESS" in judged(tmp_path, *CASES)


@needs("promtool")
@pytest.mark.parametrize("fires", [True, False])
def test_a_case_that_is_wrong_is_noticed(tmp_path: Path, fires: bool) -> None:
    """Else a mistake in how cases are written would make all of them pass."""
    case = next(case for case in CASES if (case.labels is not None) == fires)
    with pytest.raises(AssertionError, match="FAILED"):
        judged(tmp_path, *CASES[:5], case._replace(labels=None if fires else {}))


@needs("promtool", "amtool")
def test_tools_accept_the_committed_files() -> None:
    assert "SUCCESS" in told("promtool", "check", "config", str(GRAFANA / "prometheus.yml"))
    assert "SUCCESS" in told("promtool", "check", "rules", str(FOLDER / "admitscope.yml"))
    assert "SUCCESS" in told("amtool", "check-config", str(GRAFANA / "alertmanager.yml"))
