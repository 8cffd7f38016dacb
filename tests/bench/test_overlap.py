"""The measurement of overlap runs; what it measures is no test's business."""

from __future__ import annotations

import pytest

from bench import overlap


def test_it_prints_a_row_for_each_size_and_forward(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--rows", "2", "3", "--forward-ms", "0", "--steps", "10"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| 2 ", "| 3 "))]
    assert len(rows) == 2
