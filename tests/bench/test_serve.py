"""bench/serve.py measures what a server does, and fails when the server does not do its part."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import local
import pytest
import serve

from telemetry.demo.stream_client import StreamRecord
from telemetry.ports import bind_listener

SCRIPT = Path(serve.__file__)


@dataclass
class Behaviour:
    """What the little server does, and what it was asked."""

    first_delay_s: float = 0.0
    tokens_per_event: int = 1
    answers: float = 1.0  # share of the wanted tokens that it gives
    separate_end: bool = False
    cut: bool = False
    status: int = 200
    cached: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)


def _events(behaviour: Behaviour, body: dict[str, Any]) -> Iterator[str]:
    total = int(body["max_tokens"] * behaviour.answers)
    for start in range(0, total, behaviour.tokens_per_event):
        is_last = start + behaviour.tokens_per_event >= total
        finish = "length" if is_last and not behaviour.separate_end else None
        yield json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": finish}]})
        if behaviour.cut:
            return
    if behaviour.separate_end:
        yield json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": total,
        "prompt_tokens_details": {"cached_tokens": behaviour.cached},
    }
    yield json.dumps({"choices": [], "usage": usage})
    yield "[DONE]"


@pytest.fixture
def server() -> Iterator[tuple[str, Behaviour]]:
    """A server of OpenAI's completions, small and obedient: (base URL, its behaviour)."""
    behaviour = Behaviour()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, json.dumps({"data": [{"id": "tiny"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            behaviour.bodies.append(body)
            if behaviour.status != 200:
                self._reply(behaviour.status, b'{"error": {"message": "queue full"}}')
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            time.sleep(behaviour.first_delay_s)
            for event in _events(behaviour, body):
                self.wfile.write(f"data: {event}\n\n".encode())

        def _reply(self, status: int, payload: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            """Silence."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_address[1]}", behaviour
        http_server.shutdown()
        thread.join()


def _run(capsys: pytest.CaptureFixture[str], url: str, *flags: str) -> tuple[int, list[dict[str, Any]], str]:
    status = serve.main(["--base-url", url, "--warmup", "0", *flags])
    out, err = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


def test_all_workloads_print_a_line_each_and_a_table(
    server: tuple[str, Behaviour], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, behaviour = server
    file = tmp_path / "figures.jsonl"
    status, lines, err = _run(capsys, url, "--repeat", "2", "--json", str(file))
    assert status == 0
    assert [(line["workload"], line["repetition"]) for line in lines] == [
        (f"W{n}", repetition) for n in range(1, 6) for repetition in (0, 1)
    ]
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    w1 = lines[0]
    assert (w1["requests"], w1["failed"], w1["prompt_tokens"], w1["output_tokens"]) == (32, 0, 32 * 256, 32 * 64)
    assert w1["token_events"] == w1["output_tokens"]
    assert w1["output_tok_s"] == pytest.approx(w1["output_tokens"] / w1["wall_s"], rel=1e-3)
    assert w1["total_tok_s"] == pytest.approx(w1["output_tok_s"] * 5, rel=1e-3)
    assert "TTFT p99 ms" in err
    assert "median" in err
    body = behaviour.bodies[0]
    assert body["model"] == "tiny"
    assert body["temperature"] == 0
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert len({tuple(body["prompt"]) for body in behaviour.bodies}) == len(behaviour.bodies)


def test_ttft_holds_the_wait_and_tbt_does_not(
    server: tuple[str, Behaviour], capsys: pytest.CaptureFixture[str]
) -> None:
    url, behaviour = server
    behaviour.first_delay_s = 0.25
    _, (line,), _ = _run(capsys, url, "--workload", "W3")
    # A lower bound is certain; nothing is asserted about how fast the machine is.
    assert line["ttft_p50_s"] >= 0.25
    assert line["wall_s"] >= line["ttft_p50_s"]
    assert line["token_events"] == 128


@pytest.mark.parametrize("separate_end", [False, True])
def test_an_end_in_an_event_of_its_own_is_no_token(
    server: tuple[str, Behaviour], capsys: pytest.CaptureFixture[str], separate_end: bool
) -> None:
    url, behaviour = server
    behaviour.separate_end = separate_end
    _, (line,), _ = _run(capsys, url, "--workload", "W3")
    assert line["token_events"] == line["output_tokens"] == 128


def test_coalesced_tokens_are_counted_by_usage_and_show_in_token_events(
    server: tuple[str, Behaviour], capsys: pytest.CaptureFixture[str]
) -> None:
    url, behaviour = server
    behaviour.tokens_per_event = 4
    _, (line,), _ = _run(capsys, url, "--workload", "W3")
    assert (line["output_tokens"], line["token_events"]) == (128, 32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answers": 0.5}, "answered 64 tokens of 128"),
        ({"cut": True}, "without [DONE]"),
        ({"status": 429}, "HTTP 429"),
    ],
)
def test_a_failing_request_fails_the_run_and_is_named(
    server: tuple[str, Behaviour], capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    url, behaviour = server
    for name, value in change.items():
        setattr(behaviour, name, value)
    status, (line,), err = _run(capsys, url, "--workload", "W3")
    assert status == 1
    assert line["failed"] == 1
    assert line["ttft_p50_s"] is None
    assert said in err.replace("\n", "")


def test_a_cache_that_knows_the_prompts_is_pointed_out(
    server: tuple[str, Behaviour], capsys: pytest.CaptureFixture[str]
) -> None:
    url, behaviour = server
    behaviour.cached = 16
    _, (line,), err = _run(capsys, url, "--workload", "W3")
    assert line["cached_tokens"] == 16
    assert "another --seed" in err
    _, (line,), err = _run(capsys, url, "--workload", "W2")
    assert line["cached_tokens"] == 32 * 16
    assert "another --seed" not in err


def test_poisson_arrivals_have_the_rate_and_are_seeded() -> None:
    offsets = serve.arrival_offsets(4001, rate=4.0, rng=random.Random(1))
    assert offsets == sorted(offsets)
    assert offsets[-1] / 4000 == pytest.approx(0.25, rel=0.05)
    assert offsets == serve.arrival_offsets(4001, rate=4.0, rng=random.Random(1))
    assert serve.arrival_offsets(3, rate=None, rng=random.Random(1)) == [0.0, 0.0, 0.0]


def test_figures_by_hand() -> None:
    ms = 1_000_000
    one = StreamRecord(
        sent_ns=0, token_ns=[100 * ms, 110 * ms, 140 * ms], done_ns=150 * ms, prompt_tokens=10, output_tokens=3
    )
    two = StreamRecord(sent_ns=0, token_ns=[200 * ms, 250 * ms], done_ns=250 * ms, prompt_tokens=20, output_tokens=2)
    bad = StreamRecord(sent_ns=0, token_ns=[1 * ms], done_ns=2 * ms, prompt_tokens=99, output_tokens=99, error="x")
    line = serve.figures([one, two, bad])
    assert (line["requests"], line["failed"], line["prompt_tokens"], line["output_tokens"]) == (3, 1, 30, 5)
    assert (line["wall_s"], line["output_tok_s"], line["total_tok_s"]) == (0.25, 20.0, 140.0)
    assert (line["ttft_p50_s"], line["ttft_p99_s"]) == (0.1, 0.2)
    assert (line["tbt_p50_s"], line["tbt_p99_s"]) == (0.03, 0.05)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rate", "0"], "--rate 0.0: above 0"),
        (["--rate", "nan"], "--rate nan: above 0"),
        (["--rate", "2", "--workload", "W1"], "only W4 takes a rate"),
        (["--repeat", "0"], "--repeat 0: at least 1"),
        (["--workload", "W9"], "invalid choice"),
        (["--frobnicate"], "unrecognized arguments"),
    ],
)
def test_bad_usage_exits_2_and_says_why(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        serve.main(["--base-url", "http://127.0.0.1:9", *flags])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_nobody_listening_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, err = _run(capsys, "http://127.0.0.1:9")
    assert (status, lines) == (1, [])
    assert "ConnectError" in err


def test_the_script_runs_from_any_folder(server: tuple[str, Behaviour], tmp_path: Path) -> None:
    url, _ = server
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--base-url", url, "--workload", "W5"],
        cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert json.loads(done.stdout)["output_tokens"] == 8 * 128


def test_local_starts_measures_and_stops_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "W5", "--warmup", "0", "--", "--executor.kind", "simulated", "--model.name", "made-up"]
    # The made-up vocabulary has 512 ids, so every prompt is refused: the way there and back is what is tested.
    assert local.main(flags) == 1
    out, err = capsys.readouterr()
    line = json.loads(out)
    assert (line["model"], line["requests"], line["failed"]) == ("made-up", 8, 8)
    assert "HTTP 400" in err
    assert "CPUs" in err
    port = int(line["base_url"].rpartition(":")[2])
    with bind_listener("127.0.0.1", port):
        pass  # nobody is left on the port


def test_local_says_why_a_server_did_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert local.main(["--", "--cache.page-size", "0"]) == 2
    assert "--cache.page-size" in capsys.readouterr().err
