"""Commands that the program prints can be pasted into the shell that started it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from telemetry.program import program


def _install(folder: Path) -> Path:
    script = folder / "admitscope"
    folder.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return script


def test_a_program_that_the_shell_finds_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _install(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "demo"])
    assert program() == "admitscope"


def test_another_program_of_that_name_is_not_the_one_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, script = _install(tmp_path / "other"), _install(tmp_path / ".venv" / "bin")
    monkeypatch.setenv("PATH", str(other.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "demo"])
    monkeypatch.chdir(tmp_path)
    assert program() == ".venv/bin/admitscope"


def test_a_program_elsewhere_goes_by_its_whole_path_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = _install(tmp_path / "two words")
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", [str(script), "serve"])
    assert program() == f"'{script}'"


def test_a_module_has_no_script_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/telemetry/cli.py", "serve"])
    assert program() == "admitscope"
