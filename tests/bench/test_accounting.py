"""The accounting bench reads both trace formats, shares Mooncake's blocks, and prints its tables."""

from __future__ import annotations

import gzip
from pathlib import Path

import accounting
import numpy as np
import pytest


def test_azure_rows_plain_and_packed(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3,0\n"
    )
    plain, packed = tmp_path / "a.csv", tmp_path / "a.csv.gz"
    plain.write_text(text, "ascii")
    packed.write_bytes(gzip.compress(text.encode()))
    rows = accounting.rows_of(plain, 9)
    assert rows == accounting.rows_of(packed, 9)
    assert rows == [accounting.Row(0, 4808, 10), accounting.Row(52_000_000, 3, 1)]
    assert len(accounting.rows_of(plain, 1)) == 1


def test_equal_blocks_have_equal_page_keys(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]}\n'
        '{"timestamp": 3, "input_length": 1024, "output_length": 2, "hash_ids": [0, 9]}\n',
        "ascii",
    )
    first, second = accounting.rows_of(path, 5)
    assert (second.at_ns, second.blocks) == (3_000_000, (0, 9))
    one = np.frombuffer(accounting.page_keys(first, 0, 16), dtype="<i8")
    two = np.frombuffer(accounting.page_keys(second, 1, 16), dtype="<i8")
    assert (len(one), len(two)) == (1100 // 16, 64)
    assert (one[:32] == two[:32]).all()
    assert not set(one[32:]) & set(two[32:])
    assert len(set(one)) == len(one)


def test_both_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert accounting.main(["--count", "60", "--speed", "50", "--pool", "8192", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["trace", "kv", "done"]
    assert [line.split()[1] for line in lines if line.startswith("azure_conv_2023.csv.gz ")] == ["reference", "exact"]
    assert any("on the reference's own states exact admits as many at" in line for line in lines)
    assert sum(line.startswith("{") for line in lines) == 2
