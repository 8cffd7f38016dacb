"""GPU memory. Owns: how many pages of K/V a GPU holds beside weights and the largest step, and the words for too few.

What a step takes follows from kernels and libraries, so it is measured: the largest step that the scheduler can plan is
run once over a small pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.attention.device import DeviceMemory
from engine.config import EngineConfig
from engine.errors import ConfigError

#: Tokens that a request of the warm-up's small steps reaches at most.
WARM_UP_TOKENS: Final = 6
_MIB: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LargestStep:
    """What one step holds at most: `prompt_rows` tokens of prompts, and `decode_rows` requests that decode."""

    prompt_rows: int
    decode_rows: int

    def prompts(self, context: int) -> list[int]:
        """Lengths of prompts of at most `context` tokens that make up `prompt_rows`."""
        whole, rest = divmod(self.prompt_rows, context)
        return [context] * whole + [rest] * bool(rest)

    def pages(self, context: int, page_size: int) -> int:
        """Pages that all of it needs, each decode row with `WARM_UP_TOKENS` tokens, and one more such request."""
        prompts = sum(-(-length // page_size) for length in self.prompts(context))
        return prompts + (self.decode_rows + 1) * -(-WARM_UP_TOKENS // page_size)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up showed, in bytes.

    working   at most allocated during the largest step, beyond what stays
    graphs    held by captured graphs
    """

    step: LargestStep
    working: int
    graphs: int


def largest_step(config: EngineConfig, context: int) -> LargestStep:
    """The largest step that the scheduler can plan. Without chunks one prompt is computed whole, however long."""
    scheduler = config.scheduler
    if scheduler.chunked_prefill_size is None:
        rows = max(scheduler.max_prefill_tokens, context)
    else:
        rows = scheduler.chunked_prefill_size
    return LargestStep(rows, scheduler.max_running_requests)


def fitting_pages(memory: DeviceMemory, warm_up: WarmUp, *, share: float, page_bytes: int, spare_pages: int) -> int:
    """Pages that fit into `share` of the device. `memory` is measured with the weights on it and no K/V.

    Raises ConfigError, with all the figures, where fewer than 2 fit.
    """
    allowed = int(memory.total * share)
    taken = memory.total - memory.free
    left = allowed - taken - warm_up.working - warm_up.graphs
    pages = left // page_bytes - spare_pages
    if pages < 2:
        raise ConfigError(
            f"executor.gpu_memory_share={share} of {_mib(memory.total)} is {_mib(allowed)}; weights and what else is "
            f"on the device take {_mib(taken)}, {_step_words(warm_up)}: that leaves {_mib(left)} for K/V, where 2 "
            f"pages of {_mib(page_bytes)} are needed. {ADVICE}"
        )
    return pages


#: What to do about too little memory.
ADVICE: Final = (
    "Lower scheduler.chunked_prefill_size or scheduler.max_running_requests, raise executor.gpu_memory_share, free the "
    "device of other programs, or take a smaller model"
)


def out_of_memory(doing: str, memory: DeviceMemory) -> str:
    """Words for an allocation that the device refused, while `doing` something at the start."""
    others = memory.total - memory.free - memory.allocated
    return (
        f"executor.device=cuda: out of memory while {doing}. The device has {_mib(memory.total)}: {_mib(memory.free)} "
        f"free, {_mib(memory.allocated)} in tensors of this program (at most {_mib(memory.peak)}), {_mib(others)} in "
        f"other programs and in libraries. {ADVICE}"
    )


def _step_words(warm_up: WarmUp) -> str:
    step = warm_up.step
    words = (
        f"a step of {step.prompt_rows} prompt tokens and {step.decode_rows} decode rows another {_mib(warm_up.working)}"
    )
    return f"{words}, graphs {_mib(warm_up.graphs)}" if warm_up.graphs else words


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB" if abs(size) < 10 * _MIB else f"{size / _MIB:,.0f} MiB"
