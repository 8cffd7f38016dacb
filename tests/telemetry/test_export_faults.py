"""Journals that were altered, and disks that refuse: an export says so in a line, and ends with the status it names."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from telemetry.cli import main
from telemetry.export.cookbook import main as cookbook_main

RECORDED = Path(__file__).parent / "data" / "cookbook.jsonl.gz"


def altered(path: Path, kind: str, **changes: Any) -> Path:
    """The recorded run's beginning with fields of its first `kind` replaced."""
    lines = gzip.decompress(RECORDED.read_bytes()).splitlines()[:400]
    at = next(number for number, line in enumerate(lines) if line.startswith(f'{{"type":"{kind}"'.encode()))
    lines[at] = json.dumps(json.loads(lines[at]) | changes, separators=(",", ":")).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize(
    ("form", "kind", "changes"),
    [
        ("--parquet", "EngineStarted", {"t_ns": 10**30}),
        ("--parquet", "RequestArrived", {"t_ns": 10**30}),
        ("--parquet", "RequestArrived", {"prompt_len": 2**63}),
        ("--perfetto", "RequestArrived", {"parent_span_id": "no number"}),
    ],
)
def test_a_value_that_no_engine_writes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str, kind: str, changes: dict[str, Any]
) -> None:
    journal = altered(tmp_path / "run.jsonl", kind, **changes)
    assert main(["export", form, str(tmp_path / "out"), str(journal)]) == 2
    assert f"admitscope: {journal}: a value in it cannot be exported: " in capsys.readouterr().err


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 24 KiB: a write answers EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("form", ["--parquet", "--perfetto"])
def test_a_disk_that_refuses_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    out = tmp_path / "out"
    assert main(["export", form, str(out), str(RECORDED)]) == 1
    assert f"{form[2:]}={str(out)!r}: " in (said := capsys.readouterr().err)
    assert "File too large" in said
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")], "something half-written is left"


def test_the_cookbook_names_a_folder_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cookbook_main([str(tmp_path)]) == 2
    assert f"cookbook: {tmp_path}: no tables of an export" in capsys.readouterr().err
