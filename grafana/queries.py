"""PromQL from the metric catalogue. Owns: the shapes of query that boards and rules use.

Every function looks its metric up: a name that the catalogue does not have, a label that the metric does not carry, or
a rate of a gauge fails when the boards are built, not when somebody opens them.
"""

from __future__ import annotations

from typing import Final

from telemetry.metric_catalog import BUILD_INFO, BUILD_LABELS, CATALOG, PREFIX, Metric

#: What a board replaces by the scrape interval times four, and a rule by a fixed range.
INTERVAL: Final = "$__rate_interval"
ONE: Final = 'instance=~"$instance"'
#: Every engine that Prometheus knows.
ALL: Final = ""

_BY_NAME: Final = {metric.name: metric for metric in CATALOG} | {BUILD_INFO.name: BUILD_INFO}


class BoardError(Exception):
    """A query asks for what the catalogue does not have."""


def metric(name: str, *, kinds: tuple[str, ...] = ("counter", "gauge", "histogram")) -> Metric:
    """The family `name`. Raises BoardError when there is none of these kinds."""
    found = _BY_NAME.get(name)
    if found is None:
        raise BoardError(f"{name!r} is no metric of the catalogue")
    if found.kind not in kinds:
        raise BoardError(f"{name} is a {found.kind}; this query needs a {' or '.join(kinds)}")
    return found


def selector(name: str, *matchers: str, where: str = ONE, suffix: str = "") -> str:
    """`admitscope_name_suffix{matchers}`."""
    family = metric(name)
    for matcher in matchers:
        label = matcher.split("=", 1)[0].rstrip("!~")
        if label not in {family.label, "le"}:
            raise BoardError(f"{name} has no label {label!r}")
    inside = ",".join(part for part in (where, *matchers) if part)
    return f"{PREFIX}{name}{suffix}{{{inside}}}" if inside else f"{PREFIX}{name}{suffix}"


def _by(*labels: str) -> str:
    return f" by ({','.join(labels)})" if labels else ""


def _own(family: Metric, by: tuple[str, ...]) -> None:
    for label in by:
        if label not in {family.label, "le", "instance"}:
            raise BoardError(f"{family.name} has no label {label!r}")


def rate(name: str, *by: str, matchers: tuple[str, ...] = (), where: str = ONE, over: str = INTERVAL) -> str:
    """Per-second rate of a counter, summed by its labels."""
    _own(metric(name, kinds=("counter",)), by)
    return f"sum{_by(*by)} (rate({selector(name, *matchers, where=where)}[{over}]))"


def increase(name: str, *by: str, where: str = ONE, over: str = INTERVAL) -> str:
    """Growth of a counter over a range, summed by its labels."""
    _own(metric(name, kinds=("counter",)), by)
    return f"sum{_by(*by)} (increase({selector(name, where=where)}[{over}]))"


def gauge(name: str, *by: str, how: str = "sum", where: str = ONE) -> str:
    """A gauge, aggregated."""
    _own(metric(name, kinds=("gauge",)), by)
    return f"{how}{_by(*by)} ({selector(name, where=where)})"


def quantile(q: float, name: str, *by: str, where: str = ONE, over: str = INTERVAL) -> str:
    """A quantile of a histogram."""
    _own(metric(name, kinds=("histogram",)), by)
    inner = f"rate({selector(name, where=where, suffix='_bucket')}[{over}])"
    return f"histogram_quantile({q:g}, sum by ({','.join(('le', *by))}) ({inner}))"


def summed(name: str, *by: str, part: str, where: str = ONE, over: str = INTERVAL) -> str:
    """Rate of a histogram's `_sum` or `_count`."""
    _own(metric(name, kinds=("histogram",)), by)
    return f"sum{_by(*by)} (rate({selector(name, where=where, suffix=f'_{part}')}[{over}]))"


def heatmap(name: str, *, where: str = ONE, over: str = INTERVAL) -> str:
    """Growth of each bucket."""
    metric(name, kinds=("histogram",))
    return f"sum by (le) (increase({selector(name, where=where, suffix='_bucket')}[{over}]))"


def within(name: str, bound: float, *by: str, where: str = ONE, over: str = INTERVAL) -> str:
    """Share of observations at or below `bound`, which must be one of the metric's bounds."""
    family = metric(name, kinds=("histogram",))
    if bound not in family.bounds:
        raise BoardError(f"{bound} is no bucket bound of {name}")
    matcher = f'le="{float(bound)!r}"'
    good = f"rate({selector(name, matcher, where=where, suffix='_bucket')}[{over}])"
    return f"sum{_by(*by)} ({good}) / ({summed(name, *by, part='count', where=where, over=over)} > 0)"


def share(part: str, whole: str) -> str:
    """`part / whole`, with nothing instead of a division by zero. `part` may be grouped; `whole` is one number."""
    left = f"{part} / on() group_left() " if part.startswith("sum by") else f"{part} / "
    return f"{left}({whole} > 0)"


def build_info(where: str = ALL) -> str:
    """Engines by what they run."""
    return f"count by ({', '.join(BUILD_LABELS)}) ({selector(BUILD_INFO.name, where=where)})"
