"""Every recorded decision this build can make is made exactly; what it cannot run is counted, so it only shrinks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conformance import run
from tests.conformance.cases import NEEDS_GUARDS_OFF, RECORDED, cases_of, files_of, play, stem

FILES: Final = {stem(path): list(cases_of(path)) for path in files_of(RECORDED)}

#: Cases in each file.
TOTALS: Final = {"article": 18, "edges": 90, "edges_reserve": 6, "passes": 252, "teaching": 42, "traces": 63}

#: What this build cannot run, file -> cause -> cases. Nothing is left; a case that slips in here fails the test.
UNSUPPORTED: Final[dict[str, dict[str, int]]] = {}


def test_the_recorded_files_are_whole() -> None:
    assert {name: len(cases) for name, cases in FILES.items()} == TOTALS
    ids = Counter(case["scenario"]["id"] for cases in FILES.values() for case in cases)
    assert [case_id for case_id, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(TOTALS))
def test_every_supported_case_passes_exactly(name: str) -> None:
    """With guards on, as in service: they must not change a decision that the reference is right about."""
    verdicts = [play(case) for case in FILES[name]]
    assert [f"{v.case_id}: {v.detail}" for v in verdicts if v.status == "failed"] == []
    assert dict(Counter(v.detail for v in verdicts if v.status == "unsupported")) == UNSUPPORTED.get(name, {})
    left = sum(UNSUPPORTED.get(name, {}).values())
    assert sum(v.status == "passed" for v in verdicts) == TOTALS[name] - left


@pytest.mark.parametrize("name", ["article", "edges", "teaching"])
def test_guards_off_decides_alike(name: str) -> None:
    """Without guards the engine is the reference and nothing else."""
    verdicts = [play(case, guards=False) for case in FILES[name]]
    assert [f"{v.case_id}: {v.detail}" for v in verdicts if v.status == "failed"] == []


def test_cases_without_guards_are_named_by_id() -> None:
    verdicts = [play(case) for cases in FILES.values() for case in cases]
    needed = {v.case_id: v.detail.removeprefix("guards off: ") for v in verdicts if v.status == "passed" and v.detail}
    assert needed == NEEDS_GUARDS_OFF


def _tampered(case: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    copy = json.loads(json.dumps(case))
    place = copy["expected"]
    for step in path[:-1]:
        place = place[step]
    assert place[path[-1]] != value
    place[path[-1]] = value
    return copy


def _case(name: str, case_id: str) -> dict[str, Any]:
    return next(case for case in FILES[name] if case["scenario"]["id"] == case_id)


@pytest.mark.parametrize(
    ("name", "case_id", "path", "value", "detail"),
    [
        (
            "article",
            "article/pass/fcfs",
            ("candidates", 0, 4),
            96,
            "candidates[0][4]: recorded 96, here 80",
        ),
        ("article", "article/pass/fcfs", ("chunked_req",), None, "chunked_req: recorded None, here 'A'"),
        ("article", "article/pass/fcfs", ("budget0", 2), 3368.001, "budget0[2]: recorded 3368.001, here 3368.0"),
        (
            "article",
            "article/trace/fcfs",
            ("rounds", 8, "full"),
            True,
            "rounds[11].full: recorded True, here False",
        ),
    ],
)
def test_a_changed_recording_is_noticed(
    name: str, case_id: str, path: tuple[str | int, ...], value: object, detail: str
) -> None:
    """A comparison that cannot fail would prove nothing."""
    verdict = play(_tampered(_case(name, case_id), path, value))
    assert (verdict.status, verdict.detail) == ("failed", detail)


def test_the_command_prints_the_score_and_fails_on_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = _case("article", "article/pass/fcfs")
    folder = tmp_path / "all"
    folder.mkdir()
    (folder / "one.jsonl").write_text(json.dumps(good) + "\n", "utf-8")
    assert run.main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == ["one.jsonl: 1/1", "conformance: 1 of 1"]
    bad = _tampered(good, ("candidates", 0, 4), 96)
    odd = json.loads(json.dumps(good))
    odd["scenario"]["config"]["policy"] = "no-such-order"
    broken = {"scenario": {"id": "broken"}, "expected": {}}
    lines = [json.dumps(case) + "\n" for case in (good, bad, odd, broken)]
    (folder / "two.jsonl").write_text("".join(lines), "utf-8")
    assert run.main([str(folder)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "one.jsonl: 1/1",
        "two.jsonl: 1/4",
        "  article/pass/fcfs: failed: candidates[0][4]: recorded 96, here 80",
        "  article/pass/fcfs: unsupported: policy no-such-order",
        "  broken: failed: raised KeyError: 'config'",
        "conformance: 2 of 5",
    ]


def test_the_command_refuses_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run.main([str(tmp_path)])
