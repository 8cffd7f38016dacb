"""A page move is judged and followed the same whether it is walked page by page or swept with arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import SCHEMA_VERSION, EngineStarted, PagesMoved
from invariants import page_laws
from invariants.page_laws import LEGAL
from invariants.shadow import Shadow
from tests.builders import engine_config

PAGES = 12
CAUSES = sorted(LEGAL)


def books(states: list[int], owners: list[int]) -> Shadow:
    """Second books of a pool whose pages are in the given states."""
    config = engine_config(num_pages=PAGES).model_dump_json()
    shadow = Shadow(EngineStarted(0, 0, 0, SCHEMA_VERSION, "", config, "", "", 16, PAGES, 4, 0, ""))
    shadow.states[:] = states
    shadow.owners[:] = [-1 if state == 0 else owner for state, owner in zip(states, owners, strict=True)]
    shadow.recount()
    return shadow


@settings(max_examples=300, deadline=None)
@given(
    states=st.lists(st.integers(0, 3), min_size=PAGES, max_size=PAGES),
    owners=st.lists(st.integers(0, 2), min_size=PAGES, max_size=PAGES),
    pages=st.lists(st.integers(0, PAGES - 1), min_size=1, max_size=5),
    move=st.sampled_from(CAUSES),
    owner=st.integers(0, 2),
    claimed=st.integers(0, PAGES - 1),
)
def test_walk_and_sweep_agree(
    states: list[int], owners: list[int], pages: list[int], move: tuple[str, str, str], owner: int, claimed: int
) -> None:
    source, target, cause = move
    prefix = {"free": "", "private": "r:", "protected": "n:", "evictable": "n:"}[target]
    label = f"{prefix}{owner}" if prefix else ""
    event = PagesMoved(1, 7, 0, np.array(pages, "<i4").tobytes(), source, target, label, cause)
    outcomes = []
    for method, form in ((page_laws._walk, pages), (page_laws._sweep, np.array(pages, "<i4"))):
        told: list[str] = []
        shadow = books(states, owners)
        shadow.in_commit = True
        shadow.claimed_step[claimed] = 7
        number = owner if prefix else -1
        method(
            shadow,
            form,
            LEGAL[move],
            number,
            event,
            lambda law, *_, told=told, **__: told.append(law),
        )
        outcomes.append((sorted(set(told)), shadow.states.tolist(), shadow.owners.tolist(), shadow.counts,
                         shadow.private_of_row))  # fmt: skip
    assert outcomes[0] == outcomes[1]
