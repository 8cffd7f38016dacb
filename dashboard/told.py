"""What a viewer did, told by the browser until it is done. Owns: which deeds are new, and that each counts once.

A message of the browser may be lost (it meets a run that is being replaced), come late, or come twice. So `pulse.js`
numbers each deed and tells all that are not yet done, again and again; the head of the page answers with the number
that is done. No Streamlit here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Final, Literal, cast
from urllib.parse import parse_qsl

#: What may be told: a key; selections to follow, as `go` of a number; an address that the browser went back to.
Kind = Literal["key", "go", "address"]

_KINDS: Final = ("key", "go", "address")
_KEYS: Final = frozenset({"space", "ArrowLeft", "ArrowRight", *"123456789"})

#: More deeds at once than a page ever keeps: such a list is no page's.
_MAX_TOLD: Final = 256


@dataclass(slots=True)
class Told:
    """How far one session has done what its page tells. Plain: to note a deed as done never breaks a run off.

    page     of the browser's load: a page that is loaded anew counts from 1 again
    done     number of the last deed that was done
    session  its own name: by it the page sees that another answers
    """

    page: str = ""
    done: int = 0
    session: str = field(default_factory=lambda: token_hex(6), compare=False)

    def new(self, message: object) -> Iterator[tuple[Kind, Any]]:
        """The deeds of `message` that are not done yet, in order; each is noted as done when the next is asked for.

        So a run that is broken off within a deed leaves it to the next run. A message that no page of ours sends is
        passed over: it comes from a browser.
        """
        page, deeds = _read(message)
        if page != self.page and deeds:
            self.page, self.done = page, 0
        for number, kind, value in deeds:
            if number > self.done:
                yield kind, value
                self.done = number


def _read(message: object) -> tuple[str, list[tuple[int, Kind, Any]]]:
    """Page and deeds of a message, oldest first; what has not their form is left out."""
    if not isinstance(message, dict) or not isinstance(message.get("waiting"), list):
        return "", []
    found = [
        (deed[0], cast("Kind", deed[1]), deed[2])
        for deed in message["waiting"][:_MAX_TOLD]
        if isinstance(deed, list) and len(deed) == 3 and type(deed[0]) is int and _is_known(deed[1], deed[2])
    ]
    return str(message.get("page"))[:80], sorted(found, key=lambda deed: deed[0])


def _is_known(kind: object, value: object) -> bool:
    if kind == "key":
        return isinstance(value, str) and value in _KEYS
    return kind in _KINDS and isinstance(value, dict if kind == "go" else str)


def selections_of(address: str) -> dict[str, str]:
    """Selections by name in the query of an address, with or without its question mark; the last of a name counts."""
    return dict(parse_qsl(address.removeprefix("?"), keep_blank_values=True, max_num_fields=None))
