"""Cost fit. Owns: recorded steps of a journal, and the cost model that predicts steps it has not seen best.

Non-negative least squares of relative errors: a step of 5 ms and one of 500 ms count alike. Errors are divided by the
prediction, not by the measurement (in a few rounds), or the fit would prefer predictions that are too small.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.events import AnyEvent, RequestTransitioned, StepCompleted, StepPlanned
from engine.request import RequestState
from engine.scheduler.plan import StepKind
from telemetry.sim.cost_model import FORWARD, HOST, CostError, CostModel, FitError, Shape, features

_F64 = NDArray[np.float64]
LEAST_STEPS: Final = 40
MOST_STEPS: Final = 20_000
_HELD_OUT_EVERY: Final = 5
_ROUNDS: Final = 4


class StepSamples:
    """Shapes and times of a journal's steps. Hears its events; keeps at most MOST_STEPS, spread over the whole record.

    host_ns  time of a step outside the executor, up to the start of the next step where that follows at once
    """

    def __init__(self) -> None:
        self._computed: dict[str, int] = {}
        #: Of the steps in flight; more than one where steps overlap.
        self._shapes: dict[int, Shape] = {}
        self._ready_ns = self._applied_ns = 0
        self._open: tuple[Shape, int, int, int] | None = None
        self._rows: list[tuple[float, ...]] = []
        self._every = 1
        self._seen = 0

    def __len__(self) -> int:
        return len(self._rows)

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, StepPlanned):
            self._planned(event)
        elif isinstance(event, StepCompleted):
            self._completed(event)
        elif isinstance(event, RequestTransitioned) and event.target is RequestState.FINISHED:
            self._computed.pop(event.rid, None)

    def table(self) -> tuple[_F64, _F64, _F64]:
        """[n, 5] shapes, [n] forward times, [n] host times in nanoseconds."""
        table = np.array(self._rows, dtype=np.float64).reshape(-1, len(Shape._fields) + 2)
        return table[:, :-2], table[:, -2], table[:, -1]

    def _planned(self, event: StepPlanned) -> None:
        tokens = context = read = 0
        for row in event.prefills:
            tokens += row.extend_len
            context += row.extend_len * row.prefix_len + row.extend_len * (row.extend_len + 1) // 2
            self._computed[row.rid] = row.prefix_len + row.extend_len
        for rid in event.decodes:
            length = self._computed.get(rid, 0) + 1
            self._computed[rid] = length
            read += length
        self._shapes[event.step] = Shape(tokens, context, len(event.prefills), len(event.decodes), read)

    def _completed(self, event: StepCompleted) -> None:
        times, shape = event.times, self._shapes.pop(event.step, None)
        before_ready, self._ready_ns = self._ready_ns, times.ready_ns
        is_beside, self._applied_ns = times.started_ns < self._applied_ns, times.applied_ns
        if self._open is not None:
            before, forward, host, applied = self._open
            gap = times.started_ns - applied
            is_next = event.kind is not StepKind.IDLE and event.num_running > 0
            self._keep(before, forward, host + (gap if is_next and 0 <= gap < forward else 0))
            self._open = None
        if shape is None or event.failed or event.kind is StepKind.IDLE or times.ready_ns <= times.launched_ns:
            return
        forward = times.ready_ns - (max(times.launched_ns, before_ready) if is_beside else times.launched_ns)
        # Planned beside the step before, a step costs of the host's time what the executor waited for it.
        host = times.launched_ns - before_ready if is_beside else times.applied_ns - times.started_ns - forward
        self._open = (shape, forward, max(host, 0), times.applied_ns)

    def _keep(self, shape: Shape, forward: int, host: int) -> None:
        self._seen += 1
        if self._seen % self._every:
            return
        self._rows.append((*shape, forward, host))
        if len(self._rows) >= MOST_STEPS:
            del self._rows[::2]
            self._every *= 2


def fit(samples: StepSamples, *, name: str, source: str) -> CostModel:
    """The model of these steps, with its error on every fifth, which it did not see. Raises CostError."""
    if len(samples) < LEAST_STEPS:
        raise CostError(
            f"{source}: {len(samples)} steps that computed something; at least {LEAST_STEPS} are needed to fit a cost "
            "model. Name one with --cost"
        )
    shapes, forward_ns, host_ns = samples.table()
    seen = np.arange(len(shapes)) % _HELD_OUT_EVERY != _HELD_OUT_EVERY - 1
    forward = _fit(features(shapes[seen], FORWARD), forward_ns[seen])
    host = _fit(features(shapes[seen], HOST), host_ns[seen])
    predicted = features(shapes[~seen], FORWARD) @ forward + features(shapes[~seen], HOST) @ host
    measured = forward_ns[~seen] + host_ns[~seen]
    errors = np.abs(predicted / measured - 1)
    return CostModel(
        name=name,
        source=source,
        forward=_named(FORWARD, forward),
        host=_named(HOST, host),
        largest=dict(zip(Shape._fields, shapes.max(axis=0).tolist(), strict=True)),
        fitted_steps=int(seen.sum()),
        held_out=FitError(
            steps=len(errors),
            median=round(float(np.median(errors)), 4),
            p95=round(float(np.quantile(errors, 0.95)), 4),
            bias=round(float(predicted.sum() / measured.sum() - 1), 4),
        ),
    )


def _named(names: tuple[str, ...], values: _F64) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in zip(names, values.tolist(), strict=True) if value > 0}


def _fit(table: _F64, target: _F64) -> _F64:
    """Coefficients of least relative error, none below 0."""
    floor = max(float(np.median(target)) * 1e-3, 1.0)
    divisor = np.maximum(target, floor)
    coefficients = np.zeros(table.shape[1])
    for _ in range(_ROUNDS):
        coefficients = nnls(table / divisor[:, None], target / divisor)
        divisor = np.maximum(table @ coefficients, floor)
    return coefficients


def nnls(table: _F64, target: _F64) -> _F64:
    """x >= 0 of least |table x - target|², by the active set of Lawson and Hanson.

    Columns are scaled to length 1 first, so that features of very different sizes do not upset the solver.
    """
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1.0
    scaled = table / scale
    gram, right = scaled.T @ scaled, scaled.T @ target
    count = gram.shape[0]
    free = np.zeros(count, dtype=bool)
    found = np.zeros(count)
    for _ in range(10 * count):
        slope = np.where(free, -np.inf, right - gram @ found)
        best = int(np.argmax(slope))
        if free.all() or slope[best] <= 1e-10 * max(float(np.abs(right).max()), 1e-300):
            break
        free[best] = True
        found = _inside(gram, right, free, found)
    answer: _F64 = found / scale
    return answer


def _inside(gram: _F64, right: _F64, free: NDArray[np.bool_], found: _F64) -> _F64:
    """The least squares over the free columns, giving up those that would fall below 0 on the way there."""
    while free.any():
        wanted = np.zeros_like(found)
        wanted[free] = np.linalg.lstsq(gram[np.ix_(free, free)], right[free], rcond=None)[0]
        below = free & (wanted <= 0)
        if not below.any():
            return wanted
        shares = np.where(below, found / np.maximum(found - wanted, 1e-300), np.inf)
        first = int(np.argmin(shares))
        found = found + float(shares[first]) * (wanted - found)
        free[below & (found <= 1e-12)] = False
        free[first] = False
        found[~free] = 0.0
    return np.zeros_like(found)
