"""The command itself: exit statuses, one-line faults, nothing heavy before it is needed."""

from __future__ import annotations

import functools
import http.server
import importlib.metadata
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from telemetry import cli, page
from telemetry.demo.processes import Child
from telemetry.ports import bind_listener, free_port, port_of
from telemetry.settings_page import DashboardCommand


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"admitscope {importlib.metadata.version('admitscope')}\n"


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).parent / "admitscope"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("admitscope ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "no-such-journal.jsonl"], "no-such-journal.jsonl"),
        (["explain", "no-such-journal.jsonl", "r1"], "no-such-journal.jsonl"),
        (["serve", "--cache.page-size", "0"], "--cache.page-size"),
        (["demo", "--duration", "inf"], "--duration"),
        (["dashboard", "--port", "99999"], "--port"),
        (["dashboard", "notaurl"], "notaurl"),
        (["dashboard", "http://127.0.0.1:abc"], "url='http://127.0.0.1:abc'"),
        (["top", "--once", "http://127.0.0.1:abc"], "url='http://127.0.0.1:abc'"),
        (["explain", "http://", "r1"], "url='http://'"),
    ],
)
def test_faults_are_lines_on_stderr_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert all(line.startswith("admitscope: ") for line in err.splitlines())


def test_of_several_runs_in_a_folder_the_one_that_is_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = (Path(__file__).parent / "data" / "explained.jsonl.gz").read_bytes()
    for name in ("20230101.jsonl.gz", "20240101.jsonl.gz"):
        (tmp_path / name).write_bytes(recorded)
    for words in (["replay", str(tmp_path)], ["check", str(tmp_path)], ["explain", str(tmp_path), "r0"]):
        cli.main(words)
        assert f"{tmp_path} holds 2 runs; this is the newest, 20240101.jsonl" in capsys.readouterr().err
    (tmp_path / "20230101.jsonl.gz").unlink()
    assert cli.main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_reader_that_has_seen_enough_is_no_fault(tmp_path: Path) -> None:
    """`admitscope --help | head -1` must not end in a traceback."""
    script = f"{sys.executable} -m telemetry.cli serve --help | head -1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith("usage: admitscope")
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is a thing of Linux")
def test_output_that_has_no_room_is_told_in_a_sentence() -> None:
    recorded = Path(__file__).parent / "data" / "explained.jsonl.gz"
    words = [sys.executable, "-m", "telemetry.cli", "explain", str(recorded), "r9", "--json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (2, "admitscope: its output: No space left on device\n")


@pytest.mark.parametrize("encoding", ["latin-1", "gbk"])
def test_a_terminal_that_lacks_a_letter_is_shown_its_number(encoding: str) -> None:
    recorded = Path(__file__).parent / "data" / "explained.jsonl.gz"
    words = [sys.executable, "-m", "telemetry.cli", "explain", str(recorded), "r9", "--lang", "zh"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(words, env=environment, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    first = done.stdout.decode(encoding).splitlines()[0]
    assert ("请求 r9" if encoding == "gbk" else r"\u8bf7\u6c42 r9") in first


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_runs_by_path_and_sends_nothing_away() -> None:
    words = page.streamlit_command(DashboardCommand(address="http://127.0.0.1:9"), 8600)
    assert Path(words[words.index("run") + 1]).name == "app.py"
    assert Path(words[words.index("run") + 1]).exists()
    assert words[words.index("--browser.gatherUsageStats") + 1] == "false"
    assert words[words.index("--server.headless") + 1] == "true"
    assert words[-2:] == ["--url", "http://127.0.0.1:9"]


def test_a_taken_port_of_the_page_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with bind_listener("127.0.0.1", 0) as holder:
        port = str(port_of(holder))
        assert cli.main(["dashboard", "--port", port]) == 2
    err = capsys.readouterr().err
    assert port in err
    assert "--pick-port" in err


def _answers(url: str, child: Child) -> bool:
    """One try, and a short rest after a miss."""
    assert child.status() is None, child.tail()
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        time.sleep(0.1)
        return False


def test_the_page_answers_and_ends_with_its_command(tmp_path: Path) -> None:
    port = free_port("127.0.0.1", 0)
    child = Child(
        "page", "telemetry.cli", ["dashboard", "http://127.0.0.1:9", "--port", str(port)], log=tmp_path / "log"
    )
    try:
        health = f"http://127.0.0.1:{port}/_stcore/health"
        assert any(_answers(health, child) for _ in range(600)), child.tail()
    finally:
        assert child.stop(20) == 0
    with bind_listener("127.0.0.1", port):
        pass  # nobody is left on the port


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_page_in_the_background_of_a_script_ends_by_either_signal(number: signal.Signals, tmp_path: Path) -> None:
    """A shell without job control starts `admitscope dashboard &` with SIGINT ignored."""
    port = free_port("127.0.0.1", 0)
    words = [sys.executable, "-m", "telemetry.cli", "dashboard", "http://127.0.0.1:9", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *words], stdout=log, stderr=log)
    try:
        while not _is_served(f"http://127.0.0.1:{port}/_stcore/health"):
            assert child.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.1)
        child.send_signal(number)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    with bind_listener("127.0.0.1", port):
        pass  # nobody is left on the port


def _is_served(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_a_web_server_that_is_no_engine_is_not_said_to_lack_a_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert cli.main(["explain", f"http://127.0.0.1:{server.server_port}", "r1"]) == 1
        server.shutdown()
    assert "is this an admitscope engine?" in capsys.readouterr().err


def test_the_page_is_told_every_engine_journal_and_objective(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    command = DashboardCommand(address="http://a:1", url=["http://b:2"], journal=[journal], ttft_ms=500, tbt_ms=80)
    words = page.streamlit_command(command, 8600)
    assert words[words.index("--") + 1 :] == [
        *("--url", "http://a:1", "--url", "http://b:2", "--journal", str(journal)),
        *("--ttft-ms", "500.0", "--tbt-ms", "80.0"),
    ]
    assert DashboardCommand().urls() == ["http://127.0.0.1:8000"]
    assert DashboardCommand(journal=[journal]).urls() == []
    journal.touch()
    bare = DashboardCommand(address=str(journal))
    assert (bare.urls(), bare.journals()) == ([], [journal]), "a path is a journal"


def test_the_page_is_told_who_shows_traces_and_what_else_it_is_called() -> None:
    command = DashboardCommand(trace_url="http://t:16686/trace/{trace_id}", allow_host=["page.example.org"])
    words = page.streamlit_command(command, 8600)
    assert words[-2:] == ["--trace-url", "http://t:16686/trace/{trace_id}"]
    assert words[words.index("page.example.org") - 1] == "--server.allowedHosts"
    for odd in ("http://t:1/trace", "file:///{trace_id}", "http://{trace_id}/{other}"):
        with pytest.raises(ValidationError, match="trace_url"):
            DashboardCommand(trace_url=odd)


def test_a_page_of_a_journal_that_is_not_there_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dashboard", "--port", "0", "--journal", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: no such journal" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").touch()
    assert cli.main(["dashboard", "--port", "0", "--journal", str(tmp_path / "empty.jsonl")]) == 2
    assert "empty.jsonl: the file is empty" in capsys.readouterr().err


def test_the_page_answers_to_the_names_of_this_machine_only() -> None:
    words = page.streamlit_command(DashboardCommand(host="10.0.0.7"), 8600)
    named = [words[place + 1] for place, word in enumerate(words) if word == "--server.allowedHosts"]
    assert named == ["localhost", "127.0.0.1", "::1", "10.0.0.7"]
    assert "*" not in page.names_of("0.0.0.0")
    assert page.names_of("127.0.0.1") == ["localhost", "127.0.0.1", "::1"]


@pytest.mark.parametrize(
    ("host", "is_taken"),
    [("127.0.0.1:9", True), ("localhost", True), ("[::1]:9", True), ("evil.com", False), ("evil.com:9", False)],
)
def test_streamlit_refuses_a_name_that_was_made_to_point_here(host: str, is_taken: bool) -> None:
    """Of the same origin, as a browser that was led astray would send it."""
    from streamlit import config
    from streamlit.web.server.starlette.starlette_websocket import _is_origin_allowed

    before = config.get_option("server.allowedHosts")
    config.set_option("server.allowedHosts", page.names_of("127.0.0.1"))
    try:
        assert _is_origin_allowed(f"http://{host}", host) is is_taken
    finally:
        config.set_option("server.allowedHosts", before)


@pytest.mark.parametrize("url", ["http://a b", "http://u:hidden@127.0.0.1:8000"])
def test_the_page_refuses_an_odd_url_before_it_starts(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", url, "--port", "0"]) == 2
    assert "hidden" not in capsys.readouterr().err
