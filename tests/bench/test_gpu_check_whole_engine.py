"""gpu_check's section 13 on the CPU double: a whole engine, in both orders of steps, heard by nobody and by all."""

from __future__ import annotations

import pytest

from bench.gpu_check import whole_engine as section
from bench.gpu_check.random_model import shape
from bench.gpu_check.report import Finding
from engine.attention import flashinfer
from engine.executor.overlapped_torch import OverlappedTorchExecutor
from tests.bench.test_gpu_check import at_once, rig_of
from tests.engine.attention.late_device import LateDevice

TINY = shape(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=64)


class Ticks:
    """A clock that a look moves on by a tick."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def seconds(self, first: int, last: int) -> float:
        return (last - first) * 0.001


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    monkeypatch.setattr(section, "SMALL", TINY)


def findings_of(device: LateDevice) -> list[Finding]:
    return list(section.whole_engine(rig_of(device), Ticks()))


def test_it_records_figures_of_four_runs_and_that_every_law_holds() -> None:
    findings = findings_of(LateDevice(late=False))
    assert [finding.ok for finding in findings] == [None] * 7 + [True]
    assert all(finding.value is not None for finding in findings)
    assert [finding.name.partition(":")[0] for finding in findings[:4]] == [
        f"4 rows, overlap {overlap}, telemetry {watched}" for overlap in ("off", "on") for watched in ("off", "on")
    ]
    # A mark at the first kernel and one at the last: as many ticks between steps as in them, but for the first step.
    assert {round(finding.value or 0, 3) for finding in findings[:4]} == {round(5 / 11, 3)}
    assert [finding.limit for finding in findings] == [None, None, 0.03, 0.03, None, 0.01, 0.01, 0]


def test_steps_overlap_in_two_of_the_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    most: list[int] = []
    launch = OverlappedTorchExecutor.launch

    def counted(self: OverlappedTorchExecutor, batch: object) -> None:
        launch(self, batch)  # type: ignore[arg-type]  # whatever came is passed on
        most.append(len(self._launched))

    monkeypatch.setattr(OverlappedTorchExecutor, "launch", counted)
    findings_of(LateDevice(late=False))
    half = len(most) // 2
    assert set(most[: half - 9]) == {1}
    assert set(most[half + 9 :]) == {1, 2}


def test_a_law_that_is_broken_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    run = section._run

    def broken(*args: object) -> object:
        return run(*args)._replace(broken=1)  # type: ignore[arg-type]  # whatever came is passed on

    monkeypatch.setattr(section, "_run", broken)
    assert [finding.ok for finding in section.whole_engine(at_once(), Ticks())][-1] is False


def test_an_executor_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    collect = OverlappedTorchExecutor.collect
    seen: list[int] = []

    def fails_late(self: OverlappedTorchExecutor) -> object:
        seen.append(1)
        if len(seen) == 8:
            raise RuntimeError("illegal memory access")
        return collect(self)

    monkeypatch.setattr(OverlappedTorchExecutor, "collect", fails_late)
    with pytest.raises(AssertionError, match="illegal memory access"):
        findings_of(LateDevice(late=False))
