"""Lines that are gone from the middle of a journal, or from its end: whoever reads it says so, and accuses nobody."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import Policy
from telemetry.check import check
from telemetry.cli import main
from telemetry.explain import UnknownRequest, explain
from telemetry.export.source import feed
from telemetry.journal import JournalError, JournalSink
from telemetry.journal_gaps import NO_GAPS, Gap, gaps_in
from telemetry.recorded import Recording
from telemetry.replay import replay
from telemetry.schema_parts import SourcePart

#: Few rows of pages and a short pool: refusals that are written and refusals that are only counted.
RUNS = [(2, 16, Policy.LPM, 1), (3, 1, Policy.FCFS, 64), (4, 16, Policy.SHORTEST_PREFILL_FIRST, 64)]
#: The folder of a test is used again by all its examples: each writes its file anew.
EFFORT = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Recorded = Callable[..., list[bytes]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, simulated_run: Any) -> Recorded:
    """Lines of a run's journal, which is written once for each argument list."""
    kept: dict[Any, list[bytes]] = {}

    def get(seed: int, page_size: int, policy: Policy, stuck_steps: int) -> list[bytes]:
        key = (seed, page_size, policy, stuck_steps)
        if key not in kept:
            path = tmp_path_factory.mktemp("run") / "run.jsonl"
            run = simulated_run(path, seed, policy=policy, page_size=page_size)
            # While allocations miss nothing moves: refusals repeat, and are only counted.
            run.engine.scheduler.kv.allocation_fault = lambda _phase: run.engine.steps_done % 40 < stuck_steps % 40
            run.play(14, fail_at_step=100)
            kept[key] = path.read_bytes().splitlines(keepends=True)
        return kept[key]

    return get


def written(folder: Path, lines: list[bytes], *cut: range) -> Path:
    """A journal of `lines` without those of `cut`."""
    gone = {number for each in cut for number in each}
    path = folder / "cut.jsonl"
    path.write_bytes(b"".join(line for number, line in enumerate(lines) if number not in gone))
    return path


def events_of(lines: list[bytes]) -> int:
    """How many events the lines have or count."""
    records = [json.loads(line) for line in lines]
    return sum(
        record["count"] if record["type"] == "refusals_folded" else record["type"][0].isupper() for record in records
    )


def is_told(path: Path) -> bool:
    """Whether each way to read the journal says that it lacks something; none accuses the engine in any case."""
    report, replayed = check(path), replay(path)
    assert report.counts == {}, report.violations
    assert replayed.divergence is None
    told = feed(path, lambda _: None)
    says = {
        "check": report.gap is not None or bool(report.notes),
        "replay": replayed.gap is not None or replayed.torn is not None or replayed.open_end is not None,
        "feed": told.gap is not None or bool(told.notes),
    }
    with contextlib.suppress(UnknownRequest):
        says["explain"] = bool(explain(path, "r0").warnings)
    assert len(set(says.values())) == 1, says
    return says["check"]


@pytest.mark.parametrize("run", RUNS)
def test_a_whole_journal_lacks_nothing(recorded: Recorded, tmp_path: Path, run: Any) -> None:
    lines = recorded(*run)
    path = written(tmp_path, lines)
    assert gaps_in(path) == NO_GAPS
    assert not is_told(path)


def cut_out(data: st.DataObject, lines: list[bytes]) -> range:
    """Lines behind the first two that are gone, and that are not the end."""
    first = data.draw(st.integers(2, len(lines) - 2))
    most = len(lines) - 1 - first
    return range(first, first + data.draw(st.integers(1, 3) | st.integers(1, most)) if most > 3 else first + 1)


@EFFORT
@given(data=st.data())
def test_what_is_gone_from_the_middle_is_told_and_where(
    recorded: Recorded, tmp_path: Path, data: st.DataObject
) -> None:
    lines = recorded(*data.draw(st.sampled_from(RUNS)))
    cut = cut_out(data, lines)
    path = written(tmp_path, lines, cut)
    lost = events_of([lines[number] for number in cut])
    assert is_told(path) == (lost > 0)
    if not lost:
        return
    report, replayed = check(path), replay(path)
    assert report.gap is not None
    assert (report.gap, report.verdict, report.exit_code) == (replayed.gap, "incomplete", 2)
    assert (replayed.verdict, replayed.exit_code) == ("incomplete", 2)
    # A gap is not told behind the cut, and one without a count that is gone as well not in front of it.
    before = max(json.loads(line).get("seq", -1) for line in lines[: cut.start])
    assert report.gap.after_seq <= before
    if not any(b'"refusals_folded"' in lines[number] for number in cut):
        assert report.gap.before_seq > before
    assert report.gap.missing <= lost


@EFFORT
@given(data=st.data())
def test_what_is_gone_from_the_middle_of_a_journal_without_an_end_accuses_nobody(
    recorded: Recorded, tmp_path: Path, data: st.DataObject
) -> None:
    """Behind the last checkpoint a number that is not there may be a refusal that nothing came to count."""
    lines = recorded(*data.draw(st.sampled_from(RUNS)))
    lines = lines[: data.draw(st.integers(len(lines) // 2, len(lines) - 2))]
    assert is_told(written(tmp_path, lines, cut_out(data, lines)))


def test_several_gaps_are_counted_and_the_first_is_told(recorded: Recorded, tmp_path: Path) -> None:
    lines = recorded(*RUNS[0])
    first, second, third = (len(lines) * part // 5 for part in (2, 3, 4))
    path = written(tmp_path, lines, *(range(start, start + 30) for start in (first, second, third)))
    gap = check(path).gap
    assert gap is not None
    assert (gap.more, gap.after_line, gap.before_line) == (2, f"{path}:{first}", f"{path}:{first + 1}")
    assert gap.text().endswith("It has 2 more gaps behind that.")


def test_the_commands_say_it_first(recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = recorded(*RUNS[1])
    last = next(n for n, line in enumerate(lines) if b'"RequestTransitioned"' in line and b'"rid":"r3"' in line)
    path = str(written(tmp_path, lines, range(last + 20, last + 60)))
    gap = gaps_in(Path(path)).first
    assert gap is not None
    for command in (["check", path], ["replay", path], ["explain", path, "r3"]):
        status = main(command)
        first = capsys.readouterr().out.splitlines()[0]
        assert first.startswith(
            f"The journal lacks {gap.missing} events in its middle, between event {gap.after_seq} (step "
            f"{gap.after_step}, {path}:{last + 20}) and event {gap.before_seq} (step {gap.before_step}, "
            f"{path}:{last + 21})."
        )
        assert status == (0 if command[0] == "explain" else 2)
        main([*command, "--json"])
        assert Gap.model_validate(json.loads(capsys.readouterr().out)["gap"]) == gap
    assert main(["explain", path, "r3", "--lang", "zh-CN"]) == 0
    assert capsys.readouterr().out.startswith(f"日志中间缺少 {gap.missing} 个事件")
    assert main(["explain", path, "nobody"]) == 1
    said = capsys.readouterr().err
    assert "no request 'nobody'" in said
    assert f"admitscope: {gap.text()} A request may be among them." in said


def test_an_explanation_says_whether_the_gap_is_behind_the_request(recorded: Recorded, tmp_path: Path) -> None:
    lines = recorded(*RUNS[1])
    ends = [n for n, line in enumerate(lines) if b'"target":"finished"' in line and b'"rid":"r0"' in line]
    behind = explain(written(tmp_path, lines, range(ends[0] + 60, ends[0] + 100)), "r0")
    assert behind.warnings[0].endswith("This request had ended before.")
    assert behind.text().splitlines()[0] == behind.warnings[0]
    within = explain(written(tmp_path, lines, range(ends[0] - 20, ends[0] - 10)), "r0")
    assert within.warnings[0].endswith("What is told of this request may lack a part.")
    assert within.sentences


def test_an_explanation_says_that_the_journal_ends_early(recorded: Recorded, tmp_path: Path) -> None:
    lines = recorded(*RUNS[0])
    path = written(tmp_path, lines, range(400, len(lines)))
    story = explain(path, "r0")
    assert (story.open_end, story.gap) == (f"{path}:400", None)
    assert story.text().splitlines()[-1].startswith(f"The journal ends early: {path}:400 is not the line that closes")
    assert json.loads(story.model_dump_json())["warnings"] == list(story.warnings)
    with pytest.raises(UnknownRequest, match="The journal ends early"):
        explain(path, "nobody")
    assert explain(written(tmp_path, lines), "r0").warnings == ()


def test_two_lines_that_became_one_are_named(recorded: Recorded, tmp_path: Path) -> None:
    """A block of a file that is gone begins and ends inside of lines."""
    lines = recorded(*RUNS[0])
    for first in (b'"StepPlanned"', b'"PagesMoved"', b'"AdmissionDecided"'):
        at = next(n for n in range(300, len(lines)) if first in lines[n])
        joined = [*lines[:at], lines[at][:60] + lines[at + 30][40:], *lines[at + 31 :]]
        path = written(tmp_path, joined)
        for read in (check, replay, lambda journal: explain(journal, "r0")):
            with pytest.raises(JournalError, match=rf"cut\.jsonl:{at + 1}: the line is damaged"):
                read(path)


def test_what_the_journal_tells_itself_is_no_gap(recorded: Recorded, tmp_path: Path, simulated_run: Any) -> None:
    """Events that a queue dropped, segments, and a journal that was full."""
    run = simulated_run(tmp_path / "whole.jsonl", 4, policy=Policy.SHORTEST_PREFILL_FIRST)
    run.engine.scheduler.kv.allocation_fault = lambda _phase: run.engine.steps_done % 40 < 20
    run.play(8)
    events = run.recorded.events
    for kept, options in (
        ([each for each in events if not 200 <= each.seq < 260 and each.seq % 97 != 5], {}),
        (events, {"rotate_bytes": 50_000}),
        (events, {"checkpoint_steps": 7}),
        (events[:300], {}),
    ):
        folder = tmp_path / f"{len(kept)}-{options}"
        folder.mkdir()
        sink = JournalSink(folder / "run.jsonl", **options)
        sink.take(kept)
        sink.close()
        assert gaps_in(folder) == NO_GAPS
        assert explain(folder, "r0").warnings == ()
        report, replayed = check(folder), replay(folder)
        assert (report.gap, report.counts, replayed.gap, replayed.divergence) == (None, {}, None, None)
        assert feed(folder, lambda _: None).gap is None


def test_a_hole_in_the_record_of_another_engine(tmp_path: Path, simulated_run: Any) -> None:
    run = simulated_run(tmp_path / "own.jsonl", 2)
    run.play(6)
    path = tmp_path / "run.jsonl"
    source = SourcePart(name="sglang", version="SGLang 0.5.23", overlaps=False, absent={})
    sink = JournalSink(path, source=source)
    sink.take(run.recorded.events)
    sink.close()
    assert check(path).gap is None
    lines = path.read_bytes().splitlines(keepends=True)
    path = written(tmp_path, lines, range(100, 101))
    report = check(path)
    assert (report.verdict, report.counts) == ("incomplete", {})
    assert report.gap == feed(path, lambda _: None).gap == gaps_in(path).first
    assert report.gap is not None
    assert (report.gap.missing, report.gap.after_line) == (1, f"{path}:100")


def test_a_recording_tells_its_gap(recorded: Recorded, tmp_path: Path) -> None:
    path = written(tmp_path, recorded(*RUNS[0]), range(300, 340))
    told = Recording(path, in_background=False).progress()
    assert told.error is None
    assert told.gap == gaps_in(path).first
    assert not any("no line of the journal" in note for note in told.notes), "said once is enough"
