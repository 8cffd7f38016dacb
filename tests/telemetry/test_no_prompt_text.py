"""Nothing that a run writes holds a prompt or an answer: no text, no token's text, no sequence of token ids.

Everything is looked at: journal, evidence, standard output and error with logs at DEBUG, metrics, and every route of
the read API. The run has an executor failure, a broken law, refusals and clients that leave.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from engine.models.packaged import packaged_gguf_path
from engine.text.tokenizer import ByteTokenizer, load_tokenizer

DEADLINE_S = 120.0
CANARY = "The nightingale Zerbinetta hums quintessential Xylophonmusik for Ambassador Pfefferkorn."
HEADERS = {"authorization": "Bearer canary-secret-key-123", "cookie": "session=canary-cookie"}
#: Ids in a row that betray a prompt. Shorter runs occur by chance among counters.
RUN = 5
ROUTES = ("status", "queue", "passes", "latency", "requests", "pages")


def sequences(ids: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(ids[i : i + RUN]) for i in range(len(ids) - RUN + 1)}


def decoded(data: bytes) -> Iterator[bytes]:
    """`data`, and whatever in it is base64 or hexadecimal."""
    yield data
    for word in re.findall(rb"[A-Za-z0-9+/=_-]{24,}", data):
        for read in (base64.b64decode, base64.urlsafe_b64decode, binascii.unhexlify):
            try:
                yield read(word)
            except (binascii.Error, ValueError):
                continue


def leaks(data: bytes, words: Sequence[str], wanted: set[tuple[int, ...]]) -> list[str]:
    """What of the secrets is in `data`, readable or encoded."""
    found = []
    packed = [np.array(ids, dtype=kind).tobytes() for ids in wanted for kind in ("<i4", "<i8", "<u2")]
    for piece in decoded(data):
        lower = piece.lower()
        found += [word for word in words if word.lower().encode() in lower]
        found += [f"packed ids {value.hex()}" for value in packed if value in piece]
    numbers = [int(number) for number in re.findall(rb"(?<![0-9a-fx.])\d{1,6}(?![0-9a-fx.])", data)]
    found += [f"ids {ids}" for ids in sequences(numbers) & wanted]
    return found


def test_the_search_finds_what_it_is_for() -> None:
    ids = list(range(300, 320))
    wanted = sequences(ids)
    for hidden in (
        str(ids).encode(),
        b" ".join(b"%d" % i for i in ids),
        json.dumps({"a": ids[4:10]}).encode(),
        np.array(ids, dtype="<i4").tobytes(),
        base64.b64encode(np.array(ids, dtype="<i8").tobytes()),
        np.array(ids, dtype="<i4").tobytes().hex().encode(),
    ):
        assert leaks(hidden, [], wanted)
    assert leaks(b"xx ZERBINETTA", ["Zerbinetta"], set())
    assert leaks(base64.b64encode(b"here is Zerbinetta, hidden"), ["Zerbinetta"], set())
    assert not leaks(b"1, 2, 3, 300, 301, 7", ["Zerbinetta"], wanted)


#: Its properties are text of the client as well.
JSON_SCHEMA = {
    "name": "canary",
    "schema": {"type": "object", "properties": {CANARY: {"const": CANARY}}, "required": [CANARY]},
}


class Run:
    """One server process, asked in every way; `written` is everything it left or told besides answers."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.log = folder / "output.log"
        words = [sys.executable, "-m", "tests.telemetry.canary_server", "serve", "--server.port", "0"]
        words += ["--journal", str(folder / "journals"), "--server.api-key", "canary-secret-key-123", *flags]
        root = Path(__file__).parents[2]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ADMITSCOPE_")}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                words, cwd=root, stdout=out, stderr=subprocess.STDOUT, env=environment | {"PYTHONPATH": str(root)}
            )
        self.written: dict[str, bytes] = {}
        self.answers: list[str] = []
        self.codes: list[str] = []

    def play(self, ids: Sequence[int]) -> None:
        with httpx.Client(base_url=self._url(), timeout=DEADLINE_S, trust_env=False, headers=HEADERS) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            for stream in (False, True):
                for fields in self._questions(list(ids)):
                    self._ask(client, {"model": model, "stream": stream, **fields})
            self._leave(client, {"model": model, "prompt": CANARY, "max_tokens": 200, "stream": True})
            self._await_violation(client)
            known = client.get("/observe/requests").json()
            rids = [entry["rid"] for entry in known["live"] + known["finished"]]
            assert rids
            paths = [f"/observe/{route}" for route in ROUTES]
            paths += [f"/observe/{kind}/{rid}" for rid in rids[:6] for kind in ("requests", "explain")]
            for path in (*paths, "/health", "/ready", "/metrics", "/openapi.json"):
                answer = client.get(path)
                assert answer.status_code == httpx.codes.OK, (path, answer.text)
                self.written[path] = answer.content
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(DEADLINE_S) == 0, self.log.read_text("utf-8")[-3000:]
        for file in self.folder.rglob("*"):
            if file.is_file():
                self.written[str(file.relative_to(self.folder))] = file.read_bytes()

    def _questions(self, ids: list[int]) -> list[dict[str, Any]]:
        ask = {"max_tokens": 12, "temperature": 0}
        return [
            ask | {"prompt": CANARY, "user": CANARY, "stop": ["Pfefferkorn-stop"]},
            ask | {"prompt": CANARY * 3, "routing_key": "k", "priority": 3, "logprobs": 5},
            ask | {"prompt": ids},
            ask | {"prompt": [ids, ids[::-1]], "n": 2, "seed": 7},
            ask | {"messages": [{"role": "system", "content": CANARY}, {"role": "user", "content": CANARY}]},
            # Refused by the simulated executor, followed by the model:
            ask | {"prompt": CANARY, "response_format": {"type": "json_schema", "json_schema": JSON_SCHEMA}},
            ask | {"prompt": CANARY, "regex": f"({re.escape(CANARY)})+", "presence_penalty": 1, "logit_bias": {"7": 1}},
            # Refused, in the places where refusals quote:
            ask | {"prompt": CANARY, "regex": f"({re.escape(CANARY)}"},
            ask | {"prompt": CANARY, "response_format": {"type": CANARY}},
            ask | {"prompt": CANARY, "suffix": CANARY},
            ask | {"prompt": CANARY, CANARY[:40]: 1},
            ask | {"prompt": CANARY, "model": CANARY},
            ask | {"prompt": [CANARY, 3]},
            ask | {"messages": [{"role": CANARY, "content": CANARY}]},
            ask | {"prompt": CANARY, "max_tokens": 10**9},
        ]

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = client.post(path, json=body)
        events = [answer.text]
        if "event-stream" in answer.headers["content-type"]:
            events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
        for content in map(json.loads, events):
            if "error" in content:
                self.codes.append(content["error"]["code"])
            for choice in content.get("choices", ()):
                self.answers.append(choice.get("text") or choice.get("message", {}).get("content") or "")

    def _await_violation(self, client: httpx.Client) -> None:
        """What is told is behind what was answered, on a busy machine by as long as all of this takes."""
        end = time.monotonic() + DEADLINE_S
        while client.get("/observe/status").json()["violations_total"] == 0:
            assert time.monotonic() < end, "no law was broken"
            time.sleep(0.05)

    def _leave(self, client: httpx.Client, body: dict[str, Any]) -> None:
        with client.stream("POST", "/v1/completions", json=body) as stream:
            next(stream.iter_raw())

    def _url(self) -> str:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            text = self.log.read_text("utf-8")
            found = re.search(r"API +(http://\S+)/v1", text)
            if found and "page " in text:
                return found[1]
            assert self.process.poll() is None, text
            time.sleep(0.05)
        raise AssertionError(self.log.read_text("utf-8"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


KINDS: Any = [
    pytest.param("simulated", id="simulated"),
    pytest.param("torch", id="model", marks=pytest.mark.model),
]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_a_run_writes_holds_a_prompt_or_an_answer(tmp_path: Path, kind: str) -> None:
    tokenizer = ByteTokenizer() if kind == "simulated" else load_tokenizer(packaged_gguf_path())
    ids = tokenizer.encode(CANARY)
    flags = (
        "--executor.kind",
        kind,
        "--scheduler.chunked-prefill-size",
        "32",
        "--scheduler.enable-priority-scheduling",
    )
    run = Run(tmp_path, *flags)
    try:
        run.play(ids)
    finally:
        run.close()
    assert "engine_error" in run.codes, "the executor failed once"
    assert {"unsupported_parameter", "unknown_parameter", "model_not_found", "invalid_value"} <= set(run.codes)
    log = run.written["output.log"]
    assert b"DEBUG" in log
    assert b"the executor failed with ValueError" in log
    assert any(name.endswith(".jsonl") for name in run.written)
    assert b"violations_total" in run.written["/metrics"]
    assert b'"violations_total":0' not in run.written["/observe/status"], "a law was broken"

    words = [word.strip(".") for word in CANARY.split() if len(word) > 5] + ["canary-cookie", "canary-secret-key"]
    words += [piece for token in set(ids) if len(piece := tokenizer.decode([token]).strip()) > 6]
    words += [word for answer in run.answers for word in answer.split() if len(word) > 9]
    assert len(words) > 10
    wanted = sequences(ids) | sequences(ids[::-1])
    found = {name: leaked for name, data in run.written.items() if (leaked := leaks(data, words, wanted))}
    assert not found
