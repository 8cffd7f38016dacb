"""Panels as data. Owns: what a board is made of, before anything of Grafana is involved.

The description of a panel is the question that its metric answers, from the catalogue.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from grafana.queries import metric, quantile

Kind = Literal["timeseries", "stacked", "stat", "table", "heatmap"]


class Target(NamedTuple):
    """One query and what its lines are called."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel. `about` names the metric whose question is its description; `note` says what that does not."""

    title: str
    kind: Kind
    unit: str
    about: str
    targets: tuple[Target, ...]
    width: int = 8
    note: str = ""
    exemplars: bool = False

    @property
    def description(self) -> str:
        """The question it answers."""
        return " ".join(part for part in (metric(self.about).help, self.note) if part)


class Row(NamedTuple):
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


class Board(NamedTuple):
    """One dashboard. `per_engine`: it has a variable to choose engines."""

    uid: str
    title: str
    about: str
    rows: tuple[Row, ...]
    per_engine: bool = True


def quantiles(name: str, *wanted: float, by: tuple[str, ...] = ()) -> tuple[Target, ...]:
    """One target per quantile, each split by `by`."""
    legend = "".join(f" {{{{{label}}}}}" for label in by)
    return tuple(Target(quantile(q, name, *by), f"p{q * 100:g}{legend}") for q in wanted)


def by(label: str, expr: str) -> tuple[Target, ...]:
    """One line per value of `label`."""
    return (Target(expr, f"{{{{{label}}}}}"),)


def one(expr: str, legend: str = "") -> tuple[Target, ...]:
    """One line."""
    return (Target(expr, legend),)


def each(expr: str) -> tuple[Target, ...]:
    """One line per engine."""
    return (Target(expr, "{{instance}}"),)
