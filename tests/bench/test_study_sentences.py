"""What the pages of studies say in words follows from the figures beside them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.studies import page

Run = dict[str, Any]


def _runs(study: str) -> dict[tuple[str, str], Run]:
    found = json.loads((page.FOLDER / f"{study}.json").read_text("utf-8"))["runs"]
    return {(run["group"], run["name"]): run for run in found}


def _more(study: str, measure: str, group: str, name: str, base: str) -> float:
    """By how much of `base` the measure of `name` is larger, in percent."""
    runs = _runs(study)
    return 100 * (float(runs[group, name][measure]) / float(runs[group, base][measure]) - 1)


def _sentence(study: str, said: str) -> bool:
    return said in " ".join((page.FOLDER / f"{study}.md").read_text("utf-8").split())


def _both(study: str, measure: str, name: str, base: str) -> list[int]:
    return sorted(round(_more(study, measure, group, name, base)) for group in {group for group, _ in _runs(study)})


def test_the_fallback_of_lpm() -> None:
    low, high = _both("lpm-fallback", "ttft_p99", "fallback at 128", "full order")
    assert _sentence("lpm-fallback", f"With it TTFT p99 is {low} to {high} % longer")
    low, high = _both("lpm-fallback", "ttft_p50", "fallback at 128", "full order")
    assert _sentence("lpm-fallback", f"TTFT p50 {low} to {high} % longer")
    assert round(_more("lpm-fallback", "throughput", "1 x recorded", "fallback at 128", "full order")) == -10


def test_large_chunks() -> None:
    load = "0.25 x recorded"
    fall = -round(_more("chunk-size", "ttft_p99", load, "16,384", "1,024"))
    most = -round(min(_more("chunk-size", "ttft_p50", load, name, "1,024") for name in ("4,096", "8,192", "16,384")))
    assert _sentence("chunk-size", f"TTFT p99 falls by {fall} % (35.5 to 31.8 s), TTFT p50 by up to {most} %")
    assert _sentence("README", f"TTFT p99 falls by {fall} % and p50 by up to {most} %, while TBT p99 rises sevenfold")
    assert round(_more("chunk-size", "tbt_p99", load, "16,384", "1,024") / 100 + 1) == 7


@pytest.mark.parametrize(
    ("load", "said"), [("0.15", "{low} to {high} % sooner"), ("0.25", "later by {low} to {high} %")]
)
def test_mixed_steps(load: str, said: str) -> None:
    groups = [group for group, name in _runs("mixed") if group.startswith(load) and name == "mixed"]
    low, high = sorted(abs(round(_more("mixed", "ttft_p50", group, "not mixed", "mixed"))) for group in groups)
    assert _sentence("mixed", said.format(low=low, high=high))


def test_lpm_and_dfs_weight_decide_alike() -> None:
    runs = _runs("policies")
    lpm, dfs = (runs["0.4 x recorded", name]["decisions"] for name in ("lpm", "dfs-weight"))
    assert _sentence("policies", f"{lpm:,} decisions against {dfs:,}")
