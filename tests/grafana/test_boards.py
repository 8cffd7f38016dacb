"""Boards and rules without a server: committed as built, laid out whole, all names in the catalogue, none left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from grafana.boards import BOARDS
from grafana.build import FOLDER, WIDTH, build
from grafana.panel import Board
from grafana.queries import BoardError, gauge, quantile, rate, selector, within
from grafana.rules import ALERTS, RECORDINGS, Scale, rules
from grafana.rules import FOLDER as RULES_FOLDER
from telemetry.metric_catalog import BUILD_INFO, BUILD_LABELS, CATALOG, PREFIX

ROOT = Path(__file__).parents[2]
BY_NAME = {PREFIX + metric.name: metric for metric in CATALOG}
RECORDED = {rule.name for rule in RECORDINGS}
#: What Prometheus itself keeps.
OWN = {"up", "ALERTS"}

boards = pytest.mark.parametrize("board", BOARDS, ids=[board.uid for board in BOARDS])


def expressions() -> list[tuple[str, str]]:
    """(where, query) of every board and rule, variables filled in."""
    found = [
        (f"{board.uid}: {panel.title}", target.expr)
        for board in BOARDS
        for row in board.rows
        for panel in row.panels
        for target in panel.targets
    ]
    for group in yaml.safe_load(rules())["groups"]:
        found += [(rule.get("alert") or rule["record"], rule["expr"]) for rule in group["rules"]]
    return [(where, expr.replace("$__rate_interval", "1m").replace("$instance", ".*")) for where, expr in found]


def selectors(node: Any) -> list[Any]:
    """Every vector selector in a parsed query."""
    found = []
    if isinstance(node, promql_parser.VectorSelector):
        return [node]
    if isinstance(node, promql_parser.MatrixSelector):
        return selectors(node.vector_selector)
    for name in ("expr", "lhs", "rhs", "args"):
        inner = getattr(node, name, None)
        for each in inner if isinstance(inner, list) else [inner] if inner is not None else []:
            found += selectors(each)
    return found


@boards
def test_committed_board_is_what_is_built(board: Board) -> None:
    file = FOLDER / f"{board.uid}.json"
    assert file.read_text(encoding="utf-8") == build(board), "run `make docs`"


def test_committed_rules_are_what_is_built() -> None:
    assert (RULES_FOLDER / "admitscope.yml").read_text(encoding="utf-8") == rules(), "run `make docs`"


@boards
def test_panels_have_ids_of_their_own_and_do_not_overlap(board: Board) -> None:
    panels = json.loads(build(board))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= WIDTH, panel["title"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


@boards
def test_every_panel_says_what_it_answers_and_in_which_unit(board: Board) -> None:
    for panel in json.loads(build(board))["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@pytest.mark.parametrize(("where", "expr"), expressions(), ids=[where for where, _ in expressions()])
def test_query_parses_and_names_only_what_exists(where: str, expr: str) -> None:
    found = selectors(promql_parser.parse(expr))
    assert found, f"{where} reads nothing"
    for one in found:
        if one.name in OWN | RECORDED:
            continue
        if one.name == PREFIX + BUILD_INFO.name:
            assert {m.name for m in one.matchers.matchers} <= {*BUILD_LABELS, "instance"}
            continue
        base = re.sub(r"_(bucket|sum|count)$", "", one.name)
        metric = BY_NAME.get(one.name) or BY_NAME[base]
        assert (one.name != base) == (metric.kind == "histogram"), f"{one.name} is a {metric.kind}"
        for matcher in one.matchers.matchers:
            if matcher.name in {"instance", "le"}:
                continue
            assert matcher.name == metric.label, f"{one.name} has no label {matcher.name}"
            if str(matcher.op) in {"=", "MatchOp.Equal"}:
                assert matcher.value in metric.values
            else:
                assert any(re.fullmatch(matcher.value, value) for value in metric.values)


def test_every_metric_is_on_a_board_or_in_a_rule() -> None:
    seen = {one.name for _, expr in expressions() for one in selectors(promql_parser.parse(expr))}
    bare = {re.sub(r"_(bucket|sum|count)$", "", name) for name in seen} | seen
    assert not sorted(set(BY_NAME) - bare)
    assert PREFIX + BUILD_INFO.name in bare


def test_thresholds_of_objectives_are_bucket_bounds() -> None:
    for rule in RECORDINGS:
        assert rule.bound in BY_NAME[PREFIX + rule.histogram].bounds


def test_alerts_say_what_is_the_matter_and_where_to_look() -> None:
    page = (ROOT / "docs/alerts.md").read_text(encoding="utf-8")
    for alert in ALERTS:
        assert alert.meaning.endswith(".")
        assert alert.look.endswith(".")
        assert f"## {alert.name}" in page, "run `make docs`"


def test_a_scale_shortens_every_window() -> None:
    full, tenth = yaml.safe_load(rules()), yaml.safe_load(rules(Scale(0.1)))
    for one, other in zip(full["groups"], tenth["groups"], strict=True):
        for rule, short in zip(one["rules"], other["rules"], strict=True):
            if "for" in rule:
                assert rule["for"] != short["for"]
            assert ("[" in rule["expr"]) == ("[" in short["expr"])
            if "[" in rule["expr"]:
                assert rule["expr"] != short["expr"]
    assert Scale(0.1).window(2) == "200ms"
    assert Scale(0.1).window(300) == "30s"
    assert Scale(0.1).seconds(15) == "1.5"


@pytest.mark.parametrize(
    "ask",
    [
        lambda: rate("no_such_total"),
        lambda: rate("kv_pages", "state"),
        lambda: gauge("steps_total"),
        lambda: gauge("kv_pages", "colour"),
        lambda: quantile(0.5, "steps_total"),
        lambda: within("time_to_first_token_seconds", 0.3),
        lambda: selector("kv_pages", 'colour="red"'),
    ],
)
def test_a_query_for_what_is_not_there_does_not_build(ask: Any) -> None:
    with pytest.raises(BoardError):
        ask()


def test_compose_file_mounts_only_files_that_exist_and_names_no_registry() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    for name, service in compose["services"].items():
        assert "." not in service["image"].split("/")[0], f"{name}: an image without a registry's host"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        for mount in service.get("volumes", ()):
            assert (ROOT / mount.split(":")[0]).exists(), mount


def test_provisioning_matches_the_boards_and_the_compose_file() -> None:
    provider = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/admitscope.yml").read_text(encoding="utf-8"))
    mounts = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["grafana"]["volumes"]
    assert any(mount.split(":")[1] == provider["providers"][0]["options"]["path"] for mount in mounts)
    assert {file.stem for file in FOLDER.glob("*.json")} == {board.uid for board in BOARDS}
