"""A served request joins the caller's trace, under its span, with the times of the journal, and without its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from telemetry.cli import main
from telemetry.journal_reader import JournalReader
from telemetry.ports import free_port
from telemetry.schema_events import AdmissionDecidedRecord, RequestArrivedRecord
from tests.telemetry.otlp import Receiver, attributes
from tests.telemetry.served import CANARY, served

CALLER_TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"


@contextmanager
def traced(folder: Path, endpoint: str, *flags: str) -> Iterator[httpx.Client]:
    with (
        served(folder, "--executor.kind", "simulated", "--traces.endpoint", endpoint, *flags) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield client


def ask(client: httpx.Client, *, prompt: str = CANARY, sampled: bool = True, **body: object) -> httpx.Response:
    model = client.get("/v1/models").json()["data"][0]["id"]
    reply = client.post(
        "/v1/completions",
        json={"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **body},
        headers={"traceparent": f"00-{CALLER_TRACE}-{CALLER_SPAN}-0{int(sampled)}"},
    )
    assert reply.status_code == httpx.codes.OK, reply.text
    return reply


def roots(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]


def test_a_request_joins_the_callers_trace_and_its_spans_say_what_the_journal_says(tmp_path: Path) -> None:
    with Receiver() as receiver:
        with traced(tmp_path, receiver.url, "--traces.sample-ratio", "0") as client:
            reply = ask(client)
            spans = receiver.wait_for(lambda spans: len(roots(spans)) == 1 and len(spans) >= 6)
            ask(client, sampled=False)
            _, trace, span_id, flags = reply.headers["traceparent"].split("-")
        spans = list(receiver.spans)
    [root] = roots(spans)  # the second request asked for nothing and was nothing special
    assert root.trace_id.hex() == trace == CALLER_TRACE
    assert flags == "01"
    assert root.span_id.hex() == span_id
    assert root.parent_span_id.hex() == CALLER_SPAN
    told = attributes(root)
    assert told["gen_ai.response.id"] == reply.json()["id"]
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.usage.input_tokens"] == reply.json()["usage"]["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert told["admitscope.kept_because"] == "caller"
    mine = [span for span in spans if span.trace_id == root.trace_id]
    assert {span.name for span in mine[1:]} >= {
        "engine.intake",
        "engine.queue",
        "engine.prefill.chunk",
        "engine.stream",
    }
    records = list(JournalReader(tmp_path).records())
    arrived = next(record for record in records if isinstance(record, RequestArrivedRecord))
    decided = next(
        record for record in records if isinstance(record, AdmissionDecidedRecord) and record.rid == arrived.rid
    )
    assert arrived.trace_id == CALLER_TRACE
    assert arrived.trace_sampled
    intake = next(span for span in mine if span.name == "engine.intake")
    assert intake.end_time_unix_nano - intake.start_time_unix_nano == arrived.t_ns - arrived.accepted_ns
    chunk = attributes(next(span for span in mine if span.name == "engine.prefill.chunk"))
    assert chunk["selected_extend"] == decided.selected_extend
    assert chunk["kv_total.before"] == decided.remaining_total_before
    assert chunk["kv_total.after"] == decided.remaining_total_after
    everything = b"".join(span.SerializeToString() for span in spans)
    for word in CANARY.split():
        if len(word) > 5:
            assert word.encode() not in everything


def test_each_choice_has_a_span_of_its_own_in_one_trace(tmp_path: Path) -> None:
    with Receiver() as receiver, traced(tmp_path, receiver.url) as client:
        reply = ask(client, n=3)
        spans = receiver.wait_for(lambda spans: len(roots(spans)) == 3)
    found = roots(spans)
    assert {span.trace_id.hex() for span in found} == {CALLER_TRACE}
    assert {span.parent_span_id.hex() for span in found} == {CALLER_SPAN}
    assert len({span.span_id for span in found}) == 3
    assert reply.headers["traceparent"].split("-")[2] in {span.span_id.hex() for span in found}


def test_a_collector_that_is_away_costs_spans_and_nothing_else(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port('127.0.0.1', 0)}"
    with traced(tmp_path, nobody, "--traces.sample-ratio", "1") as client:
        for _ in range(5):
            assert ask(client).json()["choices"][0]["finish_reason"] in {"length", "stop"}
        assert client.get("/ready").status_code == httpx.codes.OK
        text = client.get("/metrics").text
    # The exporter retries for a while; whatever it says by then, nothing was delivered.
    assert 'admitscope_spans_exported_total{outcome="ok"} 0' in text


@pytest.mark.parametrize("endpoint", ["localhost", "http://x:99999"])
def test_a_bad_endpoint_is_refused_at_the_start(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--traces.endpoint", endpoint]) == 2
    said = capsys.readouterr().err
    assert "traces.endpoint" in said
    assert endpoint in said
