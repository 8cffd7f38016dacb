"""Every property that users rely on is guarded: by a law, or in a way that is written down."""

from __future__ import annotations

from invariants.catalog import CATALOG
from invariants.properties import BY_ID, PROPERTIES


def test_each_property_has_a_law_or_says_how_it_is_held() -> None:
    guarded = {name for law in CATALOG for name in law.properties}
    assert [entry.id for entry in PROPERTIES if entry.id not in guarded and not entry.beside] == []


def test_laws_name_known_properties_and_every_law_names_one() -> None:
    assert len(BY_ID) == len(PROPERTIES) == 18
    for law in CATALOG:
        assert law.properties, law.id
        assert set(law.properties) <= BY_ID.keys(), law.id
