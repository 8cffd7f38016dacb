"""Executor failures in the log. Owns: what is written when a step's computation raised.

The kind of the error and where it came from, never its text: it may quote the batch, and so somebody's prompt. The text
is kept in `LLMEngine.last_failure`, for a debugger.
"""

from __future__ import annotations

import logging
import traceback

_log = logging.getLogger(__name__)


def report_failure(step: int, error: BaseException) -> None:
    """Log that the executor raised `error` in `step`; its requests end with an error, the engine goes on."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames))
    told = (step, type(error).__name__, places or "nowhere")
    _log.error("step %d: the executor failed with %s, from %s", *told, extra={"step": step})
