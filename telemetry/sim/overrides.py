"""Overrides. Owns: what `--set name=value` does to an engine's configuration, and to the size of its pool."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from engine.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from telemetry.settings import UsageError

#: Sections that a simulation takes; `server` is not there: a simulation has no HTTP.
SECTIONS: Final[dict[str, type[BaseModel]]] = {
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "model": ModelConfig,
    "executor": ExecutorConfig,
}
#: Settings that decide nothing in a simulation: there is no model.
_WITHOUT_EFFECT: Final = ("model", "executor")
_KNOWN: Final = [f"{name}.{field}" for name in ("scheduler", "cache") for field in SECTIONS[name].model_fields]


def parse_settings(words: Sequence[str]) -> dict[str, str]:
    """`a.b=1` as {"a.b": "1"}, the section added where it was left out. Raises UsageError."""
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        name = full_name(name.strip().removeprefix("--"))
        if not equals:
            raise UsageError(f"--set {word}: must look like name=value, as in scheduler.chunked_prefill_size=256")
        if name in settings:
            raise UsageError(f"--set {name} is given twice")
        settings[name] = value.strip()
    return settings


def full_name(name: str) -> str:
    """`scheduler.chunked_prefill_size` of any way to write it. Raises UsageError for what no simulation knows."""
    wanted = name.replace("-", "_").lower()
    if wanted.partition(".")[0] in _WITHOUT_EFFECT:
        raise UsageError(f"--set {name}: decides nothing in a simulation, which has no model")
    found = [known for known in _KNOWN if wanted in (known, known.partition(".")[2])]
    if not found:
        near = difflib.get_close_matches(wanted, [*_KNOWN, *(k.partition(".")[2] for k in _KNOWN)], n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"--set {name}: no such setting{guess}; docs/reference/configuration.md lists them")
    return found[0]


def is_setting(name: str) -> bool:
    """Whether `name` is one that a simulation knows."""
    try:
        full_name(name)
    except UsageError:
        return False
    return True


def changed(base: Mapping[str, Mapping[str, Any]], settings: Mapping[str, str]) -> EngineConfig:
    """The configuration `base` with `settings`. Raises UsageError that names setting, value and limit."""
    sections = {name: dict(base.get(name, {})) for name in ("scheduler", "cache")}
    for name, value in settings.items():
        section, _, field = name.partition(".")
        sections[section][field] = None if value.lower() == "none" else value
    try:
        return EngineConfig.model_validate(sections)
    except ValidationError as error:
        lines = []
        for fault in error.errors(include_url=False):
            place = ".".join(map(str, fault["loc"]))
            message = fault["msg"].removeprefix("Value error, ")
            lines.append(f"--set {place}: {message}; got {fault['input']!r}" if place.count(".") else message)
        raise UsageError("\n".join(lines)) from error


def pages_of(config: EngineConfig, *, was: EngineConfig, was_pages: int, settings: Mapping[str, str]) -> int:
    """Pages of the changed engine's pool.

    As set; else as many tokens as before, also in pages of another size; with another `memory_mib`, in proportion.
    """
    cache = config.cache
    if "cache.num_pages" in settings and cache.num_pages is not None:
        return cache.num_pages
    tokens = was_pages * was.cache.page_size
    if "cache.memory_mib" in settings:
        if was.cache.num_pages is not None:
            raise UsageError(
                f"--set cache.memory_mib={cache.memory_mib} has no effect while cache.num_pages is "
                f"{was.cache.num_pages}: set cache.num_pages"
            )
        tokens = tokens * cache.memory_mib // was.cache.memory_mib
    return max(tokens // cache.page_size, 2)


def with_pages(config: EngineConfig, num_pages: int) -> EngineConfig:
    """The same with its pool named, so that a journal of it says what was simulated."""
    return config.model_copy(update={"cache": config.cache.model_copy(update={"num_pages": num_pages})})
