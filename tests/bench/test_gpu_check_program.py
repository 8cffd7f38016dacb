"""gpu_check as a program: its options, and a machine without a GPU, of which it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.gpu_check import __main__ as program
from bench.gpu_check import cuda, runner
from bench.gpu_check.runner import chosen, sections


def test_without_a_gpu_it_says_so_after_section_0_and_ends_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "has_gpu", lambda: False)
    assert program.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "No GPU that torch can use here" in said
    assert f"torch: {torch.__version__}" in said
    written = json.loads((tmp_path / "gpu_check.json").read_text("utf-8"))
    assert [section["number"] for section in written["sections"]] == list(range(14))
    assert {section["status"] for section in written["sections"][1:]} == {"not run"}
    assert written["failed_checks"] == 0
    assert len(written["left_out"]) == len(runner.LEFT_OUT)
    page = (tmp_path / "gpu_check.md").read_text("utf-8")
    assert page.count("not run: no GPU") == 13
    assert "the engine in this process" in page


def test_only_names_sections_that_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [section.number for section in chosen(sections(), {0, 3, 12})] == [3, 12]
    with pytest.raises(SystemExit):
        program.main(["--only", "2,14", "--out", str(tmp_path)])
    assert "--only 14: sections are 0 to 13" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "", "1,,2", "1.5"])
def test_only_takes_numbers_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["--only", text, "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert f"--only: {text!r} is not numbers of sections with commas between" in capsys.readouterr().err


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(cuda, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(cuda, "machine", dict)
    file = tmp_path / "a file"
    file.touch()
    with pytest.raises(SystemExit) as ended:
        program.main(["--out", str(file / "folder")])
    assert ended.value.code == 2
    assert f"--out {file / 'folder'}: Not a directory; a folder" in capsys.readouterr().err


def test_all_sections_together_take_less_than_ten_minutes() -> None:
    assert sum(section.limit_s for section in sections()) + 20 < 600
