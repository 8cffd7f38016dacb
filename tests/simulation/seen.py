"""Coverage. Owns: what runs got to see, counted by `kind:value`, and all that there is to be seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from engine.config import EngineConfig, Policy
from engine.events import (
    AdmissionDecided,
    AnyEvent,
    EventSink,
    PagesMoved,
    RequestTransitioned,
    StepCompleted,
    StepPlanned,
)
from engine.request import TRANSITIONS, Cause, RequestState
from engine.scheduler.decision import Guard, Overdraft, Reason, Result
from engine.scheduler.plan import StepKind
from tests.simulation.scenario import PHASES, Scenario

SETTINGS: Final[dict[str, Callable[[EngineConfig], bool]]] = {
    "radix": lambda config: config.cache.enable_radix,
    "chunk": lambda config: config.scheduler.chunked_prefill_size is not None,
    "mixed": lambda config: config.scheduler.enable_mixed_chunk,
    "incremental order": lambda config: config.scheduler.incremental_order,
    "priorities": lambda config: config.scheduler.enable_priority_scheduling,
    "preemption": lambda config: config.scheduler.enable_priority_preemption,
    "starvation limit": lambda config: config.scheduler.starvation_limit_s is not None,
    "overtakes limit": lambda config: config.scheduler.max_overtakes is not None,
    "matching limit": lambda config: config.scheduler.lpm_fallback_threshold is not None,
    "prefill delay": lambda config: config.scheduler.prefill_delay_max_passes is not None,
    "free rows delay": lambda config: config.scheduler.min_free_rows is not None,
    "dynamic chunk": lambda config: config.scheduler.target_step_ms is not None,
    "alignment": lambda config: config.scheduler.truncation_align_size is not None,
}


class Seen:
    """A sink that counts, then hands on."""

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self.counts: Counter[str] = Counter()
        # Keyed by the values themselves: a string a step and event would cost more than all the rest here.
        self._raw: Counter[tuple[object, ...]] = Counter()

    def emit(self, event: AnyEvent) -> None:
        raw = self._raw
        match event:
            case PagesMoved():
                raw["page", event.cause, event.source] += 1
            case AdmissionDecided():
                raw["reason", event.reason] += 1
                raw["result", event.result] += 1
                for overdraft in event.overdrafts:
                    raw["overdraft", overdraft] += 1
            case RequestTransitioned():
                raw["transition", event.source or "", event.target, event.cause] += 1
            case StepPlanned():
                raw["step", event.kind] += 1
                for guard in event.guards:
                    raw["guard", guard] += 1
                if event.pass_end is not None:
                    raw["pass", event.pass_end.stop, event.pass_end.stopped_by] += 1
                    raw["reason", event.pass_end.stopped_by] += 1
            case StepCompleted():
                if event.failed:
                    raw["failed", event.kind] += 1
            case _:
                pass
        self._sink.emit(event)

    def count(self, kind: str, value: str) -> None:
        """Something that no event tells."""
        self.counts[f"{kind}:{value}"] += 1

    def settings(self, scenario: Scenario) -> None:
        """The choices of the configuration."""
        config = scenario.engine_config()
        self.count("policy", f"{config.scheduler.schedule_policy.value}/{config.scheduler.kv_accounting}")
        self.count("page size", str(config.cache.page_size))
        for name, is_on in SETTINGS.items():
            self.count("setting", f"{name} {'on' if is_on(config) else 'off'}")
        self.count("setting", f"falling clock {'on' if scenario.clock_falls else 'off'}")

    def result(self) -> Counter[str]:
        """Everything so far."""
        for (kind, *values), count in self._raw.items():
            self.counts[f"{kind}:{'/'.join(map(str, values))}"] += count
        self._raw.clear()
        return self.counts


def _all() -> frozenset[str]:
    """Whatever a run may see that has a closed list."""
    keys = {f"reason:{reason}" for reason in Reason}
    keys |= {f"result:{result}" for result in Result}
    keys |= {f"guard:{guard}" for guard in Guard}
    keys |= {f"overdraft:{overdraft}" for overdraft in Overdraft}
    keys |= {f"step:{kind}" for kind in StepKind}
    keys |= {f"failed:{kind}" for kind in StepKind if kind is not StepKind.IDLE}
    keys |= {f"transition:/{RequestState.WAITING}/{Cause.ARRIVE}"}
    keys |= {f"transition:{a}/{b}/{cause}" for (a, b), causes in TRANSITIONS.items() for cause in causes}
    keys |= {f"abort:{phase}" for phase in (*PHASES, "in_flight/partly", "twice")}
    keys |= {f"policy:{policy.value}/{accounting}" for policy in Policy for accounting in ("reference", "exact")}
    keys |= {f"page size:{size}" for size in (1, 2, 16, 64)}
    keys |= {f"setting:{name} {state}" for name in (*SETTINGS, "falling clock") for state in ("on", "off")}
    keys |= {"miss:prefill", "miss:decode", "refused:invalid", "refused:never_fits"}
    keys |= {"id:again", "id:still live", "arrival:in flight", "arrival:stayed away", "engine:idle", "clock:back"}
    keys |= {"end:refused/queue_timeout", "end:refused/displaced"}
    keys |= {"clock:on", "executor:slow", "end:stop/eos", "end:stop/stop_token", "end:length/", "end:abort/"}
    keys |= {"end:length/kv_pool_exhausted", "end:error/executor_failed"}
    return frozenset(keys)


ALL: Final = _all()

#: What no engine can be brought to, with the reason.
_FITS_ALONE: Final = (
    "intake takes no request that the empty pool cannot hold to its end, and who is alone with guards on gets all of it"
)
_VICTIMS_DECODE: Final = "who is pushed out of a step is a running request, and those decode"
UNREACHABLE: Final[dict[str, str]] = {
    "guard:kv_pool_exhausted": _FITS_ALONE,
    "transition:decode/finished/kv_pool_exhausted": _FITS_ALONE,
    "transition:prefill/finished/kv_pool_exhausted": _FITS_ALONE,
    "transition:prefill/waiting/retract": _VICTIMS_DECODE,
    "transition:prefill/waiting/preempt": _VICTIMS_DECODE,
    "transition:waiting/finished/never_fits": "refused at the door, so that nothing arrives",
    "transition:waiting/finished/error": "a failing executor ends the members of its step only",
    "reason:never_fits": "refused at the door, so that no pass sees it",
    "reason:preempted_for": "told by the victim's transition, not by a decision",
    "reason:shares_cold_prefix": "told by the order of the queue, not by a decision",
}


def not_seen(counts: Counter[str]) -> list[str]:
    """What is in ALL, can be reached, and was not seen."""
    return sorted(key for key in ALL if not counts[key] and key not in UNREACHABLE)
