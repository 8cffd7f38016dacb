"""The running whole, by its command line: it serves, is observed, records, and ends in order."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import ExecutorConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.events import RequestArrived, ResponseSent
from engine.llm_engine import EngineRequest
from engine.sampling_params import SamplingParams
from invariants.violation import InvariantViolation
from telemetry.demo.scrape import Scrape
from telemetry.launch import Instance, build_instance
from telemetry.ports import PortTaken, bind_listener, free_port, port_of
from telemetry.replay import replay
from telemetry.settings import ServeCommand

SIMULATED = ("--executor.kind", "simulated", "--executor.simulated-step-ms", "1")


class Served:
    """A running `admitscope serve`."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        limits: tuple[str, ...] = (),
        module: str = "telemetry.cli",
        port: int = 0,
    ) -> None:
        words = [sys.executable, "-m", module, "serve", "--server.port", str(port), *SIMULATED, *flags]
        if limits:
            words = ["prlimit", *limits, *words]
        self.process = subprocess.Popen(
            words,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("ADMITSCOPE_")}
            | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        self.said = ""
        self.url = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            found = re.match(r"  API +(http://\S+)/v1", line)
            if found:
                self.url = found[1]
            if line.startswith("  page"):
                break

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Send a signal; exit status, and all that it said on either stream."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, self.said + out, err


@contextlib.contextmanager
def serving(folder: Path, *flags: str, **options: Any) -> Iterator[Served]:
    served = Served(folder, *flags, **options)
    try:
        assert served.url, served.process.communicate(timeout=60)
        yield served
    finally:
        served.process.kill()
        served.process.wait()
        for stream in (served.process.stdout, served.process.stderr):
            assert stream is not None
            stream.close()


def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "simulated", "prompt": [40] * 50, "max_tokens": 20, "ignore_eos": True} | fields
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cli(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "telemetry.cli", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_it_serves_is_observed_records_and_ends_in_order(tmp_path: Path) -> None:
    with serving(tmp_path, "--cache.num-pages", "64") as served:
        answers = [complete(served.url) for _ in range(3)]
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [20, 20, 20]
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        scrape = Scrape(httpx.get(f"{served.url}/metrics", trust_env=False).text)
        assert scrape.total("requests_received_total") == 3
        assert scrape.total("generation_tokens_total") == 60
        assert scrape.total("admissions_total", reason="admitted_whole") == 3
        assert scrape.total("invariant_checks_total") > 0
        assert scrape.total("violations_total") == 0
        assert scrape.total("telemetry_errors_total") == 0
        assert scrape.total("kv_pages") == 64
        status = httpx.get(f"{served.url}/observe/status", trust_env=False).json()
        assert status["requests_received"] == 3
        assert status["invariants_checked"] is True
        assert status["violations_total"] == 0
        refused = httpx.post(f"{served.url}/v1/completions", json={"model": "simulated", "prompt": ""}, trust_env=False)
        assert refused.status_code == 400
        status = httpx.get(f"{served.url}/observe/status", trust_env=False).json()
        assert status["requests_rejected"]["invalid"] == 1
        code, said, err = served.end()
    assert code == 0, err
    assert "64 pages of 16 tokens, made-up tokens)" in said
    assert "Traceback" not in err
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    assert str(journal.name) in said

    report = replay(journal)
    assert report.verdict == "identical"
    assert report.events > 50
    assert report.torn is None

    again = cli(tmp_path, "replay", str(journal))
    assert again.returncode == 0
    assert "identical" in again.stdout
    assert json.loads(cli(tmp_path, "replay", str(journal), "--json").stdout)["verdict"] == "identical"
    told = cli(tmp_path, "explain", str(journal), answers[1]["id"])
    assert told.returncode == 0, told.stderr
    assert "48 tokens found in the cache" in told.stdout
    assert (
        json.loads(cli(tmp_path, "explain", str(journal), answers[1]["id"], "--json").stdout)["rid"] == answers[1]["id"]
    )
    unknown = cli(tmp_path, "explain", str(journal), "cmpl-nobody")
    assert unknown.returncode == 1
    assert answers[0]["id"] in unknown.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_finish(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path, "--journal", "none") as served:
        finishes: list[str] = []
        client = httpx.Client(timeout=60, trust_env=False)
        body = {"model": "simulated", "prompt": [40] * 50, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with client, client.stream("POST", f"{served.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)  # it runs
            served.process.send_signal(number)
            for line in lines:
                if line.startswith("data: {"):
                    finish = json.loads(line[6:])["choices"][0]["finish_reason"]
                    finishes.extend([finish] if finish else [])
        served.process.wait(60)
        assert finishes == ["length"]
        assert served.process.returncode == 0
    assert not (tmp_path / "journals").exists()


def test_a_taken_port_is_named_at_once(tmp_path: Path) -> None:
    with bind_listener("127.0.0.1", 0) as holder:
        port = str(port_of(holder))
        done = cli(tmp_path, "serve", *SIMULATED, "--server.port", port)
        assert done.returncode == 2
        assert port in done.stderr
        assert "taken" in done.stderr
        assert "Traceback" not in done.stderr
        with serving(tmp_path, "--server.port", port, "--pick-port", "--journal", "none") as served:
            assert f"port {port} is taken" in served.said
            assert not served.url.endswith(f":{port}")
            assert httpx.get(f"{served.url}/ready", trust_env=False).status_code == 200


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model.path", "no-such-model.gguf", "--executor.kind", "torch"), "no-such-model.gguf"),
        (("--journal", "a-file/below"), "a-file/below"),
        (("--server.host", "192.0.2.1", "--server.api-key", "0123456789"), "192.0.2.1"),
    ],
)
def test_what_a_person_must_change_is_said_without_a_traceback(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    (tmp_path / "a-file").write_text("")
    done = cli(tmp_path, "serve", *SIMULATED, "--server.port", "0", *flags)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# --- the composition root, in process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def built(command: ServeCommand) -> Iterator[Instance]:
    instance = build_instance(command)
    try:
        yield instance
    finally:
        instance.close()


def _command(**fields: Any) -> ServeCommand:
    return ServeCommand(executor=ExecutorConfig(kind="simulated"), journal=None, **fields)


def _break_a_law(instance: Instance) -> None:
    """Publish an event that goes back in time: no engine may, and the checker must say so."""
    instance.engine.scheduler.publisher.emit(ResponseSent(0, 0, 0, "r", None, None, 0, 0, False))


def test_raise_stops_the_step_and_record_counts() -> None:
    with built(_command(on_violation="raise")) as instance, pytest.raises(InvariantViolation):
        _break_a_law(instance)
    with built(_command(on_violation="record")) as instance:
        _break_a_law(instance)
        assert instance.listeners.settle()
        assert instance.checker.total_violations > 0


def test_the_journal_never_holds_the_key_or_the_prompt(tmp_path: Path) -> None:
    with serving(tmp_path, "--server.api-key", "sesame-open-0123") as served:
        headers = {"Authorization": "Bearer sesame-open-0123"}
        body = {"model": "simulated", "prompt": "the quick brown fox jumps over the dog", "max_tokens": 3}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, trust_env=False)
        assert answer.status_code == 200
        assert httpx.get(f"{served.url}/metrics", trust_env=False).status_code == 401
        served.end()
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    text = journal.read_text("utf-8")
    assert "sesame" not in text
    assert "fox" not in text
    assert '"RequestArrived"' in text


def test_the_same_prompt_has_other_keys_in_another_run() -> None:
    """The hash chain is salted anew, so a journal does not betray a guessed prompt."""
    request = EngineRequest(rid="r", prompt_ids=tuple(range(1, 41)), params=SamplingParams(max_new_tokens=1))
    keys = []
    for _ in range(2):
        with built(_command()) as instance:
            instance.engine.add_request(request)
            assert instance.listeners.settle()
            (arrived,) = (event for event in instance.checker.evidence() if isinstance(event, RequestArrived))
            keys.append((arrived.page_keys, arrived.head32_key))
    assert len(keys[0][0]) == len(keys[1][0]) == 2 * 8
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]


# --- ports ------------------------------------------------------------------------------------------------------------


def test_ports() -> None:
    with bind_listener("127.0.0.1", 0) as holder:
        taken = port_of(holder)
        with pytest.raises(PortTaken, match=str(taken)):
            bind_listener("127.0.0.1", taken)
        with bind_listener("127.0.0.1", taken, pick=True) as other:
            assert port_of(other) != taken
        assert free_port("127.0.0.1", taken) != taken
    assert free_port("127.0.0.1", taken) == taken, "given back"
    assert free_port("127.0.0.1", taken, avoid=frozenset({taken})) != taken
    with pytest.raises(ConfigError, match=r"nowhere\.invalid"):
        bind_listener("nowhere.invalid", 0)


@pytest.mark.parametrize("host", [".a", "a..b", "x" * 300, "\u00fc..x"])
def test_a_host_that_is_no_name_is_said(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.host="):
        bind_listener(host, 0)


def test_a_journal_folder_that_takes_no_files_ends_the_start(tmp_path: Path) -> None:
    """Otherwise the run serves on and records nothing. /proc takes no files, whoever asks."""
    command = ServeCommand(journal=Path("/proc"), executor=ExecutorConfig(kind="simulated"))
    with pytest.raises(ConfigError, match=r"journal='/proc'.*`none` writes no journal"):
        build_instance(command)
    folder = tmp_path / "journals"
    instance = build_instance(command.model_copy(update={"journal": folder}))
    instance.close()
    assert list(folder.iterdir()) == [instance.journal.path] if instance.journal else False


def test_a_listener_is_exclusive_before_it_accepts() -> None:
    """Two servers that start together must not both believe they have the port."""
    with bind_listener("127.0.0.1", 0) as listener:
        results: list[str] = []

        def attempt() -> None:
            try:
                bind_listener("127.0.0.1", port_of(listener)).close()
            except PortTaken:
                results.append("taken")

        threads = [threading.Thread(target=attempt) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == ["taken"] * 4
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def test_chunks_follow_the_flags(tmp_path: Path) -> None:
    with serving(tmp_path, "--scheduler.chunked-prefill-size", "16", "--scheduler.max-prefill-tokens", "32") as served:
        complete(served.url)
        scrape = Scrape(httpx.get(f"{served.url}/metrics", trust_env=False).text)
    assert SchedulerConfig().chunked_prefill_size != 16
    assert scrape.total("admissions_total", reason="admitted_first_chunk") == 1
    assert scrape.total("admissions_total", reason="admitted_last_chunk") == 1


def test_an_audit_recounts_the_engine_and_finds_what_events_did_not_say() -> None:
    with built(_command(on_violation="record")) as instance:
        auditor = instance.checking.auditor
        assert auditor is not None
        request = EngineRequest(rid="r", prompt_ids=tuple(range(40)), params=SamplingParams(max_new_tokens=8))
        instance.engine.add_request(request)
        instance.engine.step()
        auditor.audit()
        assert instance.listeners.settle()
        assert instance.checker.total_violations == 0
        assert instance.checker.ns_by_tier[2] > 0
        # A page that changes hands without an event is what only a recount sees.
        lease = instance.engine.scheduler.kv.leases["r"]
        instance.engine.scheduler.kv.pool._owners[int(lease.pages[0])] += 1
        auditor.audit()
        assert instance.listeners.settle()
        assert instance.checker.total_violations > 0


def test_the_first_line_says_that_steps_overlap(tmp_path: Path) -> None:
    with serving(tmp_path, "--executor.overlap", "--cache.num-pages", "64") as served:
        complete(served.url)
        code, said, err = served.end()
    assert code == 0, err
    assert "64 pages of 16 tokens, made-up tokens, steps overlap)" in said.splitlines()[0]
    (journal,) = (tmp_path / "journals").glob("*.jsonl")
    assert replay(journal).verdict == "identical"
