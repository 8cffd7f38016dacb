"""Cost model. Owns: how long a simulated step takes, and whether anybody ever measured a step like it.

    seconds = sum of coefficient x feature, no coefficient below 0

Features are tokens by kind, context and rows, and the same count of tokens cut at a few sizes, which lets the first
tokens of a batch cost more than the later ones. `forward` is the time of the executor, `host` all else of a step.
A model has seen steps up to some size only; steps beyond are counted, never refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.errors import AdmitscopeError
from telemetry.sim.parts import MOST_STEP_ERROR

DATA_DIR: Final = Path(__file__).parent / "data"
_CUTS: Final = (8, 32, 128, 512)
_SLACK: Final = 1.02


class CostError(AdmitscopeError):
    """A cost model cannot be read or fitted."""


class Shape(NamedTuple):
    """What a step computes.

    prefill_context  positions that prompt tokens attend to, summed over them
    decode_context   tokens of K/V that decode rows read, summed over them
    """

    prefill_tokens: int
    prefill_context: int
    prefill_rows: int
    decode_rows: int
    decode_context: int


#: The features of a shape as a reader is told of them.
SHAPE_WORDS: Final = {
    "prefill_tokens": "prompt tokens in a step",
    "prefill_context": "positions that prompt tokens attend to",
    "prefill_rows": "prompts in a step",
    "decode_rows": "decode rows",
    "decode_context": "K/V tokens that decode rows read",
}

FORWARD: Final = ("step", *Shape._fields, *(f"tokens_to_{cut}" for cut in _CUTS))
HOST: Final = ("step", "prefill_tokens", "prefill_rows", "decode_rows")


def features(shapes: NDArray[np.float64], names: tuple[str, ...]) -> NDArray[np.float64]:
    """[n, len(names)] features of [n, 5] shapes."""
    tokens = shapes[:, 0] + shapes[:, 3]
    columns = {"step": np.ones(len(shapes)), **{name: shapes[:, i] for i, name in enumerate(Shape._fields)}}
    columns |= {f"tokens_to_{cut}": np.minimum(tokens, cut) for cut in _CUTS}
    return np.stack([columns[name] for name in names], axis=1)


class FitError(BaseModel):
    """How far predictions are from steps that the fit did not see: |predicted / measured - 1|.

    bias  sum of predicted over sum of measured, minus 1: what long runs add up to
    """

    model_config = ConfigDict(frozen=True)

    steps: int
    median: float
    p95: float
    bias: float


class CostModel(BaseModel):
    """Coefficients in nanoseconds per unit, and where they come from.

    largest  the largest of each feature that was measured; none: the model was not fitted to measurements
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    source: str
    forward: dict[str, float]
    host: dict[str, float]
    largest: dict[str, float] = Field(default_factory=dict)
    fitted_steps: int = 0
    held_out: FitError | None = None

    @model_validator(mode="after")
    def _known_features(self) -> CostModel:
        for part, known in (("forward", FORWARD), ("host", HOST)):
            for name, value in getattr(self, part).items():
                if name not in known:
                    raise ValueError(f"{part}.{name}: no such feature; there are {', '.join(known)}")
                if value < 0:
                    raise ValueError(f"{part}.{name} is {value}; at least 0 is needed")
        return self

    @property
    def is_measured(self) -> bool:
        return bool(self.largest)

    @property
    def misfit(self) -> str:
        """Why its times are not to be believed; "" where it fits, or was not fitted."""
        held = self.held_out
        if held is None or held.median <= MOST_STEP_ERROR:
            return ""
        return (
            f"the cost model does not fit (median error of a step {held.median:.0%} on {held.steps:,} steps that it "
            f"did not see; at most {MOST_STEP_ERROR:.0%} is believed)"
        )


class Cost(Protocol):
    """Times of a step."""

    def of(self, shape: Shape) -> tuple[int, int]:
        """(host, forward) in nanoseconds."""
        ...


class Estimator:
    """A cost model at work. Counts what it was asked beyond its measurements: steps, time, and by which feature."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        forward = model.forward
        self._step = forward.get("step", 0.0)
        self._by_shape = tuple(forward.get(name, 0.0) for name in Shape._fields)
        self._cuts = tuple((cut, forward[f"tokens_to_{cut}"]) for cut in _CUTS if forward.get(f"tokens_to_{cut}"))
        self._host = tuple(model.host.get(name, 0.0) for name in HOST)
        self._limits = tuple(model.largest.get(name, float("inf")) * _SLACK for name in Shape._fields)
        self.steps = 0
        self.outside = 0
        self.outside_ns = 0
        self.total_ns = 0
        self.outside_by: Counter[str] = Counter()
        self.asked: dict[str, int] = dict.fromkeys(Shape._fields, 0)

    def of(self, shape: Shape) -> tuple[int, int]:
        """(host, forward) in nanoseconds, at least 1 in sum."""
        tokens, _, rows, decodes, _ = shape
        ns = self._step
        for coefficient, amount in zip(self._by_shape, shape, strict=True):
            ns += coefficient * amount
        for cut, coefficient in self._cuts:
            ns += coefficient * min(tokens + decodes, cut)
        step, by_token, by_row, by_decode = self._host
        host = round(step + by_token * tokens + by_row * rows + by_decode * decodes)
        forward = max(round(ns), 1)
        self._count(shape, host + forward)
        return host, forward

    def _count(self, shape: Shape, ns: int) -> None:
        self.steps += 1
        self.total_ns += ns
        beyond = False
        for name, amount, limit in zip(Shape._fields, shape, self._limits, strict=True):
            if amount > limit:
                beyond = True
                self.outside_by[name] += 1
                self.asked[name] = max(self.asked[name], amount)
        if beyond:
            self.outside += 1
            self.outside_ns += ns


def presets() -> list[str]:
    """Names of the models that come with this program."""
    return sorted(file.name[len("cost-") : -len(".json")] for file in DATA_DIR.glob("cost-*.json"))


def load_cost(name: str) -> CostModel:
    """A preset by name, or a file. Raises CostError."""
    file = DATA_DIR / f"cost-{name}.json" if name in presets() else Path(name)
    try:
        return CostModel.model_validate_json(file.read_bytes())
    except OSError as error:
        raise CostError(f"--cost {name}: neither a preset ({', '.join(presets())}) nor a file: {error}") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise CostError(f"{file}: {where}: {fault['msg']}" if where else f"{file}: {fault['msg']}") from error


def save_cost(model: CostModel, file: Path) -> None:
    """Write what `load_cost` reads. Raises CostError when the file cannot be written."""
    try:
        file.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CostError(f"{file}: {error.strerror}") from error


def most_outside(estimator: Estimator) -> str | None:
    """The feature that most of the steps beyond the measurements exceed; None when there were none."""
    by: Mapping[str, int] = estimator.outside_by
    return max(by, key=by.__getitem__) if by else None


def outside_words(estimator: Estimator) -> str:
    """One sentence about steps beyond the measurements; "" when there were none."""
    worst = most_outside(estimator)
    if worst is None:
        return ""
    share = estimator.outside_ns / max(estimator.total_ns, 1)
    return (
        f"{estimator.outside:,} of {estimator.steps:,} steps ({share:.0%} of the time) are beyond "
        f"what the cost model was fitted on; most of them by "
        f"{SHAPE_WORDS[worst]}: up to {estimator.asked[worst]:,}, fitted up to {estimator.model.largest[worst]:,.0f}"
    )
