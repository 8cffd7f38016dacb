"""Studies: every page is what its figures say, every run works, and equal runs give equal figures."""

from __future__ import annotations

import json

import pytest

from bench.studies import page
from bench.studies.__main__ import studied
from bench.studies.cases import CHUNKS, MIXED, STUDIES, Study, lines_of
from bench.studies.charts import cost_curve
from bench.studies.runs import Run, simulated

#: Enough for a queue, few enough for a test.
FEW = 5


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_the_page_is_what_its_figures_say(study: Study) -> None:
    """`make study NAME=… ARGS=--docs` writes all of it; the figures of a full run take minutes."""
    text = (page.FOLDER / f"{study.name}.md").read_text("utf-8")
    result = json.loads((page.FOLDER / f"{study.name}.json").read_text("utf-8"))
    assert page.figures_of(text) == "\n".join(lines_of(study, result)).splitlines()
    assert [one["name"] for one in result["runs"]] == [run.name for run in study.runs]
    assert [one["settings"] for one in result["runs"]] == [dict(run.settings) for run in study.runs]
    assert not any(one["violations"] for one in result["runs"])
    for plot in result["plots"]:
        assert (page.FOLDER / f"{study.name}-{plot}.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_every_run_of_a_study_works_and_fills_its_table(study: Study) -> None:
    result, plots = studied(study, limit=FEW)
    assert all(one["requests"] + one["refused"] == FEW and not one["violations"] for one in result["runs"])
    assert all(one.get(column.field) is not None for one in result["runs"] for column in study.columns)
    assert list(plots) == result["plots"]
    assert all(document.startswith("<svg") for document in plots.values())
    assert len([line for line in lines_of(study, result) if line.startswith("| ")]) == 1 + len(study.runs)


def test_equal_runs_give_equal_figures() -> None:
    run = MIXED.runs[1]
    assert simulated(run, limit=FEW) == simulated(run, limit=FEW)


def test_who_is_alone_is_not_slowed_down() -> None:
    alone = simulated(Run(name="alone", settings={"chunked_prefill_size": "none"}), limit=1)
    together = simulated(Run(name="together", settings={}, rate_scale=10.0), limit=FEW)
    assert alone["slowdown_p99"] == pytest.approx(1.0, abs=1e-3)
    assert alone["jain"] == 1.0
    assert together["slowdown_p50"] > 1.5
    assert together["jain"] < 0.97


def test_the_cost_of_a_chunk_is_one_where_it_is_best_in_both() -> None:
    figures = [{"name": "64", "ttft_p99": 2.0, "tbt_p99": 0.1}, {"name": "1,024", "ttft_p99": 2.0, "tbt_p99": 0.4}]
    assert cost_curve(figures, 0.5) == {64: 1.0, 1024: 2.5}
    assert cost_curve(figures, 0.75) == {64: 1.0, 1024: 1.75}


def test_a_section_is_written_where_there_is_one_and_nothing_else_changes() -> None:
    text = f"# A study\n\nwords\n\n{page.START}\nold\n{page.END}\n\nmore words\n"
    written = page.with_figures(text, ["new", "", "lines"])
    assert written == f"# A study\n\nwords\n\n{page.START}\nnew\n\nlines\n{page.END}\n\nmore words\n"
    assert page.figures_of(written) == ["new", "", "lines"]
    for bad in ("# no section\n", text + text):
        with pytest.raises(LookupError, match="exactly one section"):
            page.with_figures(bad, [])


def test_the_chunks_of_the_curve_rise_from_far_below_a_prompt_to_above_most() -> None:
    sizes = [int(run.settings["chunked_prefill_size"]) for run in CHUNKS.runs]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (128, 16_384)
