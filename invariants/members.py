"""Members of enumerations under plain names. Owns: nothing but these names.

Laws and listeners compare with them at every event. `RequestState.DECODE` is a look-up through a metaclass, which costs
Python 3.11 ten times what a name of the module costs.
"""

from __future__ import annotations

from typing import Final

from engine.request import Cause, RequestState
from engine.scheduler.plan import StepKind

WAITING: Final = RequestState.WAITING
PREFILL: Final = RequestState.PREFILL
DECODE: Final = RequestState.DECODE
FINISHED: Final = RequestState.FINISHED

ARRIVE: Final = Cause.ARRIVE
ADMIT: Final = Cause.ADMIT
NEXT_CHUNK: Final = Cause.NEXT_CHUNK
FINAL_CHUNK: Final = Cause.FINAL_CHUNK
PREEMPT: Final = Cause.PREEMPT

IDLE_STEP: Final = StepKind.IDLE
EXTEND_STEP: Final = StepKind.EXTEND
MIXED_STEP: Final = StepKind.MIXED
DECODE_STEP: Final = StepKind.DECODE
