"""Scenarios. Owns: what one simulated run is, as a value: a configuration and a list of operations with their steps.

The package stands under `tests` and not in the engine's layers: it drives the engine through its doors, with the stub
model of the tests in the executor's place, and nothing that is shipped needs it.

An operation never names what an earlier one must have brought about ("abort the second running request", not "abort
r17"), so a scenario stays meaningful when others are taken out of it: that is what shrinking does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.config import EngineConfig

Phase = Literal["waiting", "pushed_back", "partly", "running", "in_flight", "just_finished", "unknown"]
PHASES: tuple[Phase, ...] = ("waiting", "pushed_back", "partly", "running", "in_flight", "just_finished", "unknown")


class Op(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """Common head. `at`: the step it comes before, or in which it comes when it happens in flight."""

    at: int


class Arrive(Op, frozen=True, kw_only=True, tag="arrive", omit_defaults=True):
    """A request: `share` tokens of the text that its `family` has in common, then `own` tokens made from `salt`.

    in_flight  it comes while the executor computes
    late_ns    how long before its entry to the engine it was accepted
    """

    rid: str
    family: int = 0
    share: int = 0
    own: int = 1
    salt: int = 0
    max_new: int = 1
    ignore_eos: bool = True
    stops: bool = False
    minimum: int = 0
    priority: int | None = None
    routing_key: str | None = None
    in_flight: bool = False
    late_ns: int = 0


class Abort(Op, frozen=True, kw_only=True, tag="abort", omit_defaults=True):
    """End the request number `pick` (modulo their count) of those in `phase`; nothing when none is.

    twice   whoever asked asks again at once
    """

    phase: Phase
    pick: int = 0
    twice: bool = False


class Expire(Op, frozen=True, kw_only=True, tag="expire"):
    """Whoever has waited this long for a first admission is refused after all."""

    limit_ns: int


class Displace(Op, frozen=True, kw_only=True, tag="displace", omit_defaults=True):
    """`count` less important ones that wait give way to one of `priority`."""

    priority: int | None = None
    count: int = 1


class Fail(Op, frozen=True, kw_only=True, tag="fail", omit_defaults=True):
    """The executor raises, after spoiling this share of the slots it was to write, in percent."""

    spoiled: int = 0


class Miss(Op, frozen=True, kw_only=True, tag="miss", omit_defaults=True):
    """The next `count` allocations miss."""

    count: int = 1


class Slow(Op, frozen=True, kw_only=True, tag="slow"):
    """The executor takes this long for its next batch."""

    ns: int


class Jump(Op, frozen=True, kw_only=True, tag="jump"):
    """The clock moves by `ns` between two steps; below 0 only in a scenario whose clock may fall."""

    ns: int


class Respond(Op, frozen=True, kw_only=True, tag="respond", omit_defaults=True):
    """The HTTP layer reports on the response of the request that ended last."""

    disconnected: bool = False


AnyOp = Arrive | Abort | Expire | Displace | Fail | Miss | Slow | Jump | Respond


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    config       the sections `scheduler` and `cache` of the engine's configuration
    steps        steps in which operations may come; the run then goes on until nothing is left
    step_ns      time between two steps
    tick_ns      time that passes with each look at the clock
    most_waiting an arrival that finds so many waiting stays away: keeps a run's length in proportion to `steps`
    closing      what happens to who is left after the last operation
    clock_falls  some jumps go back, against the promise of a clock; then its law, and no other, must speak
    """

    seed: int
    config: dict[str, dict[str, Any]]
    ops: tuple[AnyOp, ...]
    steps: int
    step_ns: int = 1_000_000
    tick_ns: int = 0
    most_waiting: int = 8
    closing: Literal["drain", "abort"] = "drain"
    clock_falls: bool = False

    def engine_config(self) -> EngineConfig:
        """The configuration; raises pydantic's ValidationError when it contradicts itself."""
        return EngineConfig.model_validate({**self.config, "executor": {"kind": "simulated"}})


def save(scenario: Scenario, path: Path) -> None:
    """Write as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(scenario), indent=1) + b"\n")


def load(path: Path) -> Scenario:
    """Read what `save` wrote; raises msgspec.ValidationError."""
    return msgspec.json.decode(path.read_bytes(), type=Scenario)
