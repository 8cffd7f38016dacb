"""Explanations in Chinese: all of every sentence, nothing but codes, ids and units left as they are, the same facts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from engine.clock import VirtualClock
from engine.config import Policy, SchedulerConfig
from engine.request import Cause, FinishReason, RequestState
from engine.scheduler.decision import Overdraft, Reason
from engine.scheduler.plan import StepKind
from telemetry import words
from telemetry.cli import main
from telemetry.explain import explain
from telemetry.explain_life import told
from telemetry.live_explain import sentences
from telemetry.observe import BLOCKERS
from telemetry.read_model import ReadModel
from telemetry.recorded import RecordedSource, Recording
from telemetry.schema_parts import LedgerPart
from telemetry.words import CHINESE, ENGLISH, dictionary, speaking
from tests.builders import engine_config
from tests.telemetry.live_run import TimedRun
from tests.telemetry.lives import Maker
from tests.texts import literals

JOURNAL = Path(__file__).parent / "data" / "explained.jsonl.gz"
#: Seeds of made-up lives after which every text was said.
SEEDS = range(1500)
LATIN = re.compile(r"[A-Za-z][A-Za-z0-9_.=-]*")
ENUMS: tuple[type[StrEnum], ...] = (Cause, FinishReason, Overdraft, Policy, Reason, RequestState, StepKind)
#: Names that are the same in every language.
NAMES = {
    *(member.value for kind in ENUMS for member in kind),
    *LedgerPart.model_fields,
    *BLOCKERS,
    *SchedulerConfig.model_fields,
    *("prefix_len", "extend_len", "max_tokens", "server.queue_timeout_s", "schedule_policy=fcfs"),
    *("KV", "TTFT", "TBT", "UTC", "id", "ms", "s", "client_disconnected", "executor_failed"),
    # Causes of a retraction.
    *("kv_now", "preempt"),
}


def english_in(text: str, *ids: str) -> set[str]:
    """Words of `text` that are neither names, nor ids (`r7`, or one of `ids`), nor units."""
    return {word for word in LATIN.findall(text) if not re.fullmatch(r"r\d+", word)} - NAMES - set(ids)


@pytest.mark.parametrize("rid", ["r9", "r14", "r20", "r23"])
def test_the_recorded_journal_tells_the_recorded_story_in_chinese(rid: str) -> None:
    """Chunks and an overdraft, an abort, a retraction, an error. ADMITSCOPE_REWRITE=1 as for the English one."""
    text, file = explain(JOURNAL, rid, CHINESE).text(CHINESE) + "\n", JOURNAL.parent / f"explained.{rid}.zh-CN.txt"
    if os.environ.get("ADMITSCOPE_REWRITE"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")
    assert english_in(text) == set()


def test_every_sentence_that_can_be_made_is_chinese_and_has_the_numbers_of_the_english_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = dictionary(CHINESE)
    used: set[str] = set()

    class Watched(dict[str, str]):
        def get(self, text: str, other: Any = None) -> Any:
            used.add(text)
            return found.get(text, other)

    monkeypatch.setattr(words.Words, "dictionary", lambda _, lang: {} if lang == ENGLISH else Watched())
    for seed in SEEDS:
        made = Maker(seed)
        life, live = made.life(), made.told_live()
        english = [*(sentence.text for sentence in told(life)), *sentences(**live)]
        with speaking(CHINESE):
            chinese = [*(sentence.text for sentence in told(life)), *sentences(**live)]
        for before, after in zip(english, chinese, strict=True):
            assert english_in(after, "kv_unheard_of", "unheard_of") == set(), (before, after)
            assert _numbers(after) == _numbers(before), (before, after)
    of_the_record = ("telemetry/explain.py:", "telemetry/journal_gaps.py:")
    about_the_record = {text for text, place in literals("telemetry").items() if place.startswith(of_the_record)}
    assert "The journal ends early: {why}" in about_the_record
    assert set(found) - used == about_the_record


def _numbers(text: str) -> list[str]:
    """Every number of a sentence, in any order; an English `1 row` has one that Chinese counts too."""
    return sorted(re.findall(r"\d[\d,.]*\d|\d", text))


def test_a_rich_life_of_a_running_engine_is_told_in_chinese() -> None:
    """Chunks, a retraction, overtaking, and waiting now."""
    clock = VirtualClock()
    model = ReadModel(clock=clock)
    config = engine_config(
        num_pages=14,
        page_size=4,
        chunked_prefill_size=8,
        schedule_conservativeness=0.05,
        clip_max_new_tokens=1,
        schedule_policy="shortest-prefill-first",
    )
    run = TimedRun(config, model)
    for number in range(3):
        run.add(f"r{number}", 10, 30, ignore_eos=True)
    told_so_far: set[str] = set()
    for step in range(60):
        run.timed_step()
        if step == 10:
            for number in range(3, 9):
                run.add(f"r{number}", 24 - 2 * number, 4)
        clock.advance_ns(max(run.now_ns - clock.now_ns(), 0))
        for row in model.requests(100).live:
            said = model.explain(row.rid, CHINESE)
            assert said is not None
            told_so_far.update(said.sentences)
    every = "\n".join(told_so_far)
    assert english_in(every) == set()
    for word in ("按余量截断", "被撤回队列", "自撤回起已等", "被越过", "它正在等待", "首个词元", "它前面有"):
        assert word in every, word


def test_a_life_that_still_waits_and_a_torn_journal_are_told_in_chinese(tmp_path: Path, simulated: Any) -> None:
    run = simulated(tmp_path / "run.jsonl", 3, policy=Policy.SHORTEST_PREFILL_FIRST)
    run.add("r1", tuple(range(100, 120)), 400, ignore_eos=True)
    run.add("r2", tuple(range(500)), 40)
    for number in range(3, 7):
        run.add(f"r{number}", tuple(range(200 + number, 260 + number)), 4)
    run.play(0, stop_after=12)
    path = tmp_path / "run.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    story = explain(path, "r2", CHINESE)
    text = story.text(CHINESE)
    assert story.torn is not None
    assert text.endswith(f"日志提前结束：{story.torn}")
    assert "记录结束时仍在等待" in text
    assert "越过" in text
    assert english_in(text.removesuffix(story.torn)) == set()


def test_the_language_changes_the_sentences_and_nothing_else() -> None:
    english, chinese = explain(JOURNAL, "r20"), explain(JOURNAL, "r20", CHINESE)
    assert chinese.life == english.life
    assert [(s.at_ns, s.step) for s in chinese.sentences] == [(s.at_ns, s.step) for s in english.sentences]
    assert json.loads(chinese.model_dump_json()).keys() == json.loads(english.model_dump_json()).keys()
    assert explain(JOURNAL, "r20") == english, "the language of one answer does not stay"


def test_the_command_tells_it_in_the_language_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(JOURNAL), "r9", "--lang", "zh-CN"]) == 0
    assert capsys.readouterr().out == (JOURNAL.parent / "explained.r9.zh-CN.txt").read_text(encoding="utf-8")
    assert main(["explain", str(JOURNAL), "r9", "--lang", "zh-CN", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sentences"][0]["text"].startswith("请求 r9 于 ")
    assert main(["explain", str(JOURNAL), "r9"]) == 0
    assert capsys.readouterr().out == (JOURNAL.parent / "explained.r9.txt").read_text(encoding="utf-8")
    assert main(["explain", str(JOURNAL), "r9", "--lang", "fr"]) == 2
    assert "--lang: Input should be 'en' or 'zh-CN'; got 'fr'" in capsys.readouterr().err


@pytest.fixture
def recorded() -> Iterator[RecordedSource]:
    recording = Recording(JOURNAL, in_background=False)
    source = RecordedSource(recording)
    source.seek(recording.at_step(30))
    yield source
    recording.close()


def test_a_recorded_engine_tells_it_in_the_language_asked_for(recorded: RecordedSource) -> None:
    for row in recorded.requests().live:
        english, chinese = recorded.explain(row.rid), recorded.explain(row.rid, CHINESE)
        assert english is not None
        assert chinese is not None
        assert chinese.sentences[0].startswith(f"请求 {row.rid} 到达")
        assert english_in("".join(chinese.sentences)) == set()
        assert recorded.explain(row.rid) == english
