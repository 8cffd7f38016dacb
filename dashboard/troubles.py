"""What is said when numbers are missing or old. Owns: title and advice for each way in which a source fails.

Pure. The advice is a thing to do: which command to run, which setting to look at.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from dashboard import formats as f
from dashboard.feed import Look
from dashboard.places import ENV_KEY, Place
from dashboard.words import t


class Trouble(NamedTuple):
    """A title, what happened in the source's own words, and what to do."""

    title: str
    what: str
    advice: str


def trouble(look: Look, place: Place) -> Trouble | None:
    """What is wrong with the source of `look`; None when it answered."""
    if look.error is None:
        return None
    return Trouble(_title(look), look.error, advice(look.error_kind, place))


def _title(look: Look) -> str:
    since = f.clock(look.failing_wall_s)
    match look.error_kind:
        case "journal" | "no_journal":
            return t("This journal cannot be read.")
        case "key":
            return t("The engine refuses the key.")
        case "foreign":
            return t("Something else than an engine answers there.")
        case "version":
            return t("Page and engine are of different versions.")
        case "failed" | "refused":
            return t("The engine answers with an error since {since}.", since=since)
    if look.contact_mono_s is None:
        return t("The engine has not answered yet. First tried {since}.", since=since)
    return t(
        "The engine does not answer since {since}. Last contact {contact}.",
        since=since,
        contact=f.clock(look.contact_wall_s),
    )


def advice(kind: str | None, place: Place) -> str:
    """What to do about a failure of `kind` at `place`."""
    match kind:
        case "journal":
            return t("To see how far it holds, run: admitscope check {path}", path=place.where)
        case "no_journal":
            return t("Give the journal of a run that was written: admitscope dashboard --journal FILE")
        case "key":
            return t("Set {name} to the engine's server.api_key, and start the page again.", name=ENV_KEY)
        case "foreign":
            return t("Give the address of an engine: admitscope dashboard http://HOST:PORT")
        case "version":
            return t("Start page and engine from one installation; `admitscope --version` names each.")
        case "failed" | "refused":
            return t("The engine's log says why. The page tries again by itself.")
    return t(
        "Start one with `{serve}`, or all at once with `admitscope demo`. The page recovers by itself.",
        serve=_serve(place),
    )


def _serve(place: Place) -> str:
    port = None if place.is_recorded else urlsplit(place.where).port
    return "admitscope serve" if port in {None, 8000} else f"admitscope serve --server.port {port}"
