"""What a broken law does, end to end: a server whose engine is broken on purpose, in each mode of its checker."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import ExecutorConfig
from engine.llm_engine import EngineRequest
from engine.sampling_params import SamplingParams
from invariants.violation import InvariantViolation, Violation
from telemetry.demo.scrape import Scrape
from telemetry.launch import Instance, build_instance
from telemetry.settings import ServeCommand

CANARY = "the canary Zerbinetta sings"
DEADLINE_S = 60
#: Every admission from the third on is charged twice; or, for audits, pages change owner without an event.
FAULTS = {
    "double_charge": """
from engine.scheduler import ledgers
real, calls = ledgers.Budget.charge, []
def twice(self, cost):
    calls.append(1)
    return real(real(self, cost), cost) if len(calls) > 2 else real(self, cost)
ledgers.Budget.charge = twice
""",
    "silent_owner": """
from engine.scheduler.scheduler import Scheduler
real = Scheduler.complete
def complete(self, times):
    real(self, times)
    for lease in self.kv.leases.values():
        self.kv.pool._owners[int(lease.pages[lease.count - 1])] = 77
Scheduler.complete = complete
""",
}
_MAIN = "\nimport sys\nfrom telemetry.cli import main\nsys.exit(main(sys.argv[1:]))\n"


class Broken:
    """A running `admitscope serve` with a fault in its engine."""

    def __init__(self, folder: Path, fault: str, *flags: str, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ADMITSCOPE_")}
        self._errors = (folder / "stderr").open("w")
        common = ("serve", "--server.port", "0", "--executor.kind", "simulated", "--executor.simulated-step-ms", "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", FAULTS[fault] + _MAIN, *common, "--cache.num-pages", "64", *flags],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=clean | (environment or {}) | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        self.url = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.match(r"  API +(http://\S+)/v1", line)
            self.url = found[1] if found else self.url
            if line.startswith("  page"):
                break

    def __enter__(self) -> Broken:
        assert self.url, (self.folder / "stderr").read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def complete(self, tokens: int = 8) -> int:
        """One request; the status of its answer."""
        body = {"model": "simulated", "prompt": CANARY, "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=DEADLINE_S, trust_env=False).status_code

    def scrape(self) -> Scrape:
        return Scrape(httpx.get(f"{self.url}/metrics", timeout=DEADLINE_S, trust_env=False).text)

    def until(self, holds: Callable[[Scrape], bool]) -> Scrape:
        """The first scrape for which `holds` is true."""
        for _ in range(DEADLINE_S * 20):
            scrape = self.scrape()
            if holds(scrape):
                return scrape
            time.sleep(0.05)
        raise AssertionError((self.folder / "stderr").read_text()[-2_000:])

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def bundles(self) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob("journals/evidence/*/violation.json"))
        return [json.loads(file.read_text("utf-8")) for file in files]


def shown_again(bundle: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the bundle's first command, in a process without the fault."""
    words = shlex.split(bundle["commands"][0]["command"])
    return subprocess.run(
        [sys.executable, "-m", "telemetry.cli", *words[1:]],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )


def test_record_counts_keeps_evidence_and_serves_on(tmp_path: Path) -> None:
    with Broken(tmp_path, "double_charge", "--checker.evidence-per-law", "2") as served:
        assert [served.complete() for _ in range(6)] == [200] * 6
        scrape = served.until(lambda s: s.total("evidence_bundles_total", outcome="written") >= 2)
        broken = scrape.total("violations_total", id="INV-BUDGET-03")
        assert broken > 2
        assert scrape.total("invariant_laws", mode="record") > 20
        assert scrape.total("invariant_laws", mode="raise") == scrape.total("invariant_laws", mode="off") == 0
        assert scrape.total("evidence_bundles_total") == scrape.total("violations_total")
        assert scrape.total("evidence_bundles_total", outcome="limited") > 0
        assert httpx.get(f"{served.url}/ready", trust_env=False).status_code == 200
        assert served.end() == 0
    bundles = served.bundles()
    assert [bundle["id"] for bundle in bundles] == ["INV-BUDGET-03"] * 2
    assert all(bundle["mode"] == "record" for bundle in bundles)
    assert "between two steps" in bundles[0]["snapshot"]["taken"]
    again = shown_again(bundles[0], tmp_path)
    assert again.returncode == 1, again.stderr
    assert f"INV-BUDGET-03 at step {bundles[0]['step']}" in again.stdout
    said = (tmp_path / "stderr").read_text()
    assert "broken law (record): INV-BUDGET-03" in said
    assert bundles[0]["commands"][0]["command"] in said
    written = [path.read_text("utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 6
    assert not any("Zerbinetta" in text for text in written)


def test_raise_stops_the_engine_and_every_client_is_told(tmp_path: Path) -> None:
    with Broken(tmp_path, "double_charge", environment={"ADMITSCOPE_ON_VIOLATION": "raise"}) as served:
        statuses = [served.complete() for _ in range(4)]
        assert statuses == [200, 200, 503, 503]
        scrape = served.until(lambda s: s.total("evidence_bundles_total", outcome="written") == 1)
        assert scrape.total("violations_total") == 1
        assert scrape.total("invariant_laws", mode="raise") > 20
        assert httpx.get(f"{served.url}/ready", trust_env=False).status_code == 503
        assert served.end() == 1
    (bundle,) = served.bundles()
    assert bundle["mode"] == "raise"
    assert "of the engine that stopped" in bundle["snapshot"]["taken"]
    again = shown_again(bundle, tmp_path)
    assert again.returncode == 1, again.stderr
    assert bundle["found"] in again.stdout
    assert "Traceback" in (tmp_path / "stderr").read_text()


def test_off_judges_nothing(tmp_path: Path) -> None:
    with Broken(tmp_path, "double_charge", "--on-violation", "off") as served:
        assert [served.complete() for _ in range(4)] == [200] * 4
        scrape = served.scrape()
        assert scrape.total("violations_total") == scrape.total("invariant_checks_total") == 0
        assert scrape.total("invariant_check_seconds_total") == 0
        assert scrape.total("invariant_laws", mode="off") > 20
        assert scrape.total("invariant_audit_period_seconds") == 0
        status = httpx.get(f"{served.url}/observe/status", trust_env=False).json()
        assert status["invariants_checked"] is False
        assert served.end() == 0
    assert served.bundles() == []


def test_a_single_law_may_be_treated_otherwise(tmp_path: Path) -> None:
    flags = ("--on-violation", "raise", "--checker.overrides", "INV-BUDGET-03=record")
    with Broken(tmp_path, "double_charge", *flags) as served:
        assert [served.complete() for _ in range(5)] == [200] * 5
        scrape = served.scrape()
        assert scrape.total("violations_total", id="INV-BUDGET-03") > 0
        assert scrape.total("invariant_laws", mode="record") == 1
    with Broken(tmp_path, "double_charge", "--checker.overrides", "INV-BUDGET-03=raise") as served:
        assert [served.complete() for _ in range(3)] == [200, 200, 503]


@pytest.mark.parametrize("mode", ["raise", "record"])
def test_what_an_audit_finds_counts_as_much(tmp_path: Path, mode: str) -> None:
    """No event says that a page changed hands; the recount that is due meanwhile does."""
    flags = ("--on-violation", mode, "--checker.audit-period-s", "0.05")
    with Broken(tmp_path, "silent_owner", *flags) as served:
        status = served.complete(tokens=900)
        scrape = served.until(lambda s: s.total("evidence_bundles_total", outcome="written") > 0)
        assert scrape.total("invariant_audits_total", part="ownership") > 0
        assert scrape.total("invariant_audit_period_seconds") == 0.05
        assert scrape.total("violations_total", id="INV-PAGE-02") > 0
        if mode == "raise":
            assert status == 503
            assert scrape.total("violations_total") == 1
            assert served.end() == 1
        else:
            assert status == 200
            assert served.end() == 0
    bundle = next(bundle for bundle in served.bundles() if bundle["id"] == "INV-PAGE-02")
    assert bundle["found_by"] == "audit"
    again = shown_again(bundle, tmp_path)
    assert again.returncode == 1, again.stderr
    assert "by audit" in again.stdout
    assert bundle["found"] in again.stdout


# --- the composition root, in process ---------------------------------------------------------------------------------


def _instance(**fields: Any) -> Instance:
    return build_instance(ServeCommand(executor=ExecutorConfig(kind="simulated"), **({"journal": None} | fields)))


def test_a_checker_that_is_off_hears_nothing() -> None:
    instance = _instance(on_violation="off")
    try:
        assert instance.checking.sinks == ()
        instance.engine.add_request(
            EngineRequest(rid="r", prompt_ids=(1, 2, 3), params=SamplingParams(max_new_tokens=2))
        )
        instance.engine.step()
        assert instance.checker.evidence() == ()
        assert not any(instance.checker.checks_by_group.values())
    finally:
        instance.close()


def test_an_audit_that_raises_ends_the_engine_at_its_next_step() -> None:
    instance = _instance(on_violation="raise")
    try:
        engine, auditor = instance.engine, instance.checking.auditor
        assert auditor is not None
        engine.add_request(EngineRequest(rid="r", prompt_ids=tuple(range(40)), params=SamplingParams(max_new_tokens=8)))
        engine.step()
        lease = engine.scheduler.kv.leases["r"]
        engine.scheduler.kv.pool._owners[int(lease.pages[0])] += 1
        auditor.audit()
        assert engine.has_work
        with pytest.raises(InvariantViolation, match="INV-PAGE-02"):
            engine.step()
        assert engine.is_dead
    finally:
        instance.close()


def test_an_idle_engine_is_ended_as_well() -> None:
    instance = _instance(on_violation="raise")
    try:
        assert not instance.engine.has_work
        instance.engine.condemn(InvariantViolation(Violation("INV-PAGE-01", "", "", "", 0, None, ())))
        assert instance.engine.has_work
        with pytest.raises(InvariantViolation):
            instance.engine.step()
    finally:
        instance.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"on_violation": "off"}, "off: no law is judged"),
        ({"on_violation": "record", "checker": {"audit_period_s": None}}, r"laws: \d+ record; no audits"),
        ({"on_violation": "raise", "checker": {"overrides": "INV-PROG-01=off"}}, r"laws: 1 off, \d+ raise; an audit"),
    ],
)
def test_a_server_says_how_it_is_checked(fields: dict[str, Any], words: str) -> None:
    instance = _instance(**fields)
    try:
        assert re.match(words, instance.checking.words())
    finally:
        instance.close()


def test_others_may_hear_of_violations_too() -> None:
    instance = _instance(on_violation="record")
    try:
        told: list[Violation] = []
        instance.checking.listeners.append(told.append)
        instance.engine.add_request(
            EngineRequest(rid="r", prompt_ids=(1, 2, 3), params=SamplingParams(max_new_tokens=2))
        )
        instance.engine.scheduler.publisher.seq += 3
        instance.engine.step()
        assert instance.listeners.settle()
        assert [violation.id for violation in told] == ["INV-STEP-02"]
    finally:
        instance.close()


def test_no_journal_no_evidence(tmp_path: Path) -> None:
    for fields in ({"journal": None}, {"journal": tmp_path, "checker": {"evidence": False}}):
        instance = _instance(**fields)
        try:
            assert instance.checking.evidence is None
        finally:
            instance.close()
    assert not (tmp_path / "evidence").exists()
