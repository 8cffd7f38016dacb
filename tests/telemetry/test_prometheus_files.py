"""What grafana/ names exists: the scrape configuration parses, every metric in a query is exposed."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from telemetry.metric_catalog import CATALOG

FOLDER = Path(__file__).parents[2] / "grafana"


def test_the_scrape_configuration_has_the_engine_as_target() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert [job["job_name"] for job in config["scrape_configs"]] == ["admitscope"]
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


def test_every_metric_of_the_queries_exists() -> None:
    named = set(re.findall(r"admitscope_(\w+)", (FOLDER / "README.md").read_text()))
    known = {metric.name for metric in CATALOG}
    suffixes = ("_bucket", "_sum", "_count")
    missing = {name for name in named if name not in known and not any(name.removesuffix(s) in known for s in suffixes)}
    assert len(named) >= 7
    assert missing == set()
