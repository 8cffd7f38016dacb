"""Words and number formats. Owns: how every number, time and code is written for a reader.

Pure. None is always "–". Thousands are parted by a narrow no-break space, so that 1 024 never breaks over two lines.
"""

from __future__ import annotations

import time
from typing import Final

from dashboard.words import mark, t

NOTHING: Final = "–"
THIN: Final = "\u202f"

#: What each blocker means, for people who have not read the rule book.
BLOCKER_WORDS: Final = {
    "compute": mark("the input budget of a step is spent"),
    "chunk": mark("the chunk budget of a step is spent, or less than one page of it is left"),
    "kv_now": mark("no free or evictable pages for the prompt now"),
    "kv_total": mark("future output of running requests is promised the rest"),
    "rows": mark("the limit of running requests is reached"),
    "chunk_slot": mark("another prompt is being prefilled in chunks"),
    "order": mark("the pass ended at a request ahead of it"),
    "cold_prefix": mark("an admitted request is computing the same prefix"),
    "engine_busy": mark("no pass was made since it came"),
    "delay": mark("the policy delays prefill"),
    "prefill_max": mark("the limit of prefills in one pass is reached"),
}

#: The same by reason, where the reason says more.
_BY_REASON: Final = {
    "chunk_exhausted": mark("the chunk budget of a step is spent"),
    "chunk_below_page": mark("less than one page is left of the chunk budget of a step"),
}


def blocker_words(blocker: str, reason: str | None = None) -> str:
    """What a blocker means; "" for one that this page does not know. Under `order` the reason is another request's."""
    known = BLOCKER_WORDS.get(blocker)
    if known is None:
        return ""
    return t(known if blocker == "order" else _BY_REASON.get(reason or "", known))


LEDGER_NAMES: Final = {
    "rem_input": "input",
    "rem_chunk": "chunk",
    "remaining_total": "KV total",
    "remaining_current": "KV current",
}


#: The ledger, or the limit that is none, which each reason is about.
_LIMIT_NAMES: Final = {
    "compute_exhausted": LEDGER_NAMES["rem_input"],
    "chunk_exhausted": LEDGER_NAMES["rem_chunk"],
    "chunk_below_page": LEDGER_NAMES["rem_chunk"],
    "kv_total_exhausted": LEDGER_NAMES["remaining_total"],
    "kv_now_exhausted": LEDGER_NAMES["remaining_current"],
    "rows_exhausted": "rows (max_running_requests)",
    "prefill_max_reached": "prefills (prefill_max_requests)",
}


def limit_name(reason: str | None) -> str:
    """The ledger or limit that a refusal is about; the reason in words where it is about neither (an order, a rule)."""
    return _LIMIT_NAMES.get(reason or "") or words(reason)


def count(value: float | None) -> str:
    """A whole number: 12 345."""
    if value is None:
        return NOTHING
    return f"{round(value):,}".replace(",", THIN).replace("-", "\u2212")


def tokens(value: float | None) -> str:
    """Tokens without their unit, a fraction only when there is one: 512, 88.5."""
    if value is None:
        return NOTHING
    if round(float(value), 1).is_integer():  # 80.0 would say that a tenth was counted
        return count(value)
    return f"{value:,.1f}".replace(",", THIN).replace("-", "\u2212")


def compact(value: float | None) -> str:
    """A number for narrow places: 940, 12.3k, 4.56M."""
    if value is None:
        return NOTHING
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return count(value)


def rate(value: float | None) -> str:
    """Tokens per second: two figures below ten."""
    if value is None:
        return NOTHING
    return f"{value:.1f}" if 0 < value < 10 else count(value)


def seconds(value: float | None) -> tuple[str, str]:
    """A duration as (number, unit): ("67.0", "µs"), ("12.4", "ms"), ("1.25", "s"), ("3:20", "min"), ("2:05", "h")."""
    if value is None:
        return NOTHING, ""
    if 0 < value < 0.0000995:
        return f"{value * 1e6:.1f}", "µs"
    if value < 0.0995:
        return (f"{value * 1e3:.1f}" if value < 0.00995 else f"{value * 1e3:.0f}"), "ms"
    if value < 0.9995:
        return f"{value * 1e3:.0f}", "ms"
    if value < 99.5:
        return (f"{value:.2f}" if value < 9.995 else f"{value:.1f}"), "s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}", "min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}", "h"


def duration(value: float | None) -> str:
    """A duration in one text: "12.4 ms"."""
    number, unit = seconds(value)
    return f"{number}\u00a0{unit}" if unit else number


def share(part: float, whole: float) -> str:
    """A share as percent without decimals, one decimal below 10: "7.5 %"."""
    if whole <= 0:
        return NOTHING
    percent = 100 * part / whole
    return f"{percent:.1f}\u00a0%" if 0 < percent < 9.95 else f"{percent:.0f}\u00a0%"


def clock(wall_s: float | None) -> str:
    """Local time of day to the second."""
    return NOTHING if wall_s is None else time.strftime("%H:%M:%S", time.localtime(wall_s))


#: The parts of TTFT but `queue`, which is told by blocker. Unlike blockers and reasons they are no codes of the engine.
_PART_NAMES: Final = {
    "intake": mark("intake"),
    "prepare": mark("prepare"),
    "chunk_forward": mark("chunk forward"),
    "commit": mark("commit"),
    "between_chunks": mark("between chunks"),
    "emit": mark("emit"),
}


def cause_name(cause: str) -> str:
    """What a part of TTFT went to: a part by its name in the reader's language, a blocker by its code."""
    return t(_PART_NAMES[cause]) if cause in _PART_NAMES else words(cause)


def words(code: str | None) -> str:
    """A code as words: kv_total_exhausted -> kv total exhausted."""
    return NOTHING if not code else code.replace("_", " ").replace("kv ", "KV ")


def short_rid(rid: str, limit: int = 18) -> str:
    """A request id that fits a column: both ends are kept, because either may be the telling one."""
    if len(rid) <= limit:
        return rid
    head = (limit - 1) * 2 // 3
    return f"{rid[:head]}…{rid[-(limit - 1 - head) :]}"


def counted_test(reason: str | None, need: str, have: str) -> str:
    """The test of a refusal that counts requests; empty for those that compare tokens."""
    if reason in {"rows_exhausted", "full_flag_set"}:
        return t("rows: needs {need} with those of its pass, max_running_requests leaves {have}", need=need, have=have)
    if reason == "prefill_max_reached":
        return t("prompt {need} of the batch, prefill_max_requests allows {have}", need=need, have=have)
    return ""


def before_after(before: float | None, after: float | None) -> str:
    """One ledger over one decision: "128 → 32", or "128" when nothing was taken."""
    if before is None and after is None:
        return NOTHING
    if before == after:
        return tokens(after)
    return f"{tokens(before)} → {tokens(after)}"
