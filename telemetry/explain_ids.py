"""Long request ids in explanations. Owns: that an id is whole where it is first met, and short wherever it follows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from telemetry.life_facts import Life
from telemetry.short_ids import meant, shortened

#: Longer ids are shortened: a sentence that names six of them is otherwise made of nothing else.
LIMIT: Final = 18
_NOT_WITHIN: Final = "(?<![A-Za-z0-9_-])(?:{})(?![A-Za-z0-9_-])"


def abbreviated(
    texts: Iterable[str], ids: Iterable[str], show: Callable[[str, str], str] = lambda _whole, short: short
) -> list[str]:
    """`texts` in order of reading, with each long one of `ids` whole once and then as `show(whole, short)` writes it.

    An id whose short form may mean another one of `ids` stays whole.
    """
    known = list(dict.fromkeys(ids))
    short = {rid: shortened(rid, LIMIT) for rid in known if len(rid) > LIMIT}
    short = {rid: form for rid, form in short.items() if meant(form, known) == (rid,)}
    if not short:
        return list(texts)
    # One id may begin another, which need not be known here.
    found = re.compile(_NOT_WITHIN.format("|".join(map(re.escape, short))))
    met: set[str] = set()

    def said(match: re.Match[str]) -> str:
        rid = match[0]
        if rid in met:
            return show(rid, short[rid])
        met.add(rid)
        return rid

    return [found.sub(said, text) for text in texts]


def ids_in(life: Life) -> list[str]:
    """The ids that the sentences about `life` may name."""
    ids: list[str | None] = [life.rid]
    for wait in life.waits:
        ids += wait.overtaken_by
        ids += [each.rid for each in wait.not_reached]
        ids += [each.set_by_rid for each in wait.no_pass]
        ids += [each.rid for each in wait.slices_taken]
    return [rid for rid in ids if rid is not None]
