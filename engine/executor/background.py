"""BackgroundExecutor. Owns: an executor that overlaps, made of one that does not: its batches are done on one thread.

For the simulated executor, which waits as a GPU does, and for tests of overlapping with a real model on a CPU.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from engine.executor.base import Executor, ExecutorInfo, ForwardBatch, StepResult


class BackgroundExecutor:
    """Does the batches of `inner` in the order of their launches, on one thread of its own."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="admitscope-executor")
        self._launched: deque[Future[StepResult]] = deque()
        #: Tokens of the last batch, in the order of its sampling; only the thread looks at them.
        self._last: tuple[int, ...] = ()

    def info(self) -> ExecutorInfo:
        return self._inner.info()

    def execute(self, batch: ForwardBatch) -> StepResult:
        """The batch at once; nothing may be in flight."""
        self.launch(batch)
        return self.collect()

    def allows_next(self, batch: ForwardBatch) -> bool:  # noqa: ARG002 - protocol
        """Always: the thread takes tokens over by itself."""
        return True

    def launch(self, batch: ForwardBatch) -> None:
        self._launched.append(self._thread.submit(self._do, batch))

    def collect(self) -> StepResult:
        return self._launched.popleft().result()

    def close(self) -> None:
        """Waits for what was launched."""
        self._thread.shutdown()
        self._inner.close()

    def _do(self, batch: ForwardBatch) -> StepResult:
        last, self._last = self._last, ()
        result = self._inner.execute(with_carried(batch, last))
        self._last = tuple(token.token_id for token in result.tokens)
        return result


def with_carried(batch: ForwardBatch, tokens: tuple[int, ...]) -> ForwardBatch:
    """The batch with the tokens that it takes over from the one before, whose sampling brought `tokens`.

    When that one failed there are none: rows that wait for one belong to requests that ended with it, and get 0.
    """
    if not batch.carried:
        return batch
    token_ids = batch.token_ids.copy()
    for row, place in batch.carried:
        token_ids[row] = tokens[place] if tokens else 0
    return replace(batch, token_ids=token_ids, carried=())
