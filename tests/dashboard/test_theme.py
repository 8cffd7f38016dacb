"""Colours: legible in both tones, and told apart by eyes that lack red or green receptors."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from dashboard.theme import DARK, LIGHT, Palette, blocker_colour, contrast, page_css, palette
from telemetry.observe import BLOCKERS, PAGE_STATES, TTFT_PARTS

TONES = pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])

#: Linear-light simulation of full protanopia and deuteranopia (Viénot, Brettel and Mollon 1999, in linear RGB).
PROTAN = np.array([[0.1124, 0.8876, 0.0], [0.1124, 0.8876, 0.0], [0.0040, -0.0040, 1.0]])
DEUTAN = np.array([[0.2920, 0.7080, 0.0], [0.2920, 0.7080, 0.0], [-0.0223, 0.0223, 1.0]])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


@TONES
@pytest.mark.parametrize("name", ["text", "muted", "good", "warn", "bad", "accent"])
def test_text_is_legible_on_page_and_surface(colours: Palette, name: str) -> None:
    assert contrast(getattr(colours, name), colours.page) >= 4.5
    assert contrast(getattr(colours, name), colours.surface) >= 4.5


@TONES
def test_marks_stand_out_from_the_page(colours: Palette) -> None:
    marks = {**colours.blockers, **colours.work, "decode": colours.decode, "p50": colours.p50, "p99": colours.p99}
    marks |= {name: colour for name, colour in colours.states.items() if name != "free"}
    marks |= {name: colour for name, colour in colours.segments.items() if name != "left"}
    marks |= {f"owner {i}": colour for i, colour in enumerate(colours.owners)}
    weak = {name: round(contrast(colour, colours.page), 2) for name, colour in marks.items()}
    assert {name: ratio for name, ratio in weak.items() if ratio < 3} == {}


@TONES
@pytest.mark.parametrize("eyes", [np.eye(3), PROTAN, DEUTAN], ids=["full", "protan", "deutan"])
def test_page_states_and_ledger_parts_are_told_apart_by_all_eyes(colours: Palette, eyes: np.ndarray) -> None:
    for family in (colours.states, {k: v for k, v in colours.segments.items() if k not in {"overdraft", "running"}}):
        for (one, a), (other, b) in combinations(family.items(), 2):
            seen = np.cbrt(np.clip(eyes @ linear(a), 0, 1)) - np.cbrt(np.clip(eyes @ linear(b), 0, 1))
            assert np.linalg.norm(seen) > 0.12, f"{one} and {other}"


@TONES
def test_every_word_of_the_engine_has_a_colour(colours: Palette) -> None:
    assert set(colours.blockers) == set(BLOCKERS)
    assert set(colours.states) == set(PAGE_STATES)
    assert set(colours.work) == set(TTFT_PARTS) - {"queue"}
    assert not {*colours.work.values(), colours.decode} & set(colours.blockers.values())
    assert len({*colours.work.values(), colours.decode}) == len(colours.work) + 1
    assert contrast(colours.blockers["order"], colours.blockers["engine_busy"]) >= 2, "both are grey"
    assert blocker_colour(colours, "a word of next year") == colours.blockers["order"]


def test_an_unknown_theme_is_light() -> None:
    assert palette(None) is palette("light") is LIGHT
    assert palette("dark") is DARK
    assert "https:" not in page_css(LIGHT)
    assert "@import" not in page_css(LIGHT)
