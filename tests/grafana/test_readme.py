"""The page for operators says what is there: metrics, boards, ports, make targets, numbers of alerts."""

from __future__ import annotations

import re
from pathlib import Path

import promql_parser
import pytest
import yaml

from grafana.boards import BOARDS
from grafana.rules import ALERTS
from telemetry.metric_catalog import CATALOG

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "grafana/README.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"^\|[^|]+\| `(.+)` \|$", PAGE, re.MULTILINE)


def test_the_scrape_configuration_has_the_engine_as_target() -> None:
    config = yaml.safe_load((ROOT / "grafana/prometheus.yml").read_text(encoding="utf-8"))
    assert [job["job_name"] for job in config["scrape_configs"]] == ["admitscope"]
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]


@pytest.mark.parametrize("query", QUERIES)
def test_queries_parse_and_name_metrics_that_exist(query: str) -> None:
    promql_parser.parse(query)
    known = {metric.name for metric in CATALOG}
    named = set(re.findall(r"admitscope_(\w+)", query))
    assert named
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} <= known


def test_every_board_is_named_with_its_question() -> None:
    rows = dict(re.findall(r"^\| \[[^\]]+\]\(dashboards/([\w-]+)\.json\) \| (.+) \|$", PAGE, re.MULTILINE))
    assert rows == {board.uid: board.about for board in BOARDS}


def test_numbers_of_alerts_are_right() -> None:
    words = {8: "eight", 9: "Nine", 17: "seventeen"}
    pages = sum(alert.severity == "page" for alert in ALERTS)
    assert f"{words[pages]} are\npages, {words[len(ALERTS) - pages]} are tickets" in PAGE
    assert f"{words[len(ALERTS)]} alerts" in PAGE
    assert len(QUERIES) >= 9


def test_links_and_make_targets_exist() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "grafana" / link).exists(), link
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", PAGE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_a_new_data_source_is_one_that_the_boards_and_exemplars_know() -> None:
    file = ROOT / "grafana/provisioning/datasources/prometheus.yml"
    sources = {one["uid"]: one for one in yaml.safe_load(file.read_text(encoding="utf-8"))["datasources"]}
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for source in sources.values():
        assert re.match(r"http://(\w+):\d+$", source["url"])[1] in services
    for destination in sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]:
        assert destination["datasourceUid"] in sources
