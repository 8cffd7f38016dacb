"""Memory and laws on the page: numbers, marks and bounds without Streamlit, then the two views as a script."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import fake_kv
import numpy as np
import pytest
from fake_engine import FakeEngine, FakeServer
from streamlit.testing.v1 import AppTest

from dashboard import charts_kv, frames_kv, frames_laws
from dashboard.theme import DARK, LIGHT, Palette
from telemetry import observe as o

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"


def component(at: AppTest, name: str, key: str | None = None) -> dict[str, Any]:
    found = [
        json.loads(element.proto.json) for element in at.get("bidi_component") if name in element.proto.component_name
    ]
    chosen = [data for data in found if key is None or data["name"] == key]
    assert len(chosen) == 1, f"{name} {key}: {len(chosen)} of {len(found)}"
    return chosen[0]


def html(at: AppTest) -> str:
    return "\n".join(element.proto.body for element in at.get("html"))


def opened(server: FakeServer, monkeypatch: pytest.MonkeyPatch, **selected: str) -> AppTest:
    monkeypatch.setenv("ADMITSCOPE_URL", server.url)
    at = AppTest.from_file(str(APP), default_timeout=60)
    for name, value in selected.items():
        at.query_params[name] = value
    at.run()
    assert not at.exception
    return at


def selected(at: AppTest, name: str) -> str:
    """What the address says; as a list when the test wrote it, as a text when the page did."""
    value = at.session_state["selected"][name]
    return value if isinstance(value, str) else value[0]


# -- numbers and marks -----------------------------------------------------------------------------------------------


def _pool(points: int) -> o.PoolAnswer:
    made = [
        o.PoolPoint(t_wall_s=at, free=at, private=1, protected=2, evictable=3, had_tokens=9, promised_tokens=4.5)
        for at in range(points)
    ]
    head = {"engine_id": "e", "observe_seq": 1, "step": 1, "t_ns": 0, "t_wall_s": 0.0}
    return o.PoolAnswer(**head, slot_s=1.0, page_size=16, num_pages=100, points=tuple(made))


@pytest.mark.parametrize("points", [0, 1, 199, 200, 201, 600])
def test_a_long_series_is_thinned_and_keeps_its_end(points: int) -> None:
    frame = frames_kv.pool_frame(_pool(points))
    assert len(frame) <= frames_kv.MAX_SHOWN
    if points:
        assert frame["free"].iloc[-1] == points - 1
        assert frame["at"].is_monotonic_increasing


def test_the_promise_is_told_with_both_sides_and_what_is_left(engine: FakeEngine) -> None:
    pool = fake_kv.pool(engine)
    words = frames_kv.promise_words(pool)
    left = pool.points[-1].had_tokens - pool.points[-1].promised_tokens
    assert f"{left:,.0f}".replace(",", "\u202f") in words
    assert "Below zero" in words
    assert set(frames_kv.promise_frame(pool)["side"]) == set(frames_kv.SIDES)


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_specifications_do_not_depend_on_numbers_and_ask_no_other_host(engine: FakeEngine, colours: Palette) -> None:
    def specs() -> list[str]:
        pool = fake_kv.pool(engine)
        made = [
            charts_kv.pool_chart(frames_kv.pool_frame(pool), colours).to_dict(),
            charts_kv.promise_chart(frames_kv.promise_frame(pool), colours).to_dict(),
        ]
        texts = []
        for spec in made:
            names = list(spec.pop("datasets", {}))
            text = json.dumps(spec, sort_keys=True)
            for name in names:
                text = text.replace(name, "data")
            texts.append(text)
        return texts

    before = specs()
    for _ in range(60):
        engine.tick()
    assert specs() == before
    assert not any('"url"' in text for text in before)


def test_rows_of_the_tree_keep_its_shape_and_say_what_was_left_out(engine: FakeEngine) -> None:
    tree = fake_kv.tree(engine, node=None, opened={1}, top=3)
    rows = frames_kv.tree_rows(tree, (1,), 20)
    nodes = [row["node"] for row in rows if "node" in row]
    assert nodes == [row.node for row in tree.rows]
    assert rows[-1]["label"] == f"and {tree.more[0].nodes} more, {tree.more[0].pages} pages"
    assert rows[-1]["more"] == 60


def test_the_open_nodes_of_an_address_are_bounded_and_checked() -> None:
    assert frames_kv.open_nodes("3,5,3") == (3, 5)
    assert len(frames_kv.open_nodes(",".join(map(str, range(500))))) == frames_kv.MAX_OPEN
    for odd in ("", "x", "1;2", "-1", "1,", "١"):
        with pytest.raises(ValueError, match="not a list"):
            frames_kv.open_nodes(odd)
    full = tuple(range(100_000_000, 100_000_000 + frames_kv.MAX_OPEN))
    text = frames_kv.toggled(full, 7)
    assert text is not None
    assert len(text) <= 400
    assert text.endswith(",7")
    assert frames_kv.toggled((7,), 7) == "0"
    assert frames_kv.toggled((0,), 7) == "7"


def test_the_bitmap_of_an_owner_is_its_pages(engine: FakeEngine) -> None:
    pages = engine.pages()
    held = engine.nodes["node:1"]
    bits = np.unpackbits(np.frombuffer(base64.b64decode(frames_kv.owner_bitmap(pages, held[0])), dtype=np.uint8))
    assert set(np.flatnonzero(bits[: engine.num_pages]).tolist()) == set(held)
    assert frames_kv.owner_bitmap(pages, engine.owners.index("")) == ""
    assert frames_kv.owner_bitmap(pages, engine.num_pages) == ""


def test_each_page_is_told_with_holder_and_age(engine: FakeEngine) -> None:
    shared = fake_kv.page(engine, engine.nodes["node:1"][0])
    free = fake_kv.page(engine, engine.owners.index(""))
    assert shared is not None
    assert free is not None
    assert "it belongs to node 1, a shared prefix of 24 pages (384 tok)" in frames_kv.page_sentence(shared, 16)
    assert "Taken 12.5\u00a0s ago, 250 steps." in frames_kv.page_sentence(shared, 16)
    assert frames_kv.page_sentence(free, 16).endswith("nobody holds it.")


def test_what_is_only_sampled_says_so(engine: FakeEngine) -> None:
    laws = fake_kv.laws(engine)
    said = {law.id: frames_laws.judged_words(law, laws, "engine") for law in laws.laws}
    assert said["INV-CHUNK-01"] == "every event"
    assert "sample" in said["INV-INDEX-01"]
    every = next(law for law in laws.laws if law.id == "INV-INDEX-01").model_copy(update={"audit_every": 10})
    assert "every 10th audit" in frames_laws.judged_words(every, laws, "engine")


# -- the views -------------------------------------------------------------------------------------------------------


def test_a_node_that_is_picked_is_told_and_lit_on_the_map(
    engine: FakeEngine, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = opened(server, monkeypatch, view="kv", node="1", open="1")
    assert component(at, "_tree")["picked"] == 1
    lit = np.unpackbits(np.frombuffer(base64.b64decode(component(at, "page_map")["lit_b64"]), dtype=np.uint8))
    assert set(np.flatnonzero(lit[: engine.num_pages]).tolist()) == set(engine.nodes["node:1"])
    assert any("Path from the root (pages): 1 (24)" in text.value for text in at.text)
    at.button(key="node_holder_0").click().run()
    assert selected(at, "view") == "requests"


def test_a_page_leads_to_its_node_and_a_gone_node_is_told(
    engine: FakeEngine, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = opened(server, monkeypatch, view="kv", page=str(engine.nodes["node:1"][0]))
    at.button(key="to_node").click().run()
    assert selected(at, "node") == "1"
    assert "page" not in at.session_state["selected"]
    at = opened(server, monkeypatch, view="kv", node="999999")
    assert any("is gone: it was evicted" in text.value for text in at.text)


def test_laws_are_listed_broken_ones_first_and_a_bundle_opens_in_place(
    engine: FakeEngine, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.violations = {fake_kv.BROKEN: 3}
    at = opened(server, monkeypatch, view="invariants", law=fake_kv.BROKEN)
    rows = component(at, "live_table", "laws")["rows"]
    assert rows[0]["id"] == fake_kv.BROKEN
    assert len(rows) == len(fake_kv.CATALOG)
    assert "Last broken in step 120" in html(at)
    assert component(at, "live_table", "evidence")["rows"][0]["id"] == fake_kv.BUNDLE
    at = opened(server, monkeypatch, view="invariants", bundle=fake_kv.BUNDLE)
    records = component(at, "live_table", "bundle_records")["rows"]
    assert "offending" in records[0]["cells"][3][0]
    assert at.code[0].value == "admitscope check journals/fake.jsonl"
    at.button(key="bundle_to_step").click().run()
    assert (selected(at, "view"), selected(at, "step")) == ("admission", "120")


def test_a_checker_that_is_off_says_so_and_a_bundle_that_is_gone_too(
    engine: FakeEngine, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.checked = False
    at = opened(server, monkeypatch, view="invariants", bundle="<b>none</b>")
    assert "No law is judged here" in html(at)
    assert "ADMITSCOPE_ON_VIOLATION=record" in html(at)
    assert "<span>Off: no law is judged. " in html(at)
    assert "broken" not in component(at, "live_table", "laws")["note"]
    assert "No such bundle" in html(at)
    assert "<b>none</b>" not in html(at)
