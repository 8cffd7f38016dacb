"""Formats: every number has one way to be written, and a missing one is a dash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard import formats as f


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.0, "0.0\u00a0ms"),
        (0.000067018, "67.0\u00a0µs"),
        (0.0000998, "0.1\u00a0ms"),
        (0.00123, "1.2\u00a0ms"),
        (0.0124, "12\u00a0ms"),
        (0.25, "250\u00a0ms"),
        (0.9994, "999\u00a0ms"),
        (0.9996, "1.00\u00a0s"),
        (9.994, "9.99\u00a0s"),
        (12.34, "12.3\u00a0s"),
        (99.6, "1:40\u00a0min"),
        (3599.6, "1:00\u00a0h"),
        (7500.0, "2:05\u00a0h"),
        (None, "–"),
    ],
)
def test_a_duration_has_about_three_figures_and_a_unit(value: float | None, written: str) -> None:
    assert f.duration(value) == written


def test_thousands_are_parted_by_a_space_that_does_not_break() -> None:
    assert f.count(1234567) == "1\u202f234\u202f567"
    assert f.tokens(-16.0) == "\u221216"
    assert f.tokens(88.5) == "88.5"
    assert f.tokens(None) == f.count(None) == f.rate(None) == "–"


@pytest.mark.parametrize(
    ("part", "whole", "written"), [(1, 3, "33\u00a0%"), (3, 40, "7.5\u00a0%"), (0, 5, "0\u00a0%"), (1, 0, "–")]
)
def test_a_share_of_nothing_is_no_number(part: float, whole: float, written: str) -> None:
    assert f.share(part, whole) == written


def test_a_ledger_that_nothing_was_taken_from_is_written_once() -> None:
    assert f.before_after(128, 32) == "128 → 32"
    assert f.before_after(128, 128) == "128"
    assert f.before_after(None, None) == "–"


@given(st.text(min_size=0, max_size=200), st.integers(min_value=6, max_value=40))
def test_a_shortened_id_keeps_both_ends_and_the_limit(rid: str, limit: int) -> None:
    short = f.short_rid(rid, limit)
    assert len(short) <= limit
    if len(rid) <= limit:
        assert short == rid
    else:
        head, tail = short.split("…") if rid.count("…") == 0 else (short[:1], short[-1:])
        assert rid.startswith(head)
        assert rid.endswith(tail)


@given(st.floats(min_value=0, max_value=1e7, allow_nan=False))
def test_no_duration_is_longer_than_a_table_cell(value: float) -> None:
    assert len(f.duration(value)) <= 12
