"""Request logs of SGLang: what a line becomes, what it does not know, and what is said of one that is wrong.

The lines have the shape that the writers of SGLang 0.5.23 give them.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.cli import main
from telemetry.sim.inputs import trace_format
from telemetry.sim.sglang_log import SglangExport, SglangLog, SglangRequestLog
from telemetry.sim.traces import Trace, TraceError
from telemetry.sim.workload import Ask

OBJ = {"rid": "r1", "sampling_params": {"max_new_tokens": 16}, "stream": True, "routing_key": None, "priority": None}
META = {
    "id": "r1",
    "finish_reason": {"type": "stop", "matched": 2},
    "prompt_tokens": 500,
    "weight_version": "default",
    "num_retractions": 0,
    "completion_tokens": 7,
    "cached_tokens": 300,
    "e2e_latency": 0.5,
}


def event(kind: str, rid: str, at: str, **rest: Any) -> str:
    return f"[{at[:10]} {at[11:19]}] " + json.dumps({"timestamp": at, "event": kind, "rid": rid, **rest}) + "\n"


def received(rid: str, at: str) -> str:
    return event("request.received", rid, at, obj=OBJ | {"rid": rid})


def finished(rid: str, at: str, *, obj: dict[str, Any] | None = None, **meta: Any) -> str:
    return event(
        "request.finished",
        rid,
        at,
        obj=OBJ | {"rid": rid} | (obj or {}),
        out={"meta_info": META | {"id": rid} | meta},
    )


def exported(rid: str, *, parameters: Any = None, **meta: Any) -> str:
    asked = json.dumps(OBJ | {"rid": rid}) if parameters is None else parameters
    return (
        json.dumps({"request_parameters": asked, **META, "id": rid, "request_received_ts": 1_767_000_000.25} | meta)
        + "\n"
    )


def opened(folder: Path, *lines: str, ask_for: int | None = None) -> Trace:
    file = folder / "server.log"
    file.write_text("".join(lines))
    return trace_format(file)(file, limit=None, ask_for=ask_for)


def asks(folder: Path, *lines: str, ask_for: int | None = None) -> list[Ask]:
    return list(opened(folder, *lines, ask_for=ask_for).asks())


def test_requests_come_in_the_order_of_arrival_though_lines_are_in_the_order_of_ends(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        "[2026-11-30 07:05:40] Load weight begin. avail mem=78.58 GB\n",
        received("a", "2026-11-30T07:05:48.000000"),
        received("b", "2026-11-30T07:05:48.250000"),
        'INFO:     127.0.0.1:4 - "POST /generate HTTP/1.1" 200 OK\n',
        finished("b", "2026-11-30T07:05:49.000000", prompt_tokens=40, completion_tokens=3),
        finished("a", "2026-11-30T07:05:51.000000"),
    )
    assert isinstance(trace, SglangRequestLog)
    first, second = trace.asks()
    assert (first.arrival_ns, first.prompt_len, first.output_len, first.rid) == (0, 500, 7, "L6")
    assert (second.arrival_ns, second.prompt_len, second.output_len) == (250_000_000, 40, 3)
    assert trace.total() == 2


def test_without_a_line_of_arrival_the_end_and_the_latency_tell_it(tmp_path: Path) -> None:
    first, second = asks(
        tmp_path,
        finished("a", "2026-11-30T07:05:49", e2e_latency=0.5),
        finished("b", "2026-11-30T07:05:49.100000", e2e_latency=0.25),
    )
    assert second.arrival_ns - first.arrival_ns == 350_000_000


def test_the_time_that_metrics_tell_is_taken_for_all(tmp_path: Path) -> None:
    first, second = asks(
        tmp_path,
        received("a", "2026-11-30T07:05:48"),
        finished("a", "2026-11-30T07:05:49", request_received_ts=1_767_000_000.5),
        finished("b", "2026-11-30T07:05:49", request_received_ts=1_767_000_000.0),
    )
    assert (first.rid, second.arrival_ns) == ("L3", 500_000_000)


def test_what_was_asked_for_is_known_from_level_one_on(tmp_path: Path) -> None:
    [ask] = asks(
        tmp_path,
        finished("a", "2026-11-30T07:05:49", obj={"priority": 3, "routing_key": "x"}, finish_reason={"type": "stop"}),
    )
    assert (ask.max_new_tokens, ask.stops, ask.ignore_eos) == (16, True, False)
    assert (ask.priority, ask.routing_key) == (3, "x")
    [ask] = asks(tmp_path, finished("a", "2026-11-30T07:05:49", obj={"sampling_params": None}))
    assert (ask.max_new_tokens, ask.ignore_eos, ask.priority, ask.routing_key) == (7, True, None, None)
    [ask] = asks(tmp_path, finished("a", "2026-11-30T07:05:49", obj={"sampling_params": None}), ask_for=100)
    assert (ask.max_new_tokens, ask.ignore_eos) == (100, False)


def test_who_left_leaves_at_the_same_moment_and_would_have_gone_on(tmp_path: Path) -> None:
    gone = {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}}
    [ask] = asks(tmp_path, finished("a", "2026-11-30T07:05:49", e2e_latency=0.75, **gone))
    assert (ask.output_len, ask.max_new_tokens, ask.abort_ns) == (16, 16, 750_000_000)


def test_requests_without_lengths_are_counted_and_health_checks_are_none(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        finished("a", "2026-11-30T07:05:49"),
        finished("b", "2026-11-30T07:05:49", prompt_tokens=None, completion_tokens=None),
        finished("HEALTH_CHECK_1767", "2026-11-30T07:05:49"),
        finished("c", "2026-11-30T07:05:49", completion_tokens=None),
    )
    assert len(list(trace.asks())) == trace.total() == 1
    assert "SGLang found 60.0% of the prompt tokens in its cache" in trace.notes[0]
    assert "2 requests have no lengths" in trace.notes[1]


def test_exported_metrics(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        exported("b", request_received_ts=1_767_000_001.0, finish_reason={"type": "length", "length": 7}),
        exported("a", prompt_tokens=40),
        exported("HEALTH_CHECK_0"),
    )
    assert isinstance(trace, SglangExport)
    first, second = trace.asks()
    assert (first.rid, first.prompt_len, first.max_new_tokens, first.stops) == ("L2", 40, 16, True)
    assert (second.arrival_ns, second.stops) == (750_000_000, False)


def test_exported_metrics_without_the_time_of_arrival_are_refused_with_what_gives_it(tmp_path: Path) -> None:
    line = exported("a", request_received_ts=None)
    with pytest.raises(TraceError, match=r":1: no request_received_ts.*--enable-metrics"):
        asks(tmp_path, line)
    [ask] = asks(tmp_path, exported("a", request_received_ts=None, response_sent_to_client_ts=1_767_000_001.0))
    assert ask.arrival_ns == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (finished("a", "2026-11-30T07:05:49", prompt_tokens="many"), r":2: out\.meta_info\.prompt_tokens: Expected"),
        (finished("a", "2026-11-30T07:05:49", prompt_tokens=0), r":2: prompt_tokens is 0; 1 to"),
        (finished("a", "2026-11-30T07:05:49", completion_tokens=-1), r":2: completion_tokens is -1; 0 to"),
        (finished("a", "2026-11-30T07:05:49", e2e_latency=1e9), r":2: e2e_latency is 1000000000\.0; 0 to 604800"),
        (finished("a", "2026-11-30T07:05:49", e2e_latency=None), r":2: nothing says when it came: .*'a'"),
        (finished("a", "yesterday"), r":2: timestamp: Invalid"),
        (finished("a", "2026-11-30T07:05:49", obj={"priority": 2**40}), r":2: priority is 1099511627776"),
        (finished("a", "2026-11-30T07:05:49")[:-9] + "\n", r":2: no JSON object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        asks(tmp_path, finished("z", "2026-11-30T07:05:48"), line)


def test_wrong_parameters_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r":1: request_parameters: sampling_params\.max_new_tokens: Expected"):
        asks(tmp_path, exported("a", parameters='{"sampling_params": {"max_new_tokens": "x"}}'))


def test_kinds_of_log_that_cannot_be_read_say_which_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, dump = tmp_path / "text.log", tmp_path / "dump.pkl"
    text.write_text("[2026-11-30 07:05:48] Finish: obj=GenerateReqInput(rid='r1'), out={'meta_info': {'id': 'r1'}}\n")
    dump.write_bytes(b"\x80\x04\x95\x10\x00")
    for file, words in ((text, "--log-requests-format json"), (dump, "reading one would run what is in it")):
        assert main(["sim", str(file)]) == 2
        assert words in capsys.readouterr().err.replace("\n", " ")


def test_a_log_is_simulated_and_what_it_lacks_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [finished(f"r{n}", f"2026-11-30T07:05:{10 + n}", prompt_tokens=100 + n) for n in range(20)]
    (tmp_path / "log.gz").write_bytes(gzip.compress("".join(lines).encode()))
    assert main(["sim", str(tmp_path / "log.gz"), "--cost", "h200-8b", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["served"], result["output_tokens"], result["violations"]) == (20, 140, 0)
    assert "here no prompt shares anything" in result["notes"][0]


@settings(deadline=None)
@given(st.text(max_size=200))
def test_whatever_a_line_holds_only_known_errors_come_out(
    tmp_path_factory: pytest.TempPathFactory, middle: str
) -> None:
    file = tmp_path_factory.mktemp("t") / "log"
    line = finished("a", "2026-11-30T07:05:49")
    file.write_text(line[:60] + middle + line[60:], "utf-8")
    kinds: tuple[type[SglangLog], ...] = (SglangRequestLog, SglangExport)
    for kind in kinds:
        with contextlib.suppress(TraceError):
            list(kind(file, limit=None, ask_for=None).asks())
