"""docs/reference/metrics.md is what the catalogue says, and the catalogue keeps what its version promised."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grafana.metric_page import PAGE, page, places, unit
from telemetry.metric_catalog import CATALOG, METRICS_VERSION, PREFIX, Metric
from telemetry.views import gen_ai, sglang

GOLDEN = Path(__file__).parents[1] / "golden" / f"metrics-v{METRICS_VERSION}.txt"


def promise(metric: Metric) -> str:
    """What must not change under one name, as a line. Label values and bounds may be added, not taken away."""
    values = ",".join(metric.values)
    bounds = ",".join(f"{bound:g}" for bound in metric.bounds)
    return f"{PREFIX}{metric.name}\t{metric.kind}\t{unit(metric.name)}\t{metric.label or ''}\t{values}\t{bounds}"


def test_the_committed_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make docs"


@pytest.mark.parametrize("line", GOLDEN.read_text(encoding="utf-8").splitlines())
def test_what_this_version_promises_still_holds(line: str) -> None:
    """A line that fails: give the new meaning a new name, raise METRICS_VERSION, and write a golden file for it."""
    name, kind, measure, label, values, bounds = line.split("\t")
    metric = next((metric for metric in CATALOG if PREFIX + metric.name == name), None)
    assert metric is not None, f"{name} is gone"
    now = promise(metric).split("\t")
    assert now[:4] == [name, kind, measure, label]
    assert set(values.split(",")) <= set(now[4].split(","))
    assert set(bounds.split(",")) <= set(now[5].split(","))


def test_every_family_of_the_catalogue_is_promised() -> None:
    promised = {line.split("\t")[0] for line in GOLDEN.read_text(encoding="utf-8").splitlines()}
    assert promised == {PREFIX + metric.name for metric in CATALOG}, "add the new family's line to the golden file"


def test_every_family_of_every_view_is_on_the_page_with_its_place() -> None:
    text = page()
    for metric in CATALOG:
        row = next(line for line in text.splitlines() if line.startswith(f"| `{PREFIX}{metric.name}`"))
        assert metric.help in row
        assert places(metric.name), f"{metric.name} is on no board and in no rule"
        assert places(metric.name)[0] in row
    for view in (*gen_ai(""), *sglang("")):
        assert f"| `{view.name}` | {view.kind} |" in text


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page()):
        assert (PAGE.parent / target).exists(), target
