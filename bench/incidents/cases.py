"""The five incidents. Owns: the load of each, what is wrong in its settings, its cure, and which numbers show it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from bench.incidents.numbers import Numbers
from bench.incidents.world import Arrival

_S: Final = "scheduler."
_TTFT: Final = "time_to_first_token_seconds"
_TBT: Final = "inter_token_latency_seconds"

Reading = tuple[str, str]


class Incident(NamedTuple):
    """One incident.

    flags     of `admitscope serve`, the fault among them
    cure      flags that change
    load      from a share of its length, 1.0 for the page
    look_s    when the running engine is looked at
    subject   who is followed: the one that waited longest at `look_s`, of those pushed back if there are, or the one
              with the longest gap between two tokens, by its trace
    readings  what the boards show, as (expression, value)
    expected  reason or cause that the diagnosis has to name
    better    rows of the table that the cure is for: `kind measure`
    """

    name: str
    title: str
    flags: Mapping[str, str]
    cure: Mapping[str, str]
    load: Callable[[float], list[Arrival]]
    look_s: float
    subject: Literal["waiting", "retracted", "gap"]
    readings: Callable[[Numbers, float], list[Reading]]
    expected: str
    better: Sequence[str]


def _arrivals(
    seed: int, rate: float, seconds: float, *, prompt: tuple[int, int], max_new: int, outputs: tuple[int, int]
) -> list[Arrival]:
    """Chats at random moments, `rate` a second."""
    rng, at_s = random.Random(seed), 0.0
    out = []
    while (at_s := at_s + rng.expovariate(rate)) <= seconds:
        out.append(Arrival(at_s, "chat", rng.randint(*prompt), max_new, rng.randint(*outputs)))
    return out


def _documents(count: int, first_s: float, every_s: float, prompt: int) -> list[Arrival]:
    return [Arrival(first_s + every_s * number, "doc", prompt, 60, 40) for number in range(count)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def _percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def _top(sums: Mapping[str, float], unit: str = "", most: int = 3) -> str:
    return ", ".join(f"{name} {value:,.0f}{unit}" for name, value in list(sums.items())[:most]) or "none"


def _late_firsts(numbers: Numbers) -> list[Reading]:
    shares = numbers.shares("ttft_component_seconds", "component", _TTFT)
    return [
        (f"p50, p99 of {_TTFT}", f"{_ms(numbers.quantile(0.5, _TTFT))}, {_ms(numbers.quantile(0.99, _TTFT))}"),
        ("share of it above 1 s", _percent(numbers.above(_TTFT, 1.0))),
        ("share of it by component", ", ".join(f"{name} {_percent(part)}" for name, part in list(shares.items())[:3])),
    ]


def _waiting(numbers: Numbers, look_s: float) -> list[Reading]:
    blockers = {b: numbers.at(look_s, "waiting_by_blocker", blocker=b) for b in ("order", "chunk", "kv_total", "rows")}
    return [
        (f"waiting_by_blocker at {look_s:g} s", _top({b: n for b, n in blockers.items() if n})),
        (f"waiting_oldest_seconds at {look_s:g} s", _ms(numbers.at(look_s, "waiting_oldest_seconds"))),
        ("waiting_request_seconds_total", _top(numbers.by("waiting_request_seconds_total", "blocker"), " s")),
        ("pass_ends_total", _top(numbers.by("pass_ends_total", "reason"))),
    ]


def _starvation(numbers: Numbers, look_s: float) -> list[Reading]:
    return [
        *_late_firsts(numbers),
        *_waiting(numbers, look_s),
        ("clipped_tokens_total", _top(numbers.by("clipped_tokens_total", "ledger"))),
        ("pages free or evictable, least", _percent(min(share for _, share in numbers.to_be_had()))),
    ]


def _over_reservation(numbers: Numbers, look_s: float) -> list[Reading]:
    had = [share for t_s, share in numbers.to_be_had() if t_s <= look_s]
    return [
        *_late_firsts(numbers),
        *_waiting(numbers, look_s),
        (f"pages free or evictable at {look_s:g} s, and least", f"{_percent(had[-1])}, {_percent(min(had))}"),
        (
            f"promised_pages at {look_s:g} s, of kv_pages_capacity",
            f"{numbers.at(look_s, 'promised_pages'):,.0f} of {numbers.at(look_s, 'kv_pages_capacity'):,.0f}",
        ),
        (f"new_token_ratio at {look_s:g} s", f"{numbers.at(look_s, 'new_token_ratio'):.2f}"),
        ("retractions_total", f"{numbers.increase('retractions_total'):,.0f}"),
    ]


def _storm(numbers: Numbers, look_s: float) -> list[Reading]:
    finished = numbers.increase("requests_finished_total")
    retractions = numbers.increase("retractions_total")
    return [
        ("retractions_total", f"{retractions:,.0f}, {retractions / finished:.2f} a finished request"),
        ("retracted_tokens_total", _top(numbers.by("retracted_tokens_total", "kind"))),
        (f'requests{{state="retracted"}} at {look_s:g} s', f"{numbers.at(look_s, 'requests', state='retracted'):,.0f}"),
        ("pages free or evictable, least", _percent(min(share for _, share in numbers.to_be_had()))),
        ("p99 of " + _TBT, _ms(numbers.quantile(0.99, _TBT))),
        ("token_stalls_total", _top(numbers.by("token_stalls_total", "cause"))),
        (f"new_token_ratio at {look_s:g} s", f"{numbers.at(look_s, 'new_token_ratio'):.2f}"),
        (f"promised_pages at {look_s:g} s", f"{numbers.at(look_s, 'promised_pages'):,.0f}"),
    ]


def _chunk_small(numbers: Numbers, look_s: float) -> list[Reading]:
    return [
        *_late_firsts(numbers),
        *_waiting(numbers, look_s),
        ("p50 of request_chunks", f"{numbers.quantile(0.5, 'request_chunks'):,.0f}"),
        ("p50 of chunk_tokens", f"{numbers.quantile(0.5, 'chunk_tokens'):,.0f}"),
        ("clipped_tokens_total", _top(numbers.by("clipped_tokens_total", "ledger"))),
        ("selected_tokens_total, computed", f"{numbers.rate('selected_tokens_total', kind='computed'):,.0f} a second"),
        (f"p99 of {_TBT}", _ms(numbers.quantile(0.99, _TBT))),
    ]


def _chunk_large(numbers: Numbers, look_s: float) -> list[Reading]:
    return [
        (f"p50, p99 of {_TBT}", f"{_ms(numbers.quantile(0.5, _TBT))}, {_ms(numbers.quantile(0.99, _TBT))}"),
        ("token_stalls_total", _top(numbers.by("token_stalls_total", "cause"))),
        (f"p99 of {_TTFT}", _ms(numbers.quantile(0.99, _TTFT))),
        ("p95 of chunk_tokens", f"{numbers.quantile(0.95, 'chunk_tokens'):,.0f}"),
        ("p99 of chunk_forward_seconds", _ms(numbers.quantile(0.99, "chunk_forward_seconds"))),
        ("clipped_tokens_total", _top(numbers.by("clipped_tokens_total", "ledger"))),
        (f"requests waiting at {look_s:g} s", f"{numbers.at(look_s, 'requests', state='waiting'):,.0f}"),
    ]


INCIDENTS: Final = (
    Incident(
        "starvation",
        "Starvation behind a long prompt",
        {
            f"{_S}schedule-policy": "fcfs",
            f"{_S}chunked-prefill-size": "512",
            "cache.num-pages": "16384",
            "model.max-context-tokens": "32768",
        },
        {f"{_S}schedule-policy": "shortest-prefill-first", f"{_S}starvation-limit-s": "30"},
        lambda share: sorted(
            [
                *_arrivals(1, 8.0, 4 + 10 * share, prompt=(30, 120), max_new=80, outputs=(40, 80)),
                *_documents(4, 2.0, 0.2, round(24_000 * share)),
            ]
        ),
        6.0,
        "waiting",
        _starvation,
        "chunk_exhausted",
        ("chat TTFT p99",),
    ),
    Incident(
        "over-reservation",
        "Over-reservation: the queue waits beside free pages",
        {f"{_S}schedule-policy": "fcfs", f"{_S}chunked-prefill-size": "2048", "cache.num-pages": "384"},
        {f"{_S}clip-max-new-tokens": "256"},
        lambda share: _arrivals(2, 6.0, 14 * share, prompt=(100, 300), max_new=4000, outputs=(40, 80)),
        10.0,
        "waiting",
        _over_reservation,
        "kv_total_exhausted",
        ("chat TTFT p99",),
    ),
    Incident(
        "retract-storm",
        "A storm of retractions",
        {
            f"{_S}schedule-policy": "fcfs",
            f"{_S}chunked-prefill-size": "2048",
            f"{_S}clip-max-new-tokens": "16",
            "cache.num-pages": "512",
        },
        {f"{_S}clip-max-new-tokens": "4096", f"{_S}max-running-requests": "9"},
        lambda share: _arrivals(3, 5.0, 8 * share, prompt=(300, 500), max_new=600, outputs=(600, 600)),
        7.0,
        "retracted",
        _storm,
        "kv_now",
        ("retractions",),
    ),
    Incident(
        "chunk-too-small",
        "A chunk that is too small",
        {f"{_S}schedule-policy": "fcfs", f"{_S}chunked-prefill-size": "64", "cache.num-pages": "8192"},
        {f"{_S}chunked-prefill-size": "512"},
        lambda share: _arrivals(4, 6.0, 12 * share, prompt=(1000, 3000), max_new=80, outputs=(40, 80)),
        11.0,
        "waiting",
        _chunk_small,
        "chunk_exhausted",
        ("chat TTFT p99",),
    ),
    Incident(
        "chunk-too-large",
        "A chunk that is too large",
        {
            f"{_S}schedule-policy": "fcfs",
            f"{_S}chunked-prefill-size": "8192",
            "cache.num-pages": "8192",
            "model.max-context-tokens": "16384",
        },
        {f"{_S}chunked-prefill-size": "512"},
        lambda share: sorted(
            [
                *_arrivals(5, 5.0, 12 * share, prompt=(30, 120), max_new=120, outputs=(80, 120)),
                *_documents(round(18 * share), 1.0, 0.6, 7_000),
            ]
        ),
        6.0,
        "gap",
        _chunk_large,
        "long_prefill",
        ("TBT p99",),
    ),
)


def named(name: str) -> Incident:
    """Raises LookupError with the names that there are."""
    found = next((incident for incident in INCIDENTS if incident.name == name), None)
    if found is None:
        raise LookupError(f"no incident {name!r}; there are: {', '.join(each.name for each in INCIDENTS)}")
    return found
