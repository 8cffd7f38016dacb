"""docs/field-reports.md names every report once, every file that has a test of it, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "field-reports.md"
REPORTS = range(1, 50)


@cache
def files_by_report() -> dict[int, set[str]]:
    """Files below tests/, by the number in the names of their tests."""
    found: dict[int, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                named = re.match(r"test_fr_(\d\d)_", node.name)
                if named:
                    found[int(named[1])].add(path.relative_to(TESTS).as_posix())
    return found


def rows(heading: str) -> list[list[str]]:
    """Cells of the table below a heading; "" is the top of the page."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"## {heading}\n", 1)[1] if heading else text
    lines = section.split("\n## ", 1)[0].splitlines()
    table = [line for line in lines if re.match(r"\| \d\d \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_every_report_stands_in_the_table_once_with_its_source() -> None:
    assert [int(row[0]) for row in rows("")] == list(REPORTS)
    for number, what, source, _ in rows(""):
        assert what, number
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+ (PR )?#\d+", one) for one in source.split(", ")), source


def test_the_table_names_the_files_that_have_its_tests_and_no_others() -> None:
    told = {int(row[0]): set(re.findall(r"`([^`]+)`", row[3])) for row in rows("")}
    assert told == {number: files_by_report()[number] for number in REPORTS}


def test_no_test_names_a_report_that_there_is_not() -> None:
    assert set(files_by_report()) <= set(REPORTS)


def test_what_is_not_built_is_refused_by_a_test() -> None:
    parts = rows("What needs a part that is not built")
    assert [int(row[0]) for row in parts] == [15, 16, 17, 18, 26]
    assert all(row[1] and row[2] for row in parts)
    for number in (15, 17, 26):
        assert "field/test_parts_not_built.py" in files_by_report()[number]
