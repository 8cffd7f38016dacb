"""Pages of docs/reference are what the settings tree and the read API say."""

from __future__ import annotations

import re

from engine.config import EngineConfig
from telemetry import observe_page
from telemetry.reference_pages import PAGE, render, settings


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make docs"


def test_the_page_of_the_read_api_is_current_and_explains_what_it_lists() -> None:
    text = observe_page.page()
    assert observe_page.PAGE.read_text(encoding="utf-8") == text, "run: make docs"
    assert "| `GET /observe/explain/{rid}` |" in text
    assert "| `entries` | list of [`QueueEntry`](#queueentry) |" in text
    for name in re.findall(r"\(#(\w+)\)", text):
        assert re.search(rf"^## {name}$", text, flags=re.MULTILINE | re.IGNORECASE), f"{name} is linked, not explained"
    assert "| any |" not in text


def test_every_setting_is_there_with_type_default_and_help() -> None:
    found = {setting.flag: setting for setting in settings()}
    for section, field in EngineConfig.model_fields.items():
        for name in type(field.default).model_fields:
            assert f"--{section}.{name.replace('_', '-')}" in found
    assert all(setting.help for setting in found.values())
    assert found["--cache.page-size"].type == "integer, ≥ 1, ≤ 1024"
    assert found["--scheduler.chunked-prefill-size"].type == "integer or `none`, ≥ 1"
    assert found["--executor.kind"].type == "`torch` or `simulated`"
    assert found["--journal"].default == "journals"
