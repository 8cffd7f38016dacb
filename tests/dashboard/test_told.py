"""Deeds told by the browser: each is done once and in order, however messages are lost, late or repeated."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboard.told import Told, selections_of


def message(*numbers: int, page: str = "a") -> dict[str, object]:
    return {"page": page, "waiting": [[n, "go", {"step": n}] for n in numbers]}


def numbers_done(told: Told, told_now: object) -> list[int]:
    return [value["step"] for _, value in told.new(told_now)]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 12), st.booleans()), max_size=40))
def test_each_deed_is_done_once_and_in_order_whatever_becomes_of_its_messages(
    messages: list[tuple[int, int, bool]],
) -> None:
    """A page tells all up to `last` that it does not know as done; `lag` is how far behind its knowledge is."""
    told, seen, last, done = Told(), 0, 0, []
    for more, lag, is_lost in messages:
        last += more
        seen = max(seen, told.done - lag)
        if not is_lost:
            done += numbers_done(told, message(*range(seen + 1, last + 1)))
    done += numbers_done(told, message(*range(told.done + 1, last + 1)))
    assert done == list(range(1, last + 1))


def test_a_deed_within_which_the_run_was_broken_off_is_done_by_the_next_run() -> None:
    told = Told()
    for _, value in told.new(message(1, 2, 3)):
        if value["step"] == 2:
            break
    assert numbers_done(told, message(1, 2, 3)) == [2, 3]
    assert numbers_done(told, message(1, 2, 3)) == []


def test_a_page_that_is_loaded_anew_counts_from_one_again() -> None:
    told = Told()
    assert numbers_done(told, message(1, 2)) == [1, 2]
    assert numbers_done(told, message(1, page="b")) == [1]
    assert told == Told("b", 1)


@pytest.mark.parametrize(
    "strange",
    [
        None,
        [],
        {"page": "a"},
        {"page": "a", "waiting": "x"},
        {"page": "a", "waiting": [[1, "key", "F5"], [True, "go", {}], ["1", "go", {}], [2, "shell", "x"], [3, "go"]]},
        {"page": "a", "waiting": [[1, "address", {}], [2, "go", "x"], [3, "key", ["space"]], 4, None]},
    ],
)
def test_what_no_page_of_ours_sends_is_passed_over(strange: object) -> None:
    assert list(Told().new(strange)) == []


def test_an_address_selects_by_name() -> None:
    assert selections_of("?view=kv&page=7&rid=a%20b&set=") == {"view": "kv", "page": "7", "rid": "a b", "set": ""}
    assert selections_of("") == {}
