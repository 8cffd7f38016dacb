"""docs/reference/invariants.md is what the catalogue says."""

from __future__ import annotations

from invariants.catalog import CATALOG
from invariants.docs import PAGE, render


def test_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m invariants.docs"


def test_page_names_every_law_once() -> None:
    page = render()
    for law in CATALOG:
        assert page.count(f"### {law.id}\n") == 1
        assert law.sentence in page
