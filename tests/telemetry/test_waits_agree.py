"""One definition of what held a request: the page of a recording and `explain` of its journal say the same, in ns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from telemetry.blockers import INDEX, OF_REASON
from telemetry.explain import explain_records
from telemetry.journal_reader import JournalReader
from telemetry.life_facts import HeldShare
from telemetry.observe import BLOCKERS, Timeline
from telemetry.recorded import RecordedSource, Recording
from telemetry.schema_events import RequestArrivedRecord
from tests.telemetry.recorded_run import record


def _blocker(share: HeldShare) -> str:
    """The page's word for it."""
    if share.reason is None:
        return "engine_busy"
    return BLOCKERS[OF_REASON[share.reason]] if share.is_own else "order"


def _ends(timeline: Timeline) -> Counter[str]:
    """Time under `order` by what ended the passes ahead."""
    ends: Counter[str] = Counter()
    for wait in timeline.waits:
        if wait.blocker == "order":
            for end in wait.ended_by:
                ends[end.reason] += end.ns
    return +ends


@pytest.mark.parametrize(("rows", "seed"), [(6, 3), (9, 5)])
def test_a_wait_is_cut_alike_by_the_page_and_by_explain(tmp_path: Path, rows: int, seed: int) -> None:
    journal = tmp_path / "run.jsonl"
    record(journal, requests=50, seed=seed, rows=rows)
    recording = Recording(journal, in_background=False)
    source = RecordedSource(recording)
    met: Counter[str] = Counter()
    records = list(JournalReader(journal).records())
    rids = [each.rid for each in records if isinstance(each, RequestArrivedRecord)]
    source.seek(recording.moment(10**9))
    for rid in rids:
        detail = source.request(rid)
        assert detail is not None
        by_page: Counter[str] = Counter()
        for wait in detail.timeline.waits:
            by_page[wait.blocker] += wait.end_ns - wait.start_ns
        by_explain: Counter[str] = Counter()
        ends: Counter[str] = Counter()
        for stay in explain_records(records, rid).life.waits:
            for share in stay.held:
                by_explain[_blocker(share)] += share.ns
                if _blocker(share) == "order" and share.reason is not None:
                    ends[share.reason] += share.ns
        assert +by_page == +by_explain, rid
        assert _ends(detail.timeline) == ends, rid
        met.update(set(+by_page))
    assert met.keys() <= INDEX.keys()
    assert all(met[blocker] for blocker in ("rows", "kv_total", "chunk", "order")), met
