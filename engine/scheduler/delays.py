"""Admission delays. Owns: three small pure strategies that hold prefill back for the sake of decode, off by default.

Prefill delayer      new prompts wait up to N passes while requests decode and fewer than M wait: fuller batches.
Free-row delayer     no new prompt until at least N rows are free: fewer, larger interruptions of decode.
Dynamic chunk        the slice of a step is what a model of past step times says meets a target time.

They decide from values that they are given. Step times come in through completed steps, which are inputs of the core,
so that a replay decides alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from engine.config import SchedulerConfig

#: Steps that a fit looks at, and the least it needs.
HISTORY_STEPS: Final = 64
LEAST_STEPS: Final = 8


class Delay(NamedTuple):
    """New prompts wait: need and have of the test, and the passes delayed so far, this one included."""

    need: int
    have: int
    passes: int


def delay_of(config: SchedulerConfig, *, waiting: int, running: int, free_rows: int, passes: int) -> Delay | None:
    """Whether new prompts wait in this pass; None when they do not. Without decodes nothing is ever held back.

    passes  passes in a row that the prefill delayer held back before this one
    """
    if running == 0 or waiting == 0:
        return None
    if config.min_free_rows is not None and free_rows < config.min_free_rows:
        return Delay(config.min_free_rows, free_rows, passes)
    most, enough = config.prefill_delay_max_passes, config.prefill_delay_until_waiting
    if most is not None and enough is not None and passes < most and waiting < enough:
        return Delay(enough, waiting, passes + 1)
    return None


class StepShape(NamedTuple):
    """What a step computed: query tokens, and context tokens (K/V read, summed over rows)."""

    query_tokens: int
    context_tokens: int


class StepModel(NamedTuple):
    """time = base + per_query x query tokens + per_context x context tokens, nanoseconds."""

    base_ns: float
    per_query_ns: float
    per_context_ns: float

    def predict_ns(self, shape: StepShape) -> float:
        return self.base_ns + self.per_query_ns * shape.query_tokens + self.per_context_ns * shape.context_tokens


class StepHistory:
    """Shapes and times of the last steps."""

    def __init__(self) -> None:
        self._samples: deque[tuple[StepShape, int]] = deque(maxlen=HISTORY_STEPS)

    def add(self, shape: StepShape, spent_ns: int) -> None:
        """One step that computed something. Zero tokens tell nothing and are left out."""
        if shape.query_tokens > 0:
            self._samples.append((shape, spent_ns))

    def __len__(self) -> int:
        return len(self._samples)

    def fit(self) -> StepModel | None:
        """Least squares; None before LEAST_STEPS steps. A coefficient that comes out negative is left out."""
        if len(self._samples) < LEAST_STEPS:
            return None
        times = [float(spent) for _, spent in self._samples]
        queries = [float(shape.query_tokens) for shape, _ in self._samples]
        contexts = [float(shape.context_tokens) for shape, _ in self._samples]
        ones = [1.0] * len(times)
        for columns in ((ones, queries, contexts), (ones, queries)):
            solved = _least_squares(columns, times)
            if solved is not None and min(solved) >= 0 and solved[1] > 0:
                return StepModel(solved[0], solved[1], solved[2] if len(solved) > 2 else 0.0)
        return StepModel(0.0, sum(times) / sum(queries), 0.0)


class ChunkChoice(NamedTuple):
    """The slice of a step in query tokens, decode rows included, and the time it is predicted to take."""

    chunk_tokens: int | None
    predicted_ns: int | None


def choose_chunk(
    model: StepModel | None, *, target_ns: int, most: int, riding: int, context_tokens: int, unit: int
) -> ChunkChoice:
    """The largest slice predicted to meet the target: riding rows plus whole units, at least one unit, at most `most`.

    riding          decode rows that join the step
    context_tokens  K/V that those rows, and the prompt in front, read before the piece
    """
    if model is None:
        return ChunkChoice(most, None)
    left = target_ns - model.predict_ns(StepShape(riding, context_tokens))
    per_token = model.per_query_ns + model.per_context_ns
    # Compared before dividing: a model that knows of no cost per token would ask for an endless slice.
    tokens = 0 if left <= 0 else most if left >= per_token * most else int(left / per_token)
    chunk = min(most, riding + max(tokens // unit, 1) * unit)
    piece = max(chunk - riding, 0)
    return ChunkChoice(chunk, int(model.predict_ns(StepShape(riding + piece, context_tokens + piece))))


def shape_of(prefills: Iterable[tuple[int, int]], decode_contexts: Iterable[int]) -> StepShape:
    """Shape of a step: (prefix, extend) of its prompt pieces, and the context length of each decode row."""
    query = context = 0
    for prefix_len, extend_len in prefills:
        query += extend_len
        context += prefix_len + extend_len
    for length in decode_contexts:
        query += 1
        context += length
    return StepShape(query, context)


def _least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Coefficients by the normal equations, columns scaled to their largest; None when they are not independent."""
    scales = [max(map(abs, column)) or 1.0 for column in columns]
    scaled = [[entry / scale for entry in column] for column, scale in zip(columns, scales, strict=True)]
    size = len(scaled)
    rows = [
        [sum(a * b for a, b in zip(left, right, strict=True)) for right in scaled]
        + [sum(a * v for a, v in zip(left, values, strict=True))]
        for left in scaled
    ]
    for pivot in range(size):
        best = max(range(pivot, size), key=lambda row: abs(rows[row][pivot]))
        rows[pivot], rows[best] = rows[best], rows[pivot]
        if abs(rows[pivot][pivot]) < 1e-9 * len(values):
            return None
        for row in range(size):
            if row != pivot:
                factor = rows[row][pivot] / rows[pivot][pivot]
                rows[row] = [a - factor * b for a, b in zip(rows[row], rows[pivot], strict=True)]
    return [rows[index][size] / rows[index][index] / scales[index] for index in range(size)]
