"""Plots of a simulation: what they are drawn from is what was measured, and drawing needs no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.events import StepCompleted
from engine.scheduler.plan import StepKind, StepTimes
from telemetry.cli import main
from telemetry.sim.plots import MOST_POINTS, Watch
from telemetry.sim.svg import data, drawn
from tests.telemetry.sim.recordings import config_of, record

#: In a process that cannot open a socket: whatever is fetched at run time would show here.
_WITHOUT_NETWORK = """
import socket
def refuse(*_, **__): raise OSError("no network here")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from telemetry.sim.plots import queue_chart
from telemetry.sim.svg import drawn
print(drawn(queue_chart([{"s": 0, "requests": 1, "what": "waiting"}], "a title")), end="")
"""


def _completed(step: int, waiting: int) -> StepCompleted:
    times = StepTimes(*[step * 1_000_000] * 7)
    return StepCompleted(step, step, step * 1_000_000, StepKind.DECODE, (), times, False, (0, 0, 0, 0), waiting, 1)


def test_sim_draws_queue_and_both_distributions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, config_of(), requests=12)
    assert main(["sim", str(journal), "--cost", "smollm2-cpu", "--plot", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [Path(name).name for name in result["plots"]] == ["queue.svg", "ttft.svg", "tbt.svg"]
    for name in result["plots"]:
        root = ElementTree.fromstring(Path(name).read_text("utf-8"))
        words = "".join(root.itertext())
        assert "run.jsonl, lpm" in words
        assert "(s)" in words
        assert "http" not in words


def test_watching_changes_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, config_of(), requests=12)
    found = []
    for words in ([], ["--plot", str(tmp_path / "out")]):
        main(["sim", str(journal), "--cost", "smollm2-cpu", "--hash", "--json", *words])
        found.append(json.loads(capsys.readouterr().out))
        for key in ("wall_s", "plots"):
            del found[-1][key]
    assert found[0] == found[1]


def test_a_long_run_keeps_few_points_and_every_peak() -> None:
    watch = Watch()
    for step in range(20 * MOST_POINTS):
        watch.emit(_completed(step, 77 if step == 12_345 else step % 3))
    rows = watch.queue()
    assert len(rows) <= 2 * MOST_POINTS
    assert max(int(row["requests"] or 0) for row in rows) == 77
    seconds = [row["s"] for row in rows[::2]]
    assert seconds == sorted(seconds)


def test_nothing_measured_draws_nothing() -> None:
    assert Watch().queue() == Watch().spread("ttft") == Watch().spread("tbt") == []


def test_equal_data_draw_equal_files() -> None:
    import altair as alt

    chart = alt.Chart(data([{"a": 1, "b": 2.5}])).mark_line().encode(x="a:Q", y="b:Q")
    assert drawn(chart) == drawn(chart)


def test_drawing_needs_no_network() -> None:
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    words = [sys.executable, "-c", _WITHOUT_NETWORK]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.startswith("<svg")
    assert "virtual time (s)" in done.stdout


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = record(tmp_path, config_of(), requests=6)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main(["sim", str(journal), "--cost", "smollm2-cpu", "--plot", str(blocked)]) == 2
    assert "--plot" in capsys.readouterr().err
