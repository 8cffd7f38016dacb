"""Shortened request ids. Owns: how an id is shortened for a narrow place, and which ids a shortened one may mean."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

#: What stands for the middle: as shown, and as typed.
_GAPS: Final = ("…", "...")


def shortened(rid: str, limit: int = 18) -> str:
    """`rid` in at most `limit` characters: both ends are kept, because either may be the telling one."""
    if len(rid) <= limit:
        return rid
    head = (limit - 1) * 2 // 3
    return f"{rid[:head]}…{rid[-(limit - 1 - head) :]}"


def meant(asked: str, known: Iterable[str]) -> tuple[str, ...]:
    """The ids among `known` that `asked` may mean: itself, else those it begins, or `head…tail` fits; each once."""
    ids = dict.fromkeys(known)
    if asked in ids:
        return (asked,)
    gap = next((gap for gap in _GAPS if gap in asked), None)
    head, _, tail = asked.partition(gap) if gap else (asked, "", "")
    if not head and not tail:
        return ()
    least = len(head) + len(tail)
    return tuple(rid for rid in ids if rid.startswith(head) and rid.endswith(tail) and len(rid) >= least)
