"""Search. Owns: which configurations of a space are tried, in what order, and which of them is best.

Optuna's TPE suggests three quarters of them, with the three measures of the front (and the objective) as its aims; the
last quarter looks at the neighbours of the best so far. A space that is no larger than the trials is tried whole. The
same seed tries the same ones, in the same order, unless time ends the search.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, Literal

from telemetry.sim.measure import Served
from telemetry.sim.objectives import FRONT, THROUGHPUT, Figures, Limit, dominates, is_better, score
from telemetry.sim.space import Dimension, Space
from telemetry.sim.trial import OutOfTime

if TYPE_CHECKING:
    import optuna

#: Trials by chance before the sampler begins to learn.
_STARTUP: Final = 10
#: Suggestions in a row that were tried already, after which chance says what is next.
_MOST_REPEATS: Final = 10
#: How many of the best keep their requests: a few hundred bytes each.
SHORTLIST: Final = 10
#: More time than this in steps beyond the fit, above the baseline's own, and a time is a guess.
_MOST_OUTSIDE: Final = 0.05
#: A change that brings less than this, as a share, is left out of a recommendation.
_SLACK: Final = 0.005

Place = tuple[int, ...]
EndedBy = Literal["trials", "time", "space"]


@dataclass(slots=True)
class Tried:
    """A configuration that ran. `served` is None again once it left the short list; `why_not` bars a recommendation.

    figures  empty: this combination of settings is refused
    """

    number: int
    place: Place
    settings: dict[str, str]
    figures: Figures
    share_outside: float
    refused: int
    served: dict[str, Served] | None
    why_not: str = ""


#: Runs the configuration with these settings. Raises OutOfTime.
Runner = Callable[[int, Place, dict[str, str]], Tried]


class Search:
    """`run` tries at most `trials` configurations, the baseline first; then `tried` has them in that order."""

    def __init__(
        self, space: Space, runner: Runner, *, objective: str, limits: Sequence[Limit], trials: int, seed: int
    ) -> None:
        self.space = space
        self.objective = objective
        self.limits = limits
        self.tried: dict[Place, Tried] = {}
        self.ended_by: EndedBy = "trials"
        self._runner = runner
        self._trials = trials
        self._seed = seed

    @property
    def base(self) -> Tried:
        return self.tried[tuple(dimension.base for dimension in self.space.dimensions)]

    def best(self) -> Tried:
        """The best that can be recommended; the baseline when nothing is better."""
        better = [one for one in self.tried.values() if not one.why_not and self._is_better(one)]
        return min(better, key=self.rank, default=self.base)

    def run(self) -> None:
        """Try them. What ran before the time was over remains."""
        self._try(tuple(dimension.base for dimension in self.space.dimensions))
        try:
            if self.space.size <= self._trials:
                self._grid()
            else:
                self._suggested()
        except OutOfTime:
            self.ended_by = "time"

    def simpler(self) -> Tried:
        """The best without changes that bring it next to nothing, each undone where that costs at most half a percent.

        May run configurations of its own, one for each change at most; stops early when time is over.
        """
        best = self.best()
        for index, dimension in enumerate(self.space.dimensions):
            if best.place[index] == dimension.base:
                continue
            place = (*best.place[:index], dimension.base, *best.place[index + 1 :])
            try:
                other = self._try(place)
            except OutOfTime:
                self.ended_by = "time"
                return best
            if not other.why_not and self._is_better(other) and self.rank(other)[0] <= self.rank(best)[0] + _SLACK:
                best = other
        return best

    def shortlist(self) -> list[Tried]:
        """The best that can be recommended, whose requests are still known; the baseline is one."""
        base = self.base
        able = [one for one in self.tried.values() if one.served is not None and (not one.why_not or one is base)]
        return sorted(able, key=self.rank)

    def front(self) -> set[Place]:
        """Those that nothing else tried is better than in TTFT p99, TBT p99 and throughput together."""
        able = [one for one in self.tried.values() if one.figures and one.refused <= self.base.refused]
        return {one.place for one in able if not any(dominates(other.figures, one.figures) for other in able)}

    def _grid(self) -> None:
        for place in itertools.product(*(range(len(dimension.values)) for dimension in self.space.dimensions)):
            self._try(place)
        self.ended_by = "space"

    def _suggested(self) -> None:
        sampler = _Sampler(self.space.dimensions, self.objective, self._seed)
        sampler.tell(self.base)
        rng = Random(self._seed)  # noqa: S311 - a draw that can be made again, no secret
        repeats = 0
        while len(self.tried) < self._trials:
            place = self._next_neighbour() if len(self.tried) >= self._trials * 3 // 4 else None
            if place is None:
                place = sampler.ask() if repeats < _MOST_REPEATS else self._untried(rng)
            repeats = repeats + 1 if place in self.tried else 0
            sampler.tell(self._try(place))

    def _untried(self, rng: Random) -> Place:
        """One by chance: there are more than trials."""
        while True:
            place = tuple(rng.randrange(len(dimension.values)) for dimension in self.space.dimensions)
            if place not in self.tried:
                return place

    def _next_neighbour(self) -> Place | None:
        """Beside the best so far and not tried yet; None when all of them were."""
        best = self.best()
        return next((place for place in neighbours(best.place, self.space.dimensions) if place not in self.tried), None)

    def _try(self, place: Place) -> Tried:
        if place in self.tried:
            return self.tried[place]
        settings = settings_at(place, self.space.dimensions)
        one = self._runner(len(self.tried), place, settings)
        self.tried[place] = one
        one.why_not = self._why_not(one)
        self._forget_some()
        return one

    def _why_not(self, one: Tried) -> str:
        base = self.base
        if one is base or not one.figures:
            return one.why_not
        if one.refused > base.refused:
            return f"refuses {one.refused} requests, the baseline {base.refused}"
        if one.share_outside > base.share_outside + _MOST_OUTSIDE:
            return f"{one.share_outside:.0%} of its time is beyond what the cost model was fitted on"
        broken = next((limit for limit in self.limits if not limit.holds(one.figures, base.figures)), None)
        return "" if broken is None else f"exceeds the limit: {broken.words(base.figures)}"

    def _forget_some(self) -> None:
        """Requests of the best few remain, and the baseline's: the others would fill memory."""
        kept = self.shortlist()
        for one in (*kept[SHORTLIST:], *(one for one in self.tried.values() if one.why_not)):
            if one is not self.base:
                one.served = None

    def rank(self, one: Tried) -> tuple[float, int]:
        """Less is better; of equals, the one that was tried first."""
        return score(self.objective, one.figures, self.base.figures), one.number

    def _is_better(self, one: Tried) -> bool:
        """In the objective itself, than the baseline."""
        here, there = one.figures.get(self.objective), self.base.figures.get(self.objective)
        return here is not None and there is not None and is_better(self.objective, here, there)


def settings_at(place: Place, dimensions: Sequence[Dimension]) -> dict[str, str]:
    """What differs from the baseline there."""
    return {
        dimension.name: dimension.values[index]
        for index, dimension in zip(place, dimensions, strict=True)
        if index != dimension.base
    }


def neighbours(place: Place, dimensions: Sequence[Dimension]) -> Iterator[Place]:
    """One setting changed: by a step where values have an order, else to any other value."""
    for index, dimension in enumerate(dimensions):
        here = place[index]
        others = (here - 1, here + 1) if dimension.is_ordered else range(len(dimension.values))
        for other in others:
            if other != here and 0 <= other < len(dimension.values):
                yield (*place[:index], other, *place[index + 1 :])


class _Sampler:
    """Optuna behind places: what was run, suggested by it or not, is told to it."""

    def __init__(self, dimensions: Sequence[Dimension], objective: str, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._aims = FRONT if objective in FRONT else (*FRONT, objective)
        self._dimensions = dimensions
        study = optuna.study.StudyDirection
        directions = [study.MAXIMIZE if aim == THROUGHPUT else study.MINIMIZE for aim in self._aims]
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
        self._study = optuna.create_study(directions=directions, sampler=sampler)
        self._asked: optuna.Trial | None = None
        self._distributions: Mapping[str, optuna.distributions.BaseDistribution] = {
            dimension.name: optuna.distributions.IntDistribution(0, len(dimension.values) - 1)
            if dimension.is_ordered
            else optuna.distributions.CategoricalDistribution(list(range(len(dimension.values))))
            for dimension in dimensions
        }

    def ask(self) -> Place:
        self._asked = self._study.ask(dict(self._distributions))
        return tuple(int(self._asked.params[dimension.name]) for dimension in self._dimensions)

    def tell(self, one: Tried) -> None:
        """The outcome of the last question, or of a configuration that nobody asked for."""
        import optuna

        values = [one.figures.get(aim) or 0.0 for aim in self._aims]
        failed = optuna.trial.TrialState.FAIL
        if self._asked is not None:
            self._study.tell(self._asked, values if one.figures else None, None if one.figures else failed)
            self._asked = None
            return
        if not one.figures:
            return
        params = {dimension.name: index for dimension, index in zip(self._dimensions, one.place, strict=True)}
        self._study.add_trial(
            optuna.trial.create_trial(params=params, distributions=dict(self._distributions), values=values)
        )
