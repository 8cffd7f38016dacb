"""Scenarios by seed. Owns: what comes when — calm and bursts, gaps, floods of aborts, faults, storms of retractions."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from tests.simulation.configs import Theme, draw_config, theme_of
from tests.simulation.scenario import (
    PHASES,
    Abort,
    AnyOp,
    Arrive,
    Displace,
    Expire,
    Fail,
    Jump,
    Miss,
    Respond,
    Scenario,
    Slow,
)

_SECOND = 1_000_000_000


class Episode(NamedTuple):
    """Some steps of one kind. Rates are expected operations a step."""

    arrivals: float
    aborts: float = 0.01
    faults: float = 0.0
    misses: float = 0.0
    jumps: float = 0.0


_EPISODES = (
    (5, Episode(0.3)),
    (3, Episode(0.9)),
    (2, Episode(0.0)),
    (2, Episode(0.6, aborts=0.5)),
    (1, Episode(0.5, faults=0.15)),
    (1, Episode(0.5, misses=0.3)),
    (1, Episode(0.3, jumps=0.2)),
    (1, Episode(0.8, aborts=0.2, faults=0.05, misses=0.1, jumps=0.05)),
)


def scenario_of(seed: int, steps: int) -> Scenario:
    """The scenario of a seed; the same in every process."""
    rng = Random(seed)
    config = draw_config(rng, seed)
    falls = rng.random() < 0.12
    page, chunk = config["cache"]["page_size"], config["scheduler"]["chunked_prefill_size"]
    writer = _Writer(rng, theme_of(seed), page * config["cache"]["num_pages"], chunk, falls=falls)
    step = 0
    while step < steps:
        episode = rng.choices([one for _, one in _EPISODES], [weight for weight, _ in _EPISODES])[0]
        end = min(steps, step + rng.randint(4, 60))
        if episode.arrivals and rng.random() < 0.3:
            writer.burst(step)
        for at in range(step, end):
            writer.step(at, episode)
        step = end
    return Scenario(
        seed=seed,
        config=config,
        ops=tuple(writer.ops),
        steps=steps,
        step_ns=rng.choice([0, 1_000, 1_000_000, 1_000_000, 30_000_000]),
        tick_ns=rng.choice([0, 700, 700]),
        most_waiting=96 if theme_of(seed) == "crowd" else rng.choice([2, 6, 6, 16]),
        closing=rng.choice(["drain", "drain", "drain", "abort"]),
        clock_falls=falls,
    )


class _Writer:
    """Writes operations. `pool`: tokens of the whole pool, the measure of sizes; `chunk`: of those without a tree."""

    def __init__(self, rng: Random, theme: Theme, pool: int, chunk: int | None, *, falls: bool) -> None:
        self._rng = rng
        self._theme = theme
        self._pool = pool
        self._chunk = chunk or pool
        self._falls = falls
        self._serial = 0
        self._size = rng.choice(["small", "mixed", "mixed", "large", "storm"])
        self.ops: list[AnyOp] = []

    def burst(self, at: int) -> None:
        for _ in range(self._rng.randint(20, 60) if self._theme == "crowd" else self._rng.randint(3, 12)):
            self._arrive(at)

    def step(self, at: int, episode: Episode) -> None:
        rng = self._rng
        for _ in range(self._times(episode.arrivals)):
            self._arrive(at)
        for _ in range(self._times(episode.aborts)):
            self.ops.append(Abort(at=at, phase=rng.choice(PHASES), pick=rng.randrange(8), twice=rng.random() < 0.1))
            if rng.random() < 0.1:
                self.ops.append(Expire(at=at, limit_ns=rng.choice([0, 10_000_000, _SECOND])))
            if rng.random() < 0.2:
                self.ops.append(Displace(at=at, priority=rng.choice([0, 3, 9]), count=rng.choice([1, 1, 2])))
        if rng.random() < episode.faults:
            self.ops.append(Fail(at=at, spoiled=rng.choice([0, 50, 100])))
        if rng.random() < episode.misses:
            self.ops.append(Miss(at=at, count=rng.choice([1, 1, 2, 5])))
        if rng.random() < max(episode.jumps, 0.03 if self._falls else 0.0):
            self.ops.append(Jump(at=at, ns=self._jump()))
        if rng.random() < 0.02:
            self.ops.append(Slow(at=at, ns=rng.choice([1_000, 5_000_000, 10 * _SECOND])))
        if rng.random() < 0.02:
            self.ops.append(Respond(at=at, disconnected=rng.random() < 0.3))

    def _times(self, rate: float) -> int:
        whole = int(rate)
        return whole + (self._rng.random() < rate - whole)

    def _jump(self) -> int:
        rng = self._rng
        if self._falls and rng.random() < 0.4:
            return -rng.choice([1, 1_000_000, 3_600 * _SECOND])
        return rng.choice([1, 40_000_000, 5 * _SECOND, 86_400 * _SECOND])

    def _arrive(self, at: int) -> None:
        rng = self._rng
        self._serial += 1
        # Sometimes a client sends an id again: of a request long gone, or of one that still lives.
        number = max(1, self._serial - rng.randint(1, 30)) if rng.random() < 0.08 else self._serial
        share, own, max_new = self._sizes()
        self.ops.append(
            Arrive(
                at=at,
                rid=f"r{number}",
                family=rng.randrange(3),
                share=share,
                own=own,
                salt=rng.randrange(3) if rng.random() < 0.25 else 3 + self._serial,
                max_new=max_new,
                ignore_eos=rng.random() < 0.6,
                stops=rng.random() < 0.2,
                minimum=rng.choice([0, 0, 0, 5]),
                priority=rng.choice([None, 0, 1, 5, 9]),
                routing_key=rng.choice([None, None, "a", "b"]),
                in_flight=rng.random() < 0.15,
                late_ns=rng.choice([0, 0, 0, 2_000_000]),
            )
        )

    def _sizes(self) -> tuple[int, int, int]:
        """Tokens: shared, own, and asked for."""
        rng, pool = self._rng, self._pool
        kind = rng.random()
        if kind < 0.05:
            return 0, 1, rng.choice([1, 2, pool])
        if kind < 0.08:  # as long as the pool, or a little off
            return 0, max(1, pool + rng.choice([-2, -1, 0, 1]) - rng.choice([0, 1, 64])), 1
        if self._theme == "squeezed":  # a long prompt with a short answer, or the reverse
            if rng.random() < 0.4:
                return 0, rng.randint(50, 80) * pool // 100, rng.choice([1, 3])
            return 0, rng.randint(1, 1 + pool // 20), rng.randint(15, 50) * pool // 100
        if self._theme == "no tree":  # pieces around a slice; now and then nearly all of the pool
            slices = rng.choice([1, 2, 3, 4, 6]) * self._chunk // 4 + rng.randint(-1, 1)
            own = slices if rng.random() < 0.6 else rng.randint(60, 95) * pool // 100
            return 0, max(1, own), rng.randint(1, pool // 3)
        if self._theme == "crowd":
            share, own = rng.choice([0, 4, 4, 8]) * pool // 100, rng.randint(0, pool // 40) + rng.randint(0, 2)
            return share, own, rng.randint(1, 1 + pool // 25)
        small, large = {"small": (10, 15), "mixed": (35, 40), "large": (70, 30), "storm": (12, 12)}[self._size]
        share = rng.choice([0, small // 3, small]) * pool // 100
        own = rng.randint(0, large) * pool // 100 + rng.randint(0, 2)
        if self._size == "storm":  # little to begin with, much to say: running requests push each other out
            return share, own, rng.choice([20, 40, 60]) * pool // 100 + 1
        return share, own, max(1, rng.choice([0, 1, 4, 10, 20, 60]) * pool // 100)
