"""What a Perfetto export refuses: windows and requests that the record lacks, places that must not be written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from telemetry.cli import main
from telemetry.export.parquet_files import ExportError
from telemetry.export.perfetto import UnknownRid, export_trace
from telemetry.settings import ExportCommand
from tests.telemetry.test_perfetto import JOURNAL, exported


def test_windows_that_the_record_does_not_have_are_named(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    with pytest.raises(ExportError, match=r"from-step=99999: .* steps 1 to \d+"):
        exported(path, from_step=99_999)
    with pytest.raises(ExportError, match=r"from-s=1e\+06|from-s=1000000"):
        exported(path, from_s=1_000_000)
    with pytest.raises(UnknownRid, match="rid='nobody'"):
        exported(path, rid=("nobody",))
    assert list(tmp_path.iterdir()) == [], "nothing is left of an export that failed"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--from-step", "5", "--to-step", "4"], 2, "--to-step is 4; it must not be before --from-step, which is 5"),
        (["--from-step", "5", "--to-s", "4"], 2, "in steps or in seconds"),
        (["--from-step", "-1"], 2, "--from-step"),
        (["--from-s", "1e300"], 2, "--from-s: Input should be less than or equal to 3153600000; got '1e300'"),
        (["--to-s", "1e300"], 2, "--to-s: Input should be less than or equal to 3153600000; got '1e300'"),
        (["--rid", "nobody"], 1, "rid='nobody'"),
    ],
)
def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, said: str
) -> None:
    assert main(["export", "--perfetto", str(tmp_path / "t.json"), *words, str(JOURNAL)]) == status
    assert said in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--perfetto", "/nosuch/t.json", str(JOURNAL)]) == 2
    assert "perfetto='/nosuch/t.json': No such file or directory" in capsys.readouterr().err


def test_a_trace_takes_the_place_of_no_journal_and_of_no_device(tmp_path: Path) -> None:
    """The trace is moved to its name: that would end the journal it is read from, or, as root, /dev/null."""
    journal, other, pipe = tmp_path / "run.jsonl.gz", tmp_path / "other.jsonl.gz", tmp_path / "pipe"
    journal.write_bytes(JOURNAL.read_bytes())
    other.symlink_to(journal)
    os.mkfifo(pipe)
    for path, said in ((journal, "a file of the journal"), (other, "a file of the journal"), (pipe, "no regular file")):
        with pytest.raises(ExportError, match=rf"perfetto='{re.escape(str(path))}': is {said}"):
            export_trace(ExportCommand(journal=journal, perfetto=path), path)
    assert journal.read_bytes() == JOURNAL.read_bytes()
    assert pipe.is_fifo()


def test_a_window_in_which_nothing_happened_is_refused(tmp_path: Path, simulated: Any) -> None:
    run = simulated(tmp_path / "run.jsonl", 5)
    for rid in ("before", "after"):
        run.add(rid, (1, 2, 3), 2)
        while run.live:
            run.step()
        run.clock.advance_ns(60_000_000_000)
    run.journal.close()
    with pytest.raises(ExportError, match=r"from-s=20.0, to-s=30.0: the journal has no step and no request"):
        exported(tmp_path / "w.json", tmp_path / "run.jsonl", from_s=20.0, to_s=30.0)
    assert not (tmp_path / "w.json").exists()
