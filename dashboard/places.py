"""Places to look at. Owns: which engines and journals this page may show, their names, and the objectives.

Places come from the command line or the environment, and from journals that a view of this process wrote (a
simulation). An address names a place, never a path or a URL: a link cannot make the page read another file.
"""

from __future__ import annotations

import argparse
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from telemetry.client import engine_url

DEFAULT_URL: Final = "http://127.0.0.1:8000"
ENV_URL: Final = "ADMITSCOPE_URL"
ENV_KEY: Final = "ADMITSCOPE_API_KEY"

#: What stands for a trace's id in `Settings.trace_url`.
TRACE_ID: Final = "{trace_id}"

#: Journals that views opened, at most: the oldest is closed.
MAX_OPENED: Final = 6


@dataclass(frozen=True, slots=True)
class Place:
    """One engine or one journal. `where` is its URL or its path; `name` is short, and its own on this page."""

    kind: Literal["engine", "journal"]
    where: str
    name: str

    @property
    def is_recorded(self) -> bool:
        return self.kind == "journal"


@dataclass(frozen=True, slots=True)
class Settings:
    """What this page may show. The key is not on the command line, where other users could read it.

    ttft_s, tbt_s  objectives; None: as the engine says
    lessons        folder of a teacher's own lessons for the classroom
    trace_url      where a trace is shown, with {trace_id} in it
    """

    places: tuple[Place, ...]
    api_key: str | None = None
    ttft_s: float | None = None
    tbt_s: float | None = None
    lessons: Path | None = None
    trace_url: str | None = None


def settings_from(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Settings of `streamlit run dashboard/app.py -- [--url URL]… [--journal FILE]… …`.

    The environment counts where the command line names no place; several URLs in it are parted by spaces. Raises
    ValueError for a URL that is not http or https, for a trace's without {trace_id}, and for an objective that is not
    above zero.
    """
    parser = argparse.ArgumentParser(prog="dashboard", add_help=False, allow_abbrev=False)
    parser.add_argument("--url", action="append", default=[])
    parser.add_argument("--journal", action="append", default=[])
    parser.add_argument("--ttft-ms")
    parser.add_argument("--tbt-ms")
    parser.add_argument("--lessons")
    parser.add_argument("--trace-url")
    given = parser.parse_known_args(arguments)[0]
    urls: list[str] = given.url
    if not urls and not given.journal:
        urls = (environment.get(ENV_URL) or DEFAULT_URL).split()
    wanted: list[tuple[Literal["engine", "journal"], str]] = [("engine", _url(url)) for url in urls]
    wanted += [("journal", str(Path(path).expanduser().absolute())) for path in given.journal]
    return Settings(
        _named(dict.fromkeys(wanted)),
        environment.get(ENV_KEY) or None,
        _seconds("--ttft-ms", given.ttft_ms),
        _seconds("--tbt-ms", given.tbt_ms),
        None if given.lessons is None else Path(given.lessons).expanduser().absolute(),
        _trace_url(given.trace_url),
    )


def _trace_url(text: str | None) -> str | None:
    if text is None:
        return None
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or TRACE_ID not in text:
        raise ValueError(f"--trace-url is {text!r}; an http address with {TRACE_ID} in it is expected")
    return text


def _url(text: str) -> str:
    url = engine_url(text)
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"--url (or {ENV_URL}) is {url!r}; an address like {DEFAULT_URL} is expected")
    return url


def _seconds(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{flag} is {text!r}; milliseconds above 0 are expected")
    return value / 1e3


def _named(wanted: Mapping[tuple[Literal["engine", "journal"], str], None]) -> tuple[Place, ...]:
    """Places with the shortest names that tell them apart."""
    short = [urlsplit(where).netloc if kind == "engine" else Path(where).name for kind, where in wanted]
    return tuple(
        Place(kind, where, name if short.count(name) == 1 else where)
        for (kind, where), name in zip(wanted, short, strict=True)
    )


class Opened:
    """Journals that views of this process opened, by name. Safe between threads, and bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[str, Place] = OrderedDict()

    def add(self, path: Path, name: str) -> Place:
        """Show the journal at `path` as `name`; a place of this name is replaced."""
        place = Place("journal", str(path), name)
        with self._lock:
            self._places[name] = place
            self._places.move_to_end(name)
            while len(self._places) > MAX_OPENED:
                self._places.popitem(last=False)
        return place

    def places(self) -> tuple[Place, ...]:
        """All, in the order of opening."""
        with self._lock:
            return tuple(self._places.values())
