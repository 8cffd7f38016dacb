"""docs/reference/configuration.md is what the settings tree says."""

from __future__ import annotations

from engine.config import EngineConfig
from telemetry.reference_pages import PAGE, render, settings


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make docs"


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
