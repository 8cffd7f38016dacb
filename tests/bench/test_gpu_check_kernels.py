"""gpu_check's sections 2, 10 and 11 with every attention kernel on the CPU double, and a fault made in each."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_check import __main__ as program
from bench.gpu_check import correctness, cuda, speed
from bench.gpu_check.batches import exact, random_batch, torch_answer
from bench.gpu_check.compiling import attention_kernels
from bench.gpu_check.report import Finding
from bench.gpu_check.rig import Rig
from engine.attention import flashinfer
from engine.attention.flashinfer import HeadShape
from tests.bench.test_gpu_check import SMALL, at_once, failed, rig_of
from tests.engine.attention.late_device import LateDevice

TINY = HeadShape(4, 2, 8)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1024)
    for name in ("EIGHT_BILLION", "SMALL"):
        monkeypatch.setattr(speed, name, TINY)


def kernel_of(name: str) -> str:
    return name.rpartition(", ")[2]


def without(rig: Rig, wrapper: str) -> Rig:
    """A module whose `wrapper` was never compiled."""

    def absent(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no prebuilt module, and JIT is disabled")

    setattr(rig.kernels, wrapper, absent)
    return rig


def test_every_kernel_is_checked_and_right_on_the_double() -> None:
    findings = list(correctness.attention(at_once()))
    assert [finding for finding in findings if not finding.ok] == []
    assert {kernel_of(finding.name) for finding in findings} == {
        "decode", "fa2", "fa3", "ragged", "split", "holistic", "pod"
    }  # fmt: skip
    windowed = {kernel_of(finding.name) for finding in findings if "window" in finding.name}
    assert windowed == {"ragged", "split", "pod"}, "short as they are here, both kinds end with a decode row"


@pytest.mark.parametrize(
    ("off", "seen"),
    [
        ("fa2", {"fa2", "ragged", "split"}),
        ("fa3", {"fa3"}),
        ("decode", {"decode", "split"}),
        ("holistic", {"holistic"}),
        ("pod", {"pod"}),
    ],
)
def test_a_kernel_that_is_off_in_its_last_row_is_found_by_name(off: str, seen: set[str]) -> None:
    rig = at_once()
    rig.kernels.off = (off,)
    names = failed(correctness.attention(rig))
    assert {kernel_of(name) for name in names} == seen


def test_a_kernel_that_forgets_the_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.attention.flashinfer_kernels import Library

    whole = Library.windowed
    monkeypatch.setattr(Library, "windowed", lambda self, _: whole(self, 0))
    names = failed(correctness.attention(at_once()))
    assert names
    assert all("window" in name for name in names)


@pytest.mark.parametrize(
    ("capability", "absent"), [((9, 0), set()), ((8, 0), {"fa3"}), ((8, 9), {"fa3", "pod"}), ((10, 0), {"fa3", "pod"})]
)
def test_what_a_gpu_has_no_kernels_for_is_told_and_fails_nothing(capability: tuple[int, int], absent: set[str]) -> None:
    findings = list(correctness.attention(rig_of(LateDevice(late=False, capability=capability))))
    assert failed(iter(findings)) == []
    told = [finding for finding in findings if finding.ok is None]
    assert {kernel_of(finding.name) for finding in told} == absent
    assert len(told) == len(SMALL.heads) * len(absent)
    assert all("not tried: " in finding.note and "this GPU has" in finding.note for finding in told)


def test_a_kernel_that_cannot_be_had_is_a_failed_check_and_the_others_are_tried() -> None:
    findings = list(correctness.attention(without(at_once(), "BatchAttention")))
    names = failed(iter(findings))
    assert names == [f"D {dim}, group {group}, holistic: can be used" for _, dim, group in SMALL.heads]
    assert any(finding.ok for finding in findings if kernel_of(finding.name) == "pod")


def test_a_window_hides_the_same_from_the_exact_answer_and_the_yardstick() -> None:
    batch = random_batch(at_once(), TINY, [(7, 30), (1, 12), (3, 3)], 4)
    seen = exact(batch)
    hidden = exact(batch, 5)
    assert not torch.allclose(seen, hidden)
    for window, want in ((0, seen), (5, hidden)):
        assert torch.allclose(torch_answer(batch, window).double(), want, atol=1e-5)


def speeds(rig: Rig) -> dict[str, Finding]:
    ceilings = speed.Ceilings()
    ceilings.matmul_flop_s = 1e6
    return {finding.name: finding for finding in (*speed.prefill(rig, ceilings), *speed.mixed(rig))}


def test_both_kernels_of_pieces_and_four_of_mixed_batches_are_measured() -> None:
    found = speeds(at_once())
    assert all(finding.value is not None for finding in found.values())
    for kernel in ("fa2", "fa3"):
        assert f"D 8, chunk 8192 after 0, {kernel}" in found
    for kernel in ("ragged", "split", "holistic", "pod"):
        measured = found[f"pieces [2048], 128 decode rows at 2048: ragged / {kernel}"]
        assert measured.value == pytest.approx(1.0), "the double's clock says the same of all"


def test_a_kernel_that_cannot_be_had_is_told_and_the_others_are_measured() -> None:
    found = speeds(without(rig_of(LateDevice(late=False, capability=(8, 0))), "BatchAttention"))
    assert "not measured: its kernels are for compute capability 9.0" in found["D 8, fa3"].note
    told = found["pieces [512], 16 decode rows at 2048: holistic"]
    assert told.note == "not measured: RuntimeError: no prebuilt module, and JIT is disabled"
    assert found["pieces [512], 16 decode rows at 2048: ragged / pod"].value == pytest.approx(1.0)


def test_the_ratio_says_how_much_longer_ragged_takes() -> None:
    rig, taken = at_once(), iter([0.004, 0.002, 0.008, 0.001])

    class Uneven:
        def seconds(self, work: object) -> float:
            return next(taken, 1.0)

        def spin(self, seconds: float) -> None: ...

    assert rig.sizes.launches == 1
    rig.stopwatch = Uneven()
    found = list(speed.mixed(rig))[:4]
    assert [finding.value for finding in found] == pytest.approx([1.0, 2.0, 0.5, 4.0])
    assert found[3].note.startswith("1,000 µs")


def test_every_kernel_is_compiled_beforehand_for_each_head_with_a_window_and_without() -> None:
    rig = at_once()
    findings = list(attention_kernels(rig))
    assert all(finding.ok and finding.value is not None for finding in findings)
    assert len(findings) == len(SMALL.heads) * 2 * 5
    used = {call.name for call in rig.kernels.calls if call.name.endswith(".run")}
    assert len(used) == 4
    backends = {given["backend"] for given in rig.kernels.named("BatchPrefillWithPagedKVCacheWrapper.__init__")}
    assert backends == {"fa2", "fa3"}


def test_a_kernel_that_cannot_be_compiled_is_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = without(rig_of(LateDevice(late=False, capability=(8, 9))), "BatchAttention")
    monkeypatch.setattr(cuda, "has_gpu", lambda: True)
    monkeypatch.setattr(cuda, "machine", dict)
    monkeypatch.setattr(program, "_rig", lambda _: rig)
    # Also where it falls back in layers with a window: what it is made of is missing.
    assert program.main(["--compile"]) == len(SMALL.heads) * 2
    said = capsys.readouterr().out
    assert said.count("no prebuilt module, and JIT is disabled") == len(SMALL.heads) * 2
    assert "pod |  |  |  | not tried: it was only ever tried on" in said
    monkeypatch.setattr(program, "_rig", lambda _: None)
    assert program.main(["--compile"]) == 1
