"""Sections of gpu_check, at small sizes, on the CPU double: they find what they look for."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_check import batches, correctness, end_to_end, engine_checks, graphs_and_race, runner, speed
from bench.gpu_check.report import MAX_STATUS, Finding, Report, SectionReport, Status, table
from bench.gpu_check.rig import Rig, Sizes
from bench.gpu_check.runner import Section, run_section
from engine.attention import flashinfer
from engine.attention.device import DeviceRuntime
from engine.attention.flashinfer import FlashInferBackend, HeadShape
from engine.executor.base import SampledToken, TokenLogprobs
from engine.executor.manual import ManualSequence
from tests.engine.attention.late_device import LateDevice
from tests.engine.attention.shaped_flashinfer import ShapedFlashInfer
from tests.engine.executor.late_operators import LateOperators, LateStream
from tests.engine.models.gguf_files import tiny_weights, write_gguf
from tests.engine.models.shaped_operators import KERNEL_TYPES

SMALL = Sizes(
    heads=((1, 8, 3), (2, 16, 2)), pages=(1, 4), shrink=40, race_steps=12, replays=3, graph_rows=5, launches=1,
    prompts=6, answer_tokens=5, copy_bytes=4096, matmul=16, dtype=torch.float32,
)  # fmt: skip


class HostStopwatch:
    """Times nothing: the device of the tests has no time of its own."""

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        return 0.001

    def spin(self, seconds: float) -> None: ...


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    # Tiny tensors gain nothing from more, and waiting ones cost much on a busy machine.
    torch.set_num_threads(1)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(graphs_and_race, "SMALL", end_to_end.shape(
        layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=64
    ))  # fmt: skip
    monkeypatch.setattr(end_to_end, "SMALL", graphs_and_race.SMALL)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def rig_of(device: LateDevice, sizes: Sizes = SMALL) -> Rig:
    types = (torch.float32, *KERNEL_TYPES)  # float32 too: `sizes` are computed in it where bits are compared
    module = ShapedFlashInfer(device, compute_dtype=torch.float64, operator_types=types)
    return Rig(device, module, HostStopwatch(), sizes, np.random.default_rng(1))


def at_once() -> Rig:
    return rig_of(LateDevice(late=False))


def failed(findings: Iterator[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.ok is False]


def test_attention_is_right_on_the_double_in_every_shape() -> None:
    findings = list(correctness.attention(at_once()))
    assert [finding for finding in findings if not finding.ok] == []
    # Two shapes, two page sizes; eight kinds and two with a window by the default, one by FA3, those of both sorts by
    # each mixed kernel, by BatchAttention without the windows.
    assert len(findings) == 2 * 2 * (10 + 1 + 5 + 3 + 5)


def test_attention_that_is_off_in_one_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = at_once()
    run = correctness._run

    def off(rig: Rig, backend: object, batch: batches.Batch) -> torch.Tensor:
        out = run(rig, backend, batch)
        out[-1] *= 1.1
        return out

    monkeypatch.setattr(correctness, "_run", off)
    findings = list(correctness.attention(rig))
    assert len(failed(iter(findings))) == len(findings)


def test_answers_that_are_not_finite_fail() -> None:
    want = torch.zeros(2, 2, dtype=torch.float64)
    assert batches.compared("x", want.float(), want, want).ok
    assert not batches.compared("x", want.float() + float("nan"), want, want).ok


def test_kv_write_and_invariance_hold_on_the_double() -> None:
    assert failed(correctness.kv_write(at_once())) == []
    findings = list(correctness.invariance(at_once()))
    assert [finding.ok for finding in findings] == [None, True, True]


def test_a_write_beside_its_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch.Tensor.index_copy_

    def stray(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return copy(self, dim, (index + 1) % len(self), source)

    monkeypatch.setattr(torch.Tensor, "index_copy_", stray)
    assert len(failed(correctness.kv_write(at_once()))) == 8


def test_graphs_answer_as_the_eager_pass_on_the_double() -> None:
    findings = list(graphs_and_race.graphs(at_once()))
    assert failed(iter(findings)) == []
    # 1, 2, 3 and 5 rows, two checks each, and the replays; with either table of small operators.
    assert len(findings) == 2 * 9


def test_graphs_with_other_contexts_than_planned_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FlashInferBackend.prepare_captured
    planned: set[tuple[FlashInferBackend, int]] = set()

    def once(self: FlashInferBackend, metadata: object) -> None:
        size = (self, metadata.batch_size)
        if size not in planned:
            planned.add(size)
            plan(self, metadata)

    monkeypatch.setattr(FlashInferBackend, "prepare_captured", once)
    assert any("replay against eager" in name for name in failed(graphs_and_race.graphs(at_once())))


@pytest.mark.parametrize("device", [LateDevice(), graphs_and_race.DeafRuntime(LateDevice())], ids=["late", "deaf"])
def test_stand_ins_for_the_device_have_all_that_it_is_asked_for(device: DeviceRuntime) -> None:
    """mypy, which would tell, is not asked about programs and tests."""
    asked = {name for name in dir(DeviceRuntime) if not name.startswith("_")} | set(DeviceRuntime.__annotations__)
    assert asked
    assert asked <= set(dir(device))


def test_two_sets_stand_a_late_device_and_one_that_does_not_wait_is_found_out() -> None:
    findings = list(race_on_a_late_device())
    assert [finding.ok for finding in findings] == [True] * 6
    assert findings[1].value


def test_two_sets_of_each_mixed_kernel_that_do_not_wait_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateDevice, "wait_for", lambda self, place: None)
    findings = list(race_on_a_late_device())
    # BatchAttention's plan waits for everything by itself.
    assert [finding.ok for finding in findings[2:]] == [False, False, True, False]


def race_on_a_late_device() -> Iterator[Finding]:
    """Section 6 where torch's operators of an answer are late too."""
    device = LateStream(late=True, poisons=False)
    run = FlashInferBackend.run

    def late(*args: Any) -> torch.Tensor:
        with LateOperators(device):
            return run(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlashInferBackend, "run", late)
        yield from graphs_and_race.race(rig_of(device))


def test_on_a_device_that_is_never_late_the_race_section_says_that_it_sees_nothing() -> None:
    findings = list(graphs_and_race.race(at_once()))
    assert [finding.ok for finding in findings] == [True, False, True, True, True, True]


@pytest.fixture
def tiny_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any tokens: the tiny model has no text."""

    def draw(rig: Rig, path: Path) -> list[list[int]]:
        return [rig.rng.integers(0, 64, 5 + 7 * i).tolist() for i in range(rig.sizes.prompts)]

    monkeypatch.setattr(engine_checks, "prompts_of", draw)


@pytest.mark.usefixtures("tiny_text")
def test_answers_agree_with_the_cpu_and_with_each_other_on_the_double(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Tiny-1M-Q8_0.gguf", tiny_weights())
    for findings in (
        list(engine_checks.against_cpu(at_once(), path)),
        list(engine_checks.against_itself(at_once(), path)),
    ):
        assert failed(iter(findings)) == []
        assert len(findings) >= 2


@pytest.mark.usefixtures("tiny_text")
def test_answers_of_another_model_do_not_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_checks, "MARGIN", 0.0)
    load, calls = engine_checks.load_model, []

    def other(path: Path, **settings: object) -> object:
        model = load(path, **settings)
        calls.append(path)
        if len(calls) > 1:
            model._layers[-1].next_norm.mul_(-1)
        return model

    monkeypatch.setattr(engine_checks, "load_model", other)
    path = write_gguf(tmp_path / "Tiny-1M-Q8_0.gguf", tiny_weights())
    # Eager and with graphs, with either table of small operators.
    assert len(failed(engine_checks.against_cpu(at_once(), path))) == 4


@pytest.mark.model
def test_prompts_are_pieces_of_the_text() -> None:
    from engine.models.packaged import packaged_gguf_path

    prompts = engine_checks.prompts_of(at_once(), packaged_gguf_path())
    assert len(prompts) == 6
    assert all(8 <= len(prompt) < 120 for prompt in prompts)


def answer(tokens: list[int], margins: list[float]) -> ManualSequence:
    sequence = ManualSequence("r", [0, *tokens], engine_checks.GREEDY, 1)
    sequence.sampled = [
        SampledToken("r", token, TokenLogprobs(token, -0.5, ((token, -0.5), (token + 1, -0.5 - margin))))
        for token, margin in zip(tokens, margins, strict=True)
    ]
    return sequence


def test_answers_may_part_only_after_two_tokens_that_were_near() -> None:
    want = answer([1, 2, 3], [2.0, 0.05, 2.0])
    for got, ok in (([1, 2, 3], True), ([1, 9, 9], True), ([1, 2, 9], True), ([9, 2, 3], False)):
        assert engine_checks.agreement("x", [answer(got, [1.0] * 3)], [want]).ok is ok, got
    assert engine_checks.first_difference([1, 2], [1, 2, 3]) == 2


def test_speed_sections_record_figures_and_judge_none() -> None:
    rig, ceilings = at_once(), speed.Ceilings()
    rig.sizes = dataclasses.replace(SMALL, shrink=400)
    findings = list(ceilings.measure(rig))
    assert ceilings.copy_bytes_s == pytest.approx(4096 / 0.001)
    assert ceilings.matmul_flop_s == pytest.approx(2 * 16**3 / 0.001)
    tiny = HeadShape(4, 2, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "EIGHT_BILLION", tiny)
        patch.setattr(speed, "SMALL", tiny)
        findings += [*speed.decode(rig, ceilings), *speed.prefill(rig, ceilings), *speed.mixed(rig)]
    findings += list(end_to_end.decode_steps(rig, ceilings))
    assert {finding.ok for finding in findings} == {None}
    assert all(finding.value is not None for finding in findings)


def test_a_share_of_a_ceiling_is_work_over_time_over_the_ceiling() -> None:
    rig, ceilings = at_once(), speed.Ceilings()
    ceilings.copy_bytes_s = ceilings.matmul_flop_s = 1e6
    rig.sizes = Sizes(shrink=512, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "EIGHT_BILLION", HeadShape(4, 2, 8))
        patch.setattr(speed, "SMALL", HeadShape(4, 2, 8))
        first = next(iter(speed.decode(rig, ceilings)))
        chunk = next(iter(speed.prefill(rig, ceilings)))
    # One row of one token: K and V of 2 heads of 8 float32, in a millisecond.
    assert first.value == pytest.approx(2 * 8 * 2 * 4 / 0.001 / 1e6)
    # One row that sees itself: 4 operations for each of 4 heads of 8.
    assert chunk.value == pytest.approx(4 * 4 * 8 / 0.001 / 1e6)


def test_floors_of_the_8_billion_shape_are_those_of_its_card() -> None:
    assert end_to_end.weights(end_to_end.EIGHT_BILLION) == pytest.approx(7.5e9, rel=0.01)
    assert end_to_end.bytes_read(end_to_end.EIGHT_BILLION, 64, 2048, 2) == pytest.approx(15.0e9 + 17.2e9, rel=0.01)


def test_batches_share_full_pages_and_keep_every_law() -> None:
    lens = [(4, 40), (1, 50), (1, 33)]
    meta = batches.metadata_of(lens, 8, np.random.default_rng(0), num_pages=30, shared_pages=3)
    meta.validate(30)
    first = [meta.kv_indices[start : start + 3].tolist() for start in meta.kv_indptr[:-1]]
    assert first[0] == first[1] == first[2]


def run(section: Section, tmp_path: Path) -> tuple[SectionReport, Report]:
    report = Report()
    return run_section(section, at_once(), report, tmp_path), report


def test_an_error_of_a_section_is_reported_and_counts_where_checks_do(tmp_path: Path) -> None:
    def broken(_: Rig) -> Iterator[Finding]:
        yield Finding("before", True)
        raise RuntimeError("illegal memory access")

    done, report = run(Section(2, "x", 60, broken), tmp_path)
    assert (done.status, done.error) == (Status.FAILED, "RuntimeError: illegal memory access")
    assert report.exit_status == 1
    assert json.loads((tmp_path / "gpu_check.json").read_text("utf-8"))["sections"][0]["findings"][0]["ok"] is True
    assert run(Section(9, "x", 60, broken, counts=False), tmp_path)[1].exit_status == 0


def test_a_section_is_left_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    done, report = run(Section(2, "x", 25, lambda _: (Finding(str(i), True) for i in range(100))), tmp_path)
    assert done.status is Status.TIME_LIMIT
    assert len(done.findings) == 3
    assert report.exit_status == 0


def test_a_section_that_hangs_ends_the_process_with_the_report_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    given_up: list[Callable[[], None]] = []

    class Timer:
        def __init__(self, seconds: float, call: Callable[[], None]) -> None:
            assert seconds == 5 + runner.GRACE_S
            given_up.append(call)

        def start(self) -> None: ...

        def cancel(self) -> None: ...

    monkeypatch.setattr(runner.threading, "Timer", Timer)
    monkeypatch.setattr(runner.os, "_exit", ended.append)

    def hangs(_: Rig) -> Iterator[Finding]:
        yield Finding("before", False)
        given_up[0]()
        written = json.loads((tmp_path / "gpu_check.json").read_text("utf-8"))["sections"][0]
        assert written["status"] == "hung"
        assert written["findings"][0]["name"] == "before"

    run(Section(2, "x", 5, hangs), tmp_path)
    assert ended == [2], "the failed check and the section itself"


def test_the_exit_status_counts_failed_checks_and_fits_a_byte() -> None:
    report = Report(sections=[SectionReport(2, "x", 1, counts=True, findings=[Finding("y", False)] * 3)])
    assert report.exit_status == 3
    report.sections[0].findings *= 200
    assert report.exit_status == MAX_STATUS


def test_a_table_has_one_line_for_each_finding_whatever_its_words() -> None:
    lines = table([Finding("a | b\nc", False, 12_345.0, "steps", 0.0125), Finding("d", None, 1.0, "", note="n")])
    assert lines[2] == "| a \\| b c | **FAILED** | 12,345 steps | 0.0125 steps |  |"
    assert lines[3] == "| d |  | 1 |  | n |"
