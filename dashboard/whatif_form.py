"""What-if as a form. Owns: the settings offered, their present values, and settings as one text in an address.

Pure. A setting is a name and a text, as `admitscope whatif --set name=text` takes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from dashboard.words import mark
from telemetry.journal import JournalError
from telemetry.settings import UsageError
from telemetry.sim.journal_workload import Recorded, recorded_of
from telemetry.sim.overrides import changed, parse_settings


@dataclass(frozen=True, slots=True)
class Offer:
    """One setting of the form.

    options  of a choice; empty for a number or a switch
    no_limit the number may be left empty
    """

    name: str
    label: str
    kind: Literal["number", "choice", "switch"]
    unit: str = ""
    options: tuple[str, ...] = ()
    no_limit: bool = False


_POLICIES: Final = (
    "fcfs",
    "lpm",
    "dfs-weight",
    "hrrn",
    "shortest-prefill-first",
    "lof",
    "random",
    "routing-key",
)

OFFERS: Final = (
    Offer("scheduler.chunked_prefill_size", mark("Chunk size"), "number", "tok", no_limit=True),
    Offer("scheduler.max_prefill_tokens", mark("Input budget of a step"), "number", "tok"),
    Offer("scheduler.max_running_requests", mark("Rows"), "number", "req"),
    Offer("scheduler.schedule_policy", mark("Policy"), "choice", options=_POLICIES),
    Offer("scheduler.kv_accounting", mark("Accounting"), "choice", options=("reference", "exact")),
    Offer("scheduler.enable_mixed_chunk", mark("Decode rows in prefill steps"), "switch"),
    Offer("cache.page_size", mark("Page size"), "number", "tok"),
    Offer("cache.num_pages", mark("Pool size"), "number", "pages"),
)


def present(recorded: Recorded) -> dict[str, Any]:
    """The recorded value of each offered setting."""
    found = {}
    for offer in OFFERS:
        section, _, field = offer.name.partition(".")
        value = getattr(getattr(recorded.config, section), field)
        found[offer.name] = str(value) if offer.kind == "choice" else value
    found["cache.num_pages"] = recorded.started.num_pages
    return found


def differing(now: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, str]:
    """What was chosen otherwise than it is now."""
    return {name: _text(value) for name, value in chosen.items() if value != now[name]}


def _text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def to_address(settings: Mapping[str, str]) -> str | None:
    """One text; None for no settings."""
    return ",".join(f"{name}={value}" for name, value in sorted(settings.items())) or None


def from_address(text: str) -> dict[str, str]:
    """Raises ValueError for what is no list of settings: addresses come from strangers."""
    try:
        return parse_settings([word for word in text.split(",") if word])
    except UsageError as error:
        raise ValueError(str(error)) from error


def values_of(settings: Mapping[str, str], recorded: Recorded) -> dict[str, Any]:
    """The form with `settings`; the recorded values where they contradict each other."""
    now = present(recorded)
    try:
        config = changed(recorded.raw_config, settings)
    except UsageError:
        return now
    for name in settings:
        if name in now:
            section, _, field = name.partition(".")
            value = getattr(getattr(config, section), field)
            now[name] = str(value) if isinstance(now[name], str) else value
    return now


def read_start(journal: Path) -> Recorded | str:
    """How the recorded run was configured, or why that cannot be read."""
    try:
        return recorded_of(journal)
    except JournalError as error:
        return str(error)


class Stretch(NamedTuple):
    """Which requests are compared: the first so many (0: all) of those that came in these seconds of the run."""

    limit: int = 0
    from_s: float | None = None
    to_s: float | None = None

    @property
    def window(self) -> tuple[float | None, float | None]:
        return self.from_s, self.to_s


def seconds(text: str) -> float:
    """Seconds of a run, from an address. Raises ValueError for what is no number of them."""
    found = float(text)
    if not 0 <= found < 1e9:
        raise ValueError(f"{text!r} is no number of seconds")
    return found
