"""The demo's parts: lengths and questions, arrivals, the tally, the summary, and children that do not outlive us."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from telemetry.demo.load import BURST, LoadGenerator, LoadPlan
from telemetry.demo.processes import Child
from telemetry.demo.questions import CONTEXT, GENERATED, SYSTEM_PROMPT, question_of
from telemetry.demo.report import Tally, refusals, status_line, summary
from telemetry.demo.scrape import Scrape
from telemetry.demo.stream_client import StreamRecord, quantile
from telemetry.demo.trace import AZURE_ROWS, Scale, TraceRow, load_rows, scaled

# --- trace and questions ----------------------------------------------------------------------------------------------


def test_the_sample_is_the_trace() -> None:
    rows = load_rows()
    assert len(rows) == AZURE_ROWS
    assert rows[:3] == (TraceRow(374, 44), TraceRow(396, 109), TraceRow(879, 55))
    assert rows[39] == TraceRow(28, 175)
    assert load_rows(40) == rows[:40]
    with pytest.raises(ValueError, match="4001"):
        load_rows(4001)


@given(tokens=st.integers(0, 10**6), divisor=st.integers(1, 64), low=st.integers(1, 50), width=st.integers(0, 500))
def test_scaled_lengths_stay_in_range_and_in_order(tokens: int, divisor: int, low: int, width: int) -> None:
    scale = Scale(divisor, low, low + width)
    assert low <= scale.of(tokens) <= low + width
    assert scale.of(tokens) <= scale.of(tokens + divisor)
    assert scaled(TraceRow(tokens, 0), context=scale, generated=Scale(1, 1, 1)) == TraceRow(scale.of(tokens), 1)


def test_questions_are_repeatable_and_share_prefixes() -> None:
    rows = load_rows(200)
    questions = [question_of(row, number, seed=0) for number, row in enumerate(rows)]
    assert questions == [question_of(row, number, seed=0) for number, row in enumerate(rows)]
    assert questions != [question_of(row, number, seed=1) for number, row in enumerate(rows)]
    for row, question in zip(rows, questions, strict=True):
        system, user = question.messages()
        assert system == {"role": "system", "content": SYSTEM_PROMPT}
        assert question.passage
        assert question.question in user["content"]
        assert question.max_tokens == GENERATED.of(row.generated_tokens)
        assert len(question.passage) < CONTEXT.high * 4
    heads = {question.passage[:60] for question in questions}
    assert 2 <= len(heads) <= 10, "few passages, asked about often"
    lengths = {len(question.passage) for question in questions}
    assert len(lengths) > 10, "of different lengths, as the trace's contexts are"


# --- the load generator against a stream of its own -------------------------------------------------------------------


class Answers:
    """What a server does with chat requests: answers after `delay_s`, or fails."""

    def __init__(self, *, delay_s: float = 0.0, fail_from: int | None = None) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.under_way = 0
        self.most_under_way = 0
        self._delay_s = delay_s
        self._fail_from = fail_from

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        if self._fail_from is not None and len(self.bodies) > self._fail_from:
            return httpx.Response(429, json={"error": {"message": "queue full"}})
        return httpx.Response(200, content=self._stream())

    async def _stream(self) -> AsyncIterator[bytes]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self._delay_s)
            for delta in ({"role": "assistant", "content": ""}, {"content": "Good "}, {"content": "morrow."}, {}):
                finish = "stop" if not delta else None
                yield _event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})
            usage = {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
            yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        finally:
            self.under_way -= 1


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def generate(
    plan: LoadPlan, answers: Answers, also: Callable[[LoadGenerator], Any] | None = None
) -> tuple[list[dict[str, Any]], Tally]:
    """Run a load against `answers`; the lines it said, and their tally."""
    lines: list[dict[str, Any]] = []

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answers), base_url="http://engine") as client:
            generator = LoadGenerator(client, plan, lines.append)
            async with asyncio.TaskGroup() as group:
                group.create_task(generator.run())
                if also is not None:
                    group.create_task(also(generator))

    asyncio.run(run())
    tally = Tally()
    for line in lines:
        tally.take(json.loads(json.dumps(line)))
    return lines, tally


def test_a_load_of_some_time_answers_everything_it_sent() -> None:
    answers = Answers()
    lines, tally = generate(LoadPlan("tiny", duration_s=0.5, rate=40.0, seed=0), answers)
    assert lines[-1]["kind"] == "end"
    assert tally.sent == tally.finished == len(answers.bodies) > BURST
    assert tally.failed == []
    assert tally.rate == 40.0
    assert tally.output_tokens == 2 * tally.finished
    assert len(tally.ttft_s) == tally.finished
    assert len(tally.gaps_s) == tally.finished
    assert tally.finish_reasons == {"stop": tally.finished}
    assert tally.sample is not None
    assert tally.sample["answer"] == "Good morrow."
    assert answers.bodies[0]["model"] == "tiny"
    assert [body["messages"] for body in answers.bodies[:BURST]] == [
        question_of(row, number, 0).messages() for number, row in enumerate(load_rows(BURST))
    ]


def test_without_a_rate_the_burst_measures_one() -> None:
    _, tally = generate(LoadPlan("tiny", duration_s=0.3, rate=None, seed=0), Answers(delay_s=0.1))
    assert tally.rate is not None
    # The burst takes at least the tenth of a second that one answer takes.
    assert 0 < tally.rate <= BURST / 0.1


def test_a_refusal_counts_as_failed_and_is_kept_in_words() -> None:
    _, tally = generate(LoadPlan("tiny", duration_s=0.1, rate=1.0, seed=0), Answers(fail_from=4))
    assert tally.finished == 4
    assert len(tally.failed) == BURST - 4
    assert "HTTP 429" in tally.failed[0]


def test_stopping_lets_answers_finish_and_cutting_does_not() -> None:
    async def stop(generator: LoadGenerator) -> None:
        await asyncio.sleep(0.05)
        generator.stop()

    async def cut(generator: LoadGenerator) -> None:
        await asyncio.sleep(0.05)
        generator.stop(cut=True)

    endless = LoadPlan("tiny", duration_s=0.0, rate=0.001, seed=0)
    _, tally = generate(endless, Answers(delay_s=0.2), stop)
    assert (tally.finished, tally.cut, tally.failed) == (BURST, 0, [])
    answers = Answers(delay_s=30.0)
    _, tally = generate(endless, answers, cut)
    assert (tally.sent, tally.finished, tally.cut, tally.failed) == (BURST, 0, BURST, [])
    assert answers.under_way == 0


# --- what is shown ----------------------------------------------------------------------------------------------------

BEFORE = """\
# TYPE admitscope_generation_tokens counter
admitscope_generation_tokens_total 100
# TYPE admitscope_admissions counter
admitscope_admissions_total{reason="admitted_whole"} 5
admitscope_admissions_total{reason="rows_exhausted"} 7
admitscope_admissions_total{reason="chunk_exhausted"} 1
"""
AFTER = """\
# TYPE admitscope_generation_tokens counter
admitscope_generation_tokens_total 160
# TYPE admitscope_requests gauge
admitscope_requests{state="waiting"} 3
admitscope_requests{state="retracted"} 1
admitscope_requests{state="prefill"} 1
admitscope_requests{state="decode"} 4
# TYPE admitscope_admissions counter
admitscope_admissions_total{reason="admitted_whole"} 9
admitscope_admissions_total{reason="admitted_first_chunk"} 2
admitscope_admissions_total{reason="rows_exhausted"} 7
admitscope_admissions_total{reason="chunk_exhausted"} 4
# TYPE admitscope_prompt_tokens counter
admitscope_prompt_tokens_total{source="computed"} 600
admitscope_prompt_tokens_total{source="cached"} 400
# TYPE admitscope_violations counter
admitscope_violations_total{id="INV-PAGE-01"} VIOLATIONS
admitscope_violations_total{id="INV-PAGE-02"} 0
"""


def _shown(renderable: Any) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_sums_by_label() -> None:
    scrape = Scrape(AFTER.replace("VIOLATIONS", "0"))
    assert scrape.total("requests") == 9
    assert scrape.total("requests", state="decode") == 4
    assert scrape.total("no_such_thing") == 0
    assert next(iter(scrape.by("admissions_total", "reason").items())) == ("admitted_whole", 9)
    assert scrape.by("violations_total", "id") == {}
    assert refusals(scrape) == {"rows_exhausted": 7, "chunk_exhausted": 4}


def test_the_status_line_says_what_changed() -> None:
    tally = Tally(finished=2)
    tally.recent_ttft_s.extend([0.1, 0.3])
    tally.recent_gaps_s.append(0.02)
    line = status_line(Scrape(AFTER.replace("VIOLATIONS", "0")), Scrape(BEFORE), 2.0, tally).plain
    assert line == (
        "waiting 4  running 5  done 2  tok/s 30  TTFT p50 100 ms  TBT p50 20 ms"
        "  violations 0  refused now: chunk_exhausted"
    )


def test_the_summary_has_every_figure() -> None:
    tally = Tally(
        rate=1.5, sent=3, finished=2, failed=["HTTP 500: x"], output_tokens=50, ttft_s=[0.1, 0.9], gaps_s=[0.02]
    )
    tally.finish_reasons.update(["stop", "length"])
    tally.sample = {"passage": "Enter ROMEO", "question": "Who enters?", "answer": "Romeo."}
    text = _shown(summary(Scrape(AFTER.replace("VIOLATIONS", "2")), tally, seconds=10.0))
    for expected in (
        "3 sent, 2 finished (length 1, stop 1), 1 failed",
        "100 ms / 900 ms",
        "50 in 10 s, 5.0 a second",
        "400 of 1,000, 40%",
        "admitted_whole 9, admitted_first_chunk 2",
        "rows_exhausted 7, chunk_exhausted 4",
        "INV-PAGE-01 2",
        "Who enters?",
        "Romeo.",
        "failed: HTTP 500: x",
    ):
        assert expected in text, expected


def test_a_summary_of_nothing_still_prints() -> None:
    text = _shown(summary(Scrape(""), Tally(), seconds=1.0))
    assert "0 sent, 0 finished (none), 0 failed" in text
    assert "- / -" in text


def test_the_tally_refuses_words_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="surprise"):
        Tally().take({"kind": "surprise"})


@given(values=st.lists(st.floats(0, 1e6), min_size=1), share=st.floats(0, 1))
def test_quantiles_are_values_and_rise_with_the_share(values: list[float], share: float) -> None:
    at = quantile(values, share)
    assert at in values
    assert sum(value <= at for value in values) >= share * len(values) - 1e-9
    assert quantile(values, 0) == min(values)
    assert quantile(values, 1) == max(values)


def test_gaps_are_between_events() -> None:
    assert StreamRecord(sent_ns=0, token_ns=[5, 7, 12]).gaps_ns() == [2, 5]
    assert StreamRecord(sent_ns=0).ttft_ns is None


# --- children ---------------------------------------------------------------------------------------------------------


def _until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Wait for a condition; the time is a bound for a broken machine, not a measurement."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _is_gone(pid: int) -> bool:
    """True when no process has this id, or only its unreaped remains are left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module that a child can run; returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(source: str) -> str:
        (tmp_path / "probe_module.py").write_text(textwrap.dedent(source))
        return "probe_module"

    return write


def test_a_child_runs_its_module_with_its_arguments(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module("import sys\nprint('said', sys.argv[1:], sys.stdin.read() == '')\nsys.exit(3)\n")
    child = Child("probe", name, ["a", "b"], log=tmp_path / "log", keep_output=True)
    assert child.output.read() == b"said ['a', 'b'] True\n"
    assert _until(lambda: child.status() is not None)
    assert child.stop(1.0) == 3


def test_a_failing_child_leaves_its_last_words(module: Callable[[str], str], tmp_path: Path) -> None:
    child = Child("probe", module("raise RuntimeError('no such model')\n"), log=tmp_path / "log")
    assert _until(lambda: child.status() is not None)
    assert child.stop(1.0) == 1
    assert "no such model" in child.tail()


def test_stop_ends_a_child_that_does_not_listen(module: Callable[[str], str], tmp_path: Path) -> None:
    name = module(
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(600)
        """
    )
    child = Child("probe", name, log=tmp_path / "log", keep_output=True)
    assert child.output.readline() == b"deaf\n"
    assert child.stop(0.1) == -signal.SIGKILL
    assert child.stop(0.1) == -signal.SIGKILL, "safe to call again"
    assert _is_gone(child.pid)


@pytest.mark.parametrize("listens", [True, False])
def test_children_die_with_a_parent_that_was_killed(
    module: Callable[[str], str], tmp_path: Path, listens: bool
) -> None:
    """SIGKILL leaves the parent no chance to clean up: only the pipe tells the child, and deaf ones are killed."""
    name = module(
        f"""
        import os, pathlib, signal, time
        if not {listens}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path({str(tmp_path / "pid")!r} + ".tmp").write_text(str(os.getpid()))
        os.rename({str(tmp_path / "pid")!r} + ".tmp", {str(tmp_path / "pid")!r})
        time.sleep(600)
        """
    )
    program = f"""
import time, pathlib
from telemetry.demo.processes import Child
child = Child("probe", {name!r}, log=pathlib.Path({str(tmp_path / "log")!r}))
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert _until((tmp_path / "pid").exists)
        pid = int((tmp_path / "pid").read_text())
        assert not _is_gone(pid)
    finally:
        parent.kill()
        parent.wait()
    assert _until(lambda: _is_gone(pid))
