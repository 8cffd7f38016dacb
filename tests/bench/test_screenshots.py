"""Pictures of the documentation: small, in the colours that mean something, and all there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs the package playwright: pip install -e '.[dev]'")

from PIL import Image

from bench.screenshots import ROOT, _with_palette

#: Of all pictures of pages together.
MOST_BYTES = 1_500_000


def test_a_green_digit_survives_among_more_greys_than_the_palette_has() -> None:
    picture = Image.new("RGB", (256, 256), (252, 252, 251))
    for x in range(256):
        for y in range(128):
            picture.putpixel((x, y), (x, x, min(255, x + y // 64)))
    green = (0, 113, 79)
    for x in range(5):
        picture.putpixel((x, 200), green)
    small = _with_palette(picture)
    assert small.mode == "P"
    assert small.convert("RGB").getpixel((2, 200)) == green
    assert small.convert("RGB").getpixel((250, 250)) == (252, 252, 251)


def test_every_picture_that_a_page_shows_is_there_and_all_are_small() -> None:
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(((?:docs/)?img/page-[^)]+)\)", page.read_text("utf-8")):
            shown.add((page.parent / link).resolve())
    assert shown
    assert [path for path in shown if not path.is_file()] == []
    pictures = list(Path(ROOT / "docs" / "img").glob("page-*.png"))
    assert sum(path.stat().st_size for path in pictures) < MOST_BYTES
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.size in {(1440, 900), (390, 844)}, path.name
