"""The simulation finds what is broken, makes it small, and leaves evidence that replay and explain can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from engine.llm_engine import LLMEngine, TokenOutput
from telemetry.cli import main as admitscope
from telemetry.replay import replay
from tests.sabotage import cache_faults
from tests.simulation import run
from tests.simulation.evidence import gather
from tests.simulation.generate import scenario_of
from tests.simulation.scenario import Arrive, load
from tests.simulation.simulate import Breaker, Report, simulate
from tests.simulation.world import World

STEPS = 200
Outputs = list[TokenOutput]


def broken_by(fault: Callable[[Any, pytest.MonkeyPatch], None]) -> Breaker:
    """A sabotage as something that breaks each world of a search, and mends it again."""

    @contextmanager
    def breaker(world: World) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            fault(world, patch)
            yield

    return breaker


def first_failing(breaker: Breaker) -> Report:
    reports = (simulate(scenario_of(seed, STEPS), breaker=breaker) for seed in range(40))
    return next(report for report in reports if report.failure is not None)


@pytest.mark.parametrize(
    ("fault", "most_ops", "verdict"),
    [
        (cache_faults.forgotten_unlock, 3, "diverged"),  # a healthy scheduler unlocks where this one did not
        (cache_faults.victim_keeps_lock, 5, "diverged"),
        (cache_faults.row_leaks, 1, "identical"),  # no event tells it: an audit found it
    ],
)
def test_a_sabotaged_engine_is_found_made_small_and_told(
    fault: Callable[[Any, pytest.MonkeyPatch], None],
    most_ops: int,
    verdict: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    breaker = broken_by(fault)
    report = first_failing(breaker)
    assert report.failure is not None
    scenario = scenario_of(report.seed, STEPS)
    evidence = gather(scenario, report.failure, tmp_path / "seed", breaker=breaker, budget_s=15)
    small = evidence.scenario
    assert evidence.failure.what == report.failure.what
    assert len(small.ops) <= most_ops < len(scenario.ops) / 10
    assert small.steps < STEPS / 10
    # The file is the scenario, and it still fails: while the engine is broken, and not otherwise.
    again = simulate(load(evidence.scenario_file), breaker=breaker)
    assert again.failure is not None
    assert again.failure.what == report.failure.what
    assert simulate(load(evidence.scenario_file)).failure is None
    # Evidence: what is printed names commands that work.
    text = (evidence.folder / "failure.txt").read_text("utf-8")
    assert f"--scenario {evidence.scenario_file}" in text
    assert f"admitscope replay {evidence.journal}" in text
    assert evidence.rid is not None
    assert f"admitscope explain {evidence.journal} {evidence.rid}" in text
    assert admitscope(["explain", str(evidence.journal), evidence.rid]) == 0
    assert f"Request {evidence.rid} arrived" in capsys.readouterr().out
    replayed = replay(evidence.journal)
    assert replayed.torn is None
    assert replayed.verdict == verdict
    assert admitscope(["replay", str(evidence.journal)]) == replayed.exit_code


def _one_output(change: Callable[[TokenOutput], Outputs]) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """What a step hands out goes through `change`."""

    def fault(world: World, patch: pytest.MonkeyPatch) -> None:
        original = world.engine.step
        patch.setattr(world.engine, "step", lambda: [out for output in original() for out in change(output)])

    return fault


def _another_token(output: TokenOutput) -> Outputs:
    return [output if output.token_id is None else replace(output, token_id=output.token_id ^ 1)]


def _no_end(output: TokenOutput) -> Outputs:
    return [output if output.finish is None or output.token_id is None else replace(output, finish=None)]


def _two_ends(output: TokenOutput) -> Outputs:
    return [output] if output.finish is None else [output, output]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_another_token, "unsound: tokens"),
        (_no_end, "unsound: unfinished"),
        (_two_ends, "unsound: speaks after its end"),
    ],
)
def test_outputs_are_witnesses_of_their_own(change: Callable[[TokenOutput], Outputs], what: str) -> None:
    """No event tells these: the checker cannot see what a client gets."""
    report = first_failing(broken_by(_one_output(change)))
    assert report.failure is not None
    assert report.failure.what == what


def test_memory_that_is_read_too_early_is_noticed() -> None:
    """The model complains inside the executor, where the engine takes it for a failing step."""

    def forget(world: World, patch: pytest.MonkeyPatch) -> None:
        original = world.model.execute

        def broken(batch: Any) -> Any:
            world.model.poison([int(batch.metadata.kv_indices[0])])
            return original(batch)

        patch.setattr(world.model, "execute", broken)

    report = first_failing(broken_by(forget))
    assert report.failure is not None
    assert report.failure.what == "AssertionError in _check"
    assert "not written, or of another prefix" in report.failure.text


def test_tokens_left_behind_are_noticed() -> None:
    def keep(world: World, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(world.engine.tokens, "drop", lambda _rid: None)

    report = first_failing(broken_by(keep))
    assert report.failure is not None
    assert report.failure.what == "AssertionError in assert_nothing_held"


def test_the_command_says_so_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original = LLMEngine.step
    monkeypatch.setattr(LLMEngine, "step", lambda self: [o for o in original(self) if o.finish is None])
    monkeypatch.setenv("COLUMNS", "300")
    words = ["--seeds", "1", "--first", "2", "--steps", "60", "--jobs", "1", "--out", str(tmp_path)]
    assert run.main(words) == 1
    out = capsys.readouterr().out
    assert "sim: 0 of 1 seeds clean" in out
    assert f"admitscope replay {tmp_path / 'seed-2' / 'run.jsonl'}" in out
    scenario = tmp_path / "seed-2" / "scenario.json"
    assert len([op for op in load(scenario).ops if isinstance(op, Arrive)]) <= 2
    assert run.main(["--scenario", str(scenario)]) == 1
    assert "unsound: " in capsys.readouterr().out
    monkeypatch.undo()
    assert run.main(["--scenario", str(scenario)]) == 0
    assert run.main([*words, "--coverage"]) == 0
    out = capsys.readouterr().out
    assert "sim: 1 of 1 seeds clean" in out
    assert "not seen: " in out
