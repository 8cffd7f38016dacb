"""Tune. Owns: a search over configurations of one workload, and what its best is worth.

Baseline and candidates run under the same simulator. The gain of the best is stated with the interval of resampled
requests, the part of it that is expected to be luck, and the simulator's own error where the run was recorded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from telemetry.settings import UsageError
from telemetry.sim.bootstrap import Gaps, Values, draws
from telemetry.sim.commands import SimCommand, TuneCommand
from telemetry.sim.journal_workload import JournalWorkload
from telemetry.sim.measure import Served
from telemetry.sim.objectives import MEASURES, THROUGHPUT, gain, limits_of, objective_of
from telemetry.sim.overrides import changed, pages_of, with_pages
from telemetry.sim.parts import digits
from telemetry.sim.progress import Meter
from telemetry.sim.results import cost_used
from telemetry.sim.run import Plan, arrivals_of, gaps_of, plan_of
from telemetry.sim.search import Place, Search, Tried
from telemetry.sim.space import space_of
from telemetry.sim.trial import OutOfTime, Trial
from telemetry.sim.tune_result import Candidate, TuneResult, Verdict
from telemetry.sim.tune_words import command_of, sentence_of, stopped, told, verdict_of
from telemetry.sim.whatif import recorded_run
from telemetry.sim.whatif_figures import Paired, checks_of, ended_of, is_compared, with_errors
from telemetry.sim.whatif_result import Compared, ModelCheck
from telemetry.sim.workload import Held, Workload

#: Draws behind the estimate of luck: each looks at every configuration of the short list.
_LUCK_DRAWS: Final = 200


class Bench:
    """Where trials run: the baseline's plan, and what all of them share. Counts requests for the progress bar."""

    def __init__(self, command: SimCommand, plan: Plan, progress: Meter, *, until_s: float, version: str) -> None:
        self.plan = plan
        self.base: Trial | None = None
        self._command = command
        self._progress = progress
        self._until_s = until_s
        self._version = version
        self._base_sections = plan.config.model_dump(mode="json", include={"scheduler", "cache"})
        self._done = 0

    def try_one(self, number: int, place: Place, settings: dict[str, str]) -> Tried:
        """One configuration of the search; the first is the baseline, which is checked and kept. Raises OutOfTime."""
        try:
            plan = self.planned(settings)
        except UsageError as error:
            return Tried(number, place, settings, {}, 0.0, 0, None, why_not=str(error).partition("\n")[0])
        trial = self._run(plan, is_checked=number == 0, until_s=self._until_s)
        if number == 0:
            self.base = trial
        return Tried(
            number, place, settings, trial.figures(), trial.share_outside, trial.loop.refused, served=trial.served
        )

    def again(self, settings: dict[str, str]) -> Trial:
        """The same once more, to its end, with the laws judged."""
        return self._run(self.planned(settings), is_checked=True, until_s=float("inf"))

    def planned(self, settings: Mapping[str, str]) -> Plan:
        """The baseline's plan with `settings`. Raises UsageError where they contradict each other."""
        if not settings:
            return self.plan
        plan = self.plan
        config = changed(self._base_sections, settings)
        pages = pages_of(config, was=plan.config, was_pages=plan.num_pages, settings=settings)
        return replace(plan, config=with_pages(config, pages), num_pages=pages)

    def _run(self, plan: Plan, *, is_checked: bool, until_s: float) -> Trial:
        arrivals = arrivals_of(self._command, plan.workload)
        trial = Trial(plan, arrivals, cost=plan.cost, is_checked=is_checked, version=self._version)
        before = self._done
        trial.run(lambda ended: self._progress.tell(before + ended), until_s=until_s)
        self._done = before + plan.workload.total()
        return trial


class Stopped(KeyboardInterrupt):
    """Whoever waited had enough; says what had been tried."""


def tune(command: TuneCommand, progress: Meter, *, version: str = "") -> TuneResult:
    """The whole search. Raises UsageError, TraceError, JournalError or CostError; Stopped at an interrupt."""
    began = time.monotonic()
    objective, limits = objective_of(command.objective), limits_of(command.at_most)
    simulation = command.simulation()
    progress.phase("reading", 0)
    plan = plan_of(simulation)
    happened = None if plan.journal is None else recorded_run(plan.journal)[0]
    plan.known = None if happened is None else ended_of(happened)
    space = space_of(command.vary, plan.config, plan.cost.largest)
    source = plan.workload
    plan.workload = Held(source)
    if not plan.workload.total():
        raise UsageError(f"{command.source}: no request is in it; there is nothing to tune")
    bench = Bench(simulation, plan, progress, until_s=began + command.timeout_s, version=version)
    search = Search(space, bench.try_one, objective=objective, limits=limits, trials=command.trials, seed=command.seed)
    progress.phase("trying", plan.workload.total() * min(command.trials, space.size))
    try:
        search.run()
        searched = len(search.tried)
        best = search.simpler()
    except OutOfTime:
        raise UsageError(
            f"--timeout-s {command.timeout_s:g} was over before the baseline was simulated: allow more, or try fewer "
            "requests with --limit"
        ) from None
    except KeyboardInterrupt:
        raise Stopped(stopped(search)) from None
    base = bench.base
    if base is None:
        raise UsageError(f"the baseline cannot be simulated: {search.base.why_not}")
    progress.phase("comparing", 0)
    notes = [*space.notes, *plan.notes, *(gaps_of(source) if isinstance(source, JournalWorkload) else [])]
    if search.ended_by == "time":
        notes.append(f"--timeout-s {command.timeout_s:g} ended the search: another run may try more, and say otherwise")
    after = None if best is search.base else bench.again(best.settings)
    checks = () if happened is None else _checks(command, happened, base, after)
    answer = _Answer(command, search, base, best, after, checks, plan.cost.misfit)
    return answer.result(plan.workload, tuple(notes), began, undone=len(search.tried) - searched)


def _checks(
    command: TuneCommand, happened: Mapping[str, Served], base: Trial, after: Trial | None
) -> tuple[ModelCheck, ...]:
    """The recorded run beside the baseline, where the baseline is that run, and all of it."""
    is_recorded = command.rate is None and command.concurrency is None and command.rate_scale == 1.0 and not command.set
    if not is_recorded or command.limit is not None:
        return ()
    return checks_of(happened, base.served, None if after is None else after.served)[0]


class _Answer:
    """What is said of the best one. `after`: its own run; None when nothing is better than the baseline."""

    def __init__(
        self,
        command: TuneCommand,
        search: Search,
        base: Trial,
        best: Tried,
        after: Trial | None,
        checks: tuple[ModelCheck, ...],
        misfit: str,
    ) -> None:
        self.misfit = misfit
        self.search = search
        self.base = base
        self.best = best
        self.after = after
        self.checks = checks
        self.objective = search.objective
        self.seed, self.resamples = command.seed, command.resamples
        self.compared: tuple[Compared, ...] = ()
        if after is not None:
            paired = Paired(base.served, after.served)
            rows = paired.compared(base, after, resamples=self.resamples, seed=self.seed)
            self.compared = with_errors(rows, checks)
        self.row = next((one for one in self.compared if one.name == told(self.objective)), None)

    def result(self, workload: Workload, notes: tuple[str, ...], began: float, *, undone: int) -> TuneResult:
        """All of it. `undone`: how many were tried only to see which changes can be left out."""
        search, best, row, objective = self.search, self.best, self.row, self.objective
        dimensions, baseline = search.space.dimensions, search.base.figures
        verdict: Verdict = "unfit" if self.misfit else verdict_of(objective, row)
        is_worth_it = verdict in {"gain", "direction"}
        luck = luck_of(search.shortlist(), search.base, objective, seed=self.seed) if row is not None else None
        was, now = baseline.get(objective), best.figures.get(objective)
        low, high = _spread(objective, row)
        front = search.front()
        return TuneResult(
            workload=workload.name,
            requests=workload.total(),
            objective=objective,
            limits=tuple(words for limit in search.limits if (words := limit.words(baseline))),
            varied={dimension.name: dimension.values for dimension in dimensions},
            base={dimension.name: dimension.values[dimension.base] for dimension in dimensions},
            space=search.space.size,
            tried=len(search.tried),
            tried_to_undo=undone,
            ended_by=search.ended_by,
            seed=self.seed,
            resamples=self.resamples,
            verdict=verdict,
            sentence=sentence_of(
                objective,
                verdict,
                best,
                search,
                self.compared,
                luck=luck,
                is_recorded=bool(self.checks),
                misfit=self.misfit,
            ),
            recommended=best.settings if is_worth_it else {},
            best=best.settings,
            command=command_of(best.settings) if is_worth_it else "",
            gain=None if row is None or was is None or now is None else digits(gain(objective, was, now)),
            gain_low=low,
            gain_high=high,
            luck=digits(luck),
            simulator_error=None if row is None else row.model_error,
            compared=self.compared,
            candidates=tuple(_candidate(one, front) for one in ranked(search)),
            model_checks=self.checks,
            cost=cost_used((self.after or self.base).estimator),
            violations=self.base.violations + (0 if self.after is None else self.after.violations),
            plot=None,
            wall_s=round(time.monotonic() - began, 2),
            notes=notes,
        )


def ranked(search: Search) -> list[Tried]:
    """Everything that was tried, best first; what cannot be recommended last."""
    return sorted(search.tried.values(), key=lambda one: (bool(one.why_not), *search.rank(one)))


def _spread(objective: str, row: Compared | None) -> tuple[float | None, float | None]:
    """The interval of the gain: of a time, which is better when it falls, the difference turned round."""
    if row is None or row.difference.low is None or row.difference.high is None:
        return None, None
    low, high = row.difference.low, row.difference.high
    return (low, high) if objective == THROUGHPUT else (digits(-high), digits(-low))


def _candidate(one: Tried, front: set[Place]) -> Candidate:
    figures = {name: digits(value) for name, value in one.figures.items()}
    return Candidate.model_validate(
        {
            **dict.fromkeys(MEASURES),
            **figures,
            "trial": one.number,
            "settings": one.settings,
            "share_outside": round(one.share_outside, 4),
            "is_on_front": one.place in front,
            "why_not": one.why_not,
        }
    )


def luck_of(shortlist: Sequence[Tried], base: Tried, objective: str, *, seed: int) -> float | None:
    """How much of the best one's gain comes from having been chosen on the requests that it is measured on.

    Requests are drawn anew; in each draw the best of the short list is chosen, and what it gains there is set against
    what the same one gains on all requests. The mean of that is expected luck: at least 0, None for throughput, which a
    run has once. Limits are not judged anew.
    """
    if objective == THROUGHPUT:
        return None
    known = [one for one in shortlist if one.served is not None]
    rids = [rid for rid in base.served or () if all(is_compared((one.served or {}).get(rid)) for one in known)]
    if not rids or len(known) < 2:
        return 0.0
    measures = [_quantiles([(one.served or {})[rid] for rid in rids], objective) for one in known]
    share = float(objective.rpartition("_p")[2]) / 100
    place = known.index(base)
    whole = np.array([measure.quantile(np.ones(len(rids)), share) or 0.0 for measure in measures])
    excess = []
    for weights in draws(len(rids), _LUCK_DRAWS, seed):
        drawn = np.array([measure.quantile(weights, share) or 0.0 for measure in measures])
        chosen = int(np.argmin(drawn))
        excess.append((drawn[place] - drawn[chosen]) - (whole[place] - whole[chosen]))
    return max(float(np.mean(excess)), 0.0)


def _quantiles(served: Sequence[Served], objective: str) -> Values | Gaps:
    if objective.startswith("tbt"):
        return Gaps(served)
    if objective.startswith("ttft"):
        return Values([(one.ttft_ns or 0) / 1e9 for one in served])
    return Values([one.e2e_ns / 1e9 for one in served])
