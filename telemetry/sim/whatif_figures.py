"""Figures. Owns: requests of two runs in pairs, and every number that a comparison shows of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from telemetry.sim.bootstrap import Gaps, Values, intervals
from telemetry.sim.loop import Loop
from telemetry.sim.measure import BIN_S, Measure, Served
from telemetry.sim.parts import digits
from telemetry.sim.whatif_result import Compared, Curve, Decile, Interval, ModelCheck, Pair

_F64 = NDArray[np.float64]
MOST_PAIRS: Final = 2_000
#: Smaller changes of one request's time are none.
_SAME: Final = 0.01
QUANTILES: Final = (
    ("ttft", 0.5),
    ("ttft", 0.9),
    ("ttft", 0.99),
    ("tbt", 0.5),
    ("tbt", 0.99),
    ("e2e", 0.5),
    ("e2e", 0.99),
)


class Simulated(Protocol):
    """A simulated run that is over: its loop, its measure, and each request as it ended."""

    loop: Loop
    measure: Measure
    served: dict[str, Served]


class Requests:
    """The compared requests of one run."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.served = served
        self.ttft = Values([(one.ttft_ns or 0) / 1e9 for one in served])
        self.e2e = Values([one.e2e_ns / 1e9 for one in served])
        self.tbt = Gaps(served)

    def figures(self, weights: _F64) -> list[float | None]:
        """In the order of QUANTILES."""
        parts: dict[str, Values | Gaps] = {"ttft": self.ttft, "tbt": self.tbt, "e2e": self.e2e}
        return [parts[name].quantile(weights, share) for name, share in QUANTILES]


class Paired:
    """Requests that ended by themselves, with a first token, in both runs; in the order of the first run.

    A request that the record cuts off ends in a simulation where the record does: `Served.is_whole` says that it does
    not count.
    """

    def __init__(self, before: Mapping[str, Served], after: Mapping[str, Served]) -> None:
        rids = [rid for rid, one in before.items() if is_compared(one) and is_compared(after.get(rid))]
        self.count = len(rids)
        self._before = Requests([before[rid] for rid in rids])
        self._after = Requests([after[rid] for rid in rids])

    def compared(self, before: Simulated, after: Simulated, *, resamples: int, seed: int) -> tuple[Compared, ...]:
        """Quantiles with intervals, then numbers of the whole runs without."""
        spreads = intervals(self._before.figures, self._after.figures, self.count, resamples=resamples, seed=seed)
        rows = [
            _compared(
                f"{name}_p{round(share * 100)}",
                "s",
                *(Interval(value=digits(v), low=digits(lo), high=digits(hi)) for v, lo, hi in parts),
            )
            for (name, share), *parts in zip(QUANTILES, *spreads, strict=True)
        ]
        return (*rows, *_whole_runs(before, after))

    def faster_and_slower(self) -> tuple[float | None, float | None]:
        """Shares of requests whose first token comes earlier, and later, than before."""
        if not self.count:
            return None, None
        one = np.array([served.ttft_ns for served in self._before.served], dtype=np.float64)
        other = np.array([served.ttft_ns for served in self._after.served], dtype=np.float64)
        return round(float(np.mean(other < one * (1 - _SAME))), 4), round(float(np.mean(other > one * (1 + _SAME))), 4)

    def curves(self) -> tuple[Curve, ...]:
        """A hundred and one quantiles of each measure."""
        ones = np.ones(self.count)
        shares = np.linspace(0, 1, 101)
        found = []
        names: tuple[Literal["ttft", "tbt", "e2e"], ...] = ("ttft", "tbt", "e2e")
        for name in names:
            sides = []
            for run in (self._before, self._after):
                values: Values | Gaps = getattr(run, name)
                sides.append(
                    tuple(v for share in shares if (v := digits(values.quantile(ones, float(share)))) is not None)
                )
            found.append(Curve(name=name, before=sides[0], after=sides[1]))
        return tuple(found)

    def pairs(self) -> tuple[Pair, ...]:
        """At most MOST_PAIRS of them, evenly spread."""
        every = max(-(-self.count // MOST_PAIRS), 1)
        return tuple(map(_pair, self._before.served[::every], self._after.served[::every]))

    def deciles(self) -> tuple[Decile, ...]:
        """By length of prompt; requests of one length stay together, so there may be fewer than ten."""
        lengths = np.array([one.prompt_len for one in self._before.served])
        if not len(lengths):
            return ()
        edges = np.unique(np.quantile(lengths, np.linspace(0, 1, 11)[1:-1], method="lower"))
        group = np.searchsorted(edges, lengths, side="left")
        found = []
        for number, part in enumerate(np.unique(group), 1):
            weights = (group == part).astype(np.float64)
            inside = lengths[group == part]
            found.append(
                Decile(
                    decile=number,
                    prompt_from=int(inside.min()),
                    prompt_to=int(inside.max()),
                    requests=len(inside),
                    ttft_p50_before=digits(self._before.ttft.quantile(weights, 0.5)),
                    ttft_p50_after=digits(self._after.ttft.quantile(weights, 0.5)),
                    ttft_p99_before=digits(self._before.ttft.quantile(weights, 0.99)),
                    ttft_p99_after=digits(self._after.ttft.quantile(weights, 0.99)),
                    tbt_p99_before=digits(self._before.tbt.quantile(weights, 0.99)),
                    tbt_p99_after=digits(self._after.tbt.quantile(weights, 0.99)),
                )
            )
        return tuple(found)


def checks_of(
    happened: Mapping[str, Served], simulated: Mapping[str, Served], after: Mapping[str, Served] | None = None
) -> tuple[tuple[ModelCheck, ...], float | None]:
    """The recorded run beside its simulation, and the median relative error of single requests' first tokens.

    after  the changed run: only requests that are compared in pairs with it count, the same ones in both tables
    """
    runs = (simulated,) if after is None else (simulated, after)
    rids = [rid for rid, one in happened.items() if is_compared(one) and all(is_compared(run.get(rid)) for run in runs)]
    recorded, again = Requests([happened[rid] for rid in rids]), Requests([simulated[rid] for rid in rids])
    ones = np.ones(len(rids))
    checks = []
    for (name, share), was, now in zip(QUANTILES, recorded.figures(ones), again.figures(ones), strict=True):
        error = None if not was or now is None else round(now / was - 1, 4)
        checks.append(
            ModelCheck(name=f"{name}_p{round(share * 100)}", recorded=digits(was), simulated=digits(now), error=error)
        )
    errors = [abs((simulated[rid].ttft_ns or 0) / max(happened[rid].ttft_ns or 0, 1) - 1) for rid in rids]
    return tuple(checks), round(float(np.median(errors)), 4) if errors else None


def with_errors(compared: Sequence[Compared], checks: Sequence[ModelCheck]) -> tuple[Compared, ...]:
    """The same, each beside the error of the simulator on it."""
    by_name = {check.name: check for check in checks}
    return tuple(_beside(one, by_name.get(one.name)) for one in compared)


def _beside(one: Compared, check: ModelCheck | None) -> Compared:
    if check is None or check.error is None or check.recorded is None or check.simulated is None:
        return one
    change, was = one.difference.value, one.before.value
    within = None
    if change is not None:
        # In seconds, or as shares: of a simulator that is twice too slow, a change is twice too large as well.
        within = abs(change) < abs(check.simulated - check.recorded)
        within |= bool(was) and abs(change / (was or 1.0)) < abs(check.error)
    return one.model_copy(update={"model_error": check.error, "is_within_error": within})


def ended_of(happened: Mapping[str, Served]) -> frozenset[str]:
    """Ids of the requests whose end the record has, and that ended by themselves."""
    return frozenset(rid for rid, one in happened.items() if is_compared(one))


def is_compared(one: Served | None) -> TypeGuard[Served]:
    """Whether it ended by itself, with a first token."""
    return one is not None and one.is_whole and one.ttft_ns is not None


def _pair(before: Served, after: Served) -> Pair:
    return Pair(
        rid=before.rid,
        prompt_len=before.prompt_len,
        output_len=after.output_len,
        ttft_before=digits((before.ttft_ns or 0) / 1e9) or 0.0,
        ttft_after=digits((after.ttft_ns or 0) / 1e9) or 0.0,
        tbt_before=_longest(before),
        tbt_after=_longest(after),
        e2e_before=digits(before.e2e_ns / 1e9) or 0.0,
        e2e_after=digits(after.e2e_ns / 1e9) or 0.0,
    )


def _longest(served: Served) -> float | None:
    return digits(float(BIN_S[max(served.gaps)])) if len(served.gaps) else None


def _compared(name: str, unit: Literal["s", "1/s", "share", "count"], *parts: Interval) -> Compared:
    before, after, difference = parts
    low, high = difference.low, difference.high
    clear = low is not None and high is not None and (low > 0 or high < 0)
    return Compared(
        name=name,
        unit=unit,
        before=before,
        after=after,
        difference=difference,
        is_clear=clear,
        model_error=None,
        is_within_error=None,
    )


def _whole_runs(before: Simulated, after: Simulated) -> list[Compared]:
    """Numbers that a run has once: no interval can be drawn for them."""
    rows: list[tuple[str, Literal["s", "1/s", "share", "count"], list[float | None]]] = [
        ("cache_hit_rate", "share", [hit_rate(side) for side in (before, after)]),
        ("output_tokens_per_s", "1/s", [throughput(side) for side in (before, after)]),
        ("retractions", "count", [float(side.measure.retractions) for side in (before, after)]),
        ("steps", "count", [float(side.loop.steps) for side in (before, after)]),
        ("duration", "s", [_duration(side) for side in (before, after)]),
    ]
    found = []
    for name, unit, (one, other) in rows:
        change = None if one is None or other is None else _apart(one, other)
        spreads = (Interval(value=digits(value), low=None, high=None) for value in (one, other, change))
        found.append(_compared(name, unit, *spreads))
    return found


def _apart(one: float, other: float) -> float:
    """The difference; 0 of equal numbers whose sums were rounded in another order."""
    return 0.0 if math.isclose(one, other, rel_tol=1e-9) else other - one


def hit_rate(side: Simulated) -> float | None:
    """Share of the prompt tokens that the cache had; None when nobody was admitted."""
    admitted = [one for one in side.served.values() if one.cached_len is not None]
    prompts = sum(one.prompt_len for one in admitted)
    return sum(one.cached_len or 0 for one in admitted) / prompts if prompts else None


def _duration(side: Simulated) -> float:
    return max(side.measure.end_ns - (side.measure.start_ns or 0), 1) / 1e9


def throughput(side: Simulated) -> float:
    """Output tokens a second, from the first arrival to the last token."""
    return sum(one.output_len for one in side.served.values()) / _duration(side)
