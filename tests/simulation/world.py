"""The world around one engine. Owns: playing operations on a whole engine, and all that must hold of what comes out.

Three witnesses look at every step: the invariant checker (events, and snapshots), the model (memory that is read), and
this file (outputs: the right token, one end, nothing after it, and nothing held when all is over).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from engine.config import ExecutorConfig
from engine.errors import RefusalCause, RequestRefused
from engine.events import AnyEvent, EventSink, FanOut, NullSink
from engine.llm_engine import EngineRequest, LLMEngine, TokenOutput
from engine.request import Cause, FinishReason, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduler.scheduler import Scheduler
from invariants import InvariantChecker
from telemetry.folding import EventHash
from tests.engine.stub_model import LateModel, StubFailure, assert_nothing_held, expected_tokens
from tests.simulation.model import Poisoner, SimClock, SimModel
from tests.simulation.scenario import (
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
from tests.simulation.seen import Seen

#: Laws that speak, and are right to, when the clock falls. INV-REQ-03: who waited longest is then not who came first.
CLOCK_LAWS: Final = frozenset({"INV-STEP-02", "INV-TIME-01", "INV-REQ-03"})
STOPS: Final = (40, 41, 42)


class Unsound(AssertionError):
    """What came out is not what should have. `what` names the fault whatever the numbers."""

    def __init__(self, what: str, detail: str, rid: str | None = None) -> None:
        super().__init__(f"{what}: {detail}" if detail else what)
        self.what = what
        self.rid = rid


@dataclass(slots=True)
class _Life:
    """One accepted request that has not ended.

    limit   the engine's clamp of its output
    asked   the end that somebody asked for
    """

    request: EngineRequest
    limit: int
    tokens: list[int] = field(default_factory=list)
    asked: FinishReason | None = None


class _Hasher:
    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self.hash = EventHash()

    def emit(self, event: AnyEvent) -> None:
        self.hash.add(self._encoder.encode(event))


class World:
    """One engine and what is done to it.

    audit_every  a snapshot is audited after every so many steps
    overlap      steps are planned while the one before them is computed
    sink         hears the events too, before the checker may raise
    """

    def __init__(
        self, scenario: Scenario, *, audit_every: int = 1, sink: EventSink | None = None, overlap: bool = False
    ) -> None:
        config = scenario.engine_config()
        if overlap:
            config = config.model_copy(update={"executor": ExecutorConfig(kind="simulated", overlap=True)})
        self.config = config
        self.scenario = scenario
        self.clock = SimClock(scenario.tick_ns)
        self.model = SimModel(config, self.clock)
        overrides: Any = dict.fromkeys(CLOCK_LAWS, "record") if scenario.clock_falls else {}
        self.checker = InvariantChecker(overrides=overrides)
        self._hasher = _Hasher()
        sinks = FanOut((self._hasher, sink or NullSink(), self.checker))
        executor = LateModel(self.model) if overlap else self.model
        self.seen = Seen(Poisoner(executor, sinks))
        self.engine = LLMEngine(
            config, executor=executor, clock=self.clock, sink=self.seen, key_secret=b"sim", version="sim"
        )
        self.engine.scheduler.kv.allocation_fault = self._allocation_misses
        self.lives: dict[str, _Life] = {}
        self.steps = 0
        self.accepted = 0
        self._audit_every = audit_every
        self._order_from = 0
        self._misses = 0
        self._ended: list[str] = []
        self._last_ended: str | None = None
        self._known: set[str] = set()

    @property
    def scheduler(self) -> Scheduler:
        """For those who break it on purpose."""
        return self.engine.scheduler

    @property
    def hash(self) -> EventHash:
        return self._hasher.hash

    # -- a run -----------------------------------------------------------------------------------------------------

    def play(self, most_steps: int | None = None) -> None:
        """The whole scenario, or no more than so many steps. Raises InvariantViolation, Unsound, or whatever broke."""
        self.seen.settings(self.scenario)
        ops, place = self.scenario.ops, 0
        for at in range(self.scenario.steps):
            if self.steps == most_steps:
                return
            now: list[AnyOp] = []
            while place < len(ops) and ops[place].at <= at:
                now.append(ops[place])
                place += 1
            self.step(now)
        self._close(most_steps)

    def _close(self, most_steps: int | None) -> None:
        """Until nothing is left, in a time that the work at hand bounds; then nothing is held."""
        self._misses, self.model.spoil = 0, None
        if self.scenario.closing == "abort":
            for rid in list(self.lives):
                self._abort(rid)
        bound = self._bound()
        for _ in range(bound):
            if not self.engine.has_work:
                break
            if self.steps == most_steps:
                return
            self.step(())
        if self.lives:
            raise Unsound(
                "unfinished", f"{len(self.lives)} requests after {bound} further steps", next(iter(self.lives))
            )
        assert_nothing_held(self.engine)

    def _bound(self) -> int:
        """Steps that suffice: each token of each request alone, a retraction of all it has each time, and waits."""
        work = sum(len(life.request.prompt_ids) + life.limit for life in self.lives.values())
        return (20 + 10 * work) * (1 + (self.config.scheduler.prefill_delay_max_passes or 0))

    def step(self, ops: Sequence[AnyOp]) -> None:
        """Operations, then one step with those that come in flight."""
        later = []
        for op in ops:
            if (isinstance(op, Abort) and op.phase == "in_flight") or (isinstance(op, Arrive) and op.in_flight):
                later.append(op)
            else:
                self._do(op)
        self.clock.move(self.scenario.step_ns)
        if later:
            self.model.during = lambda: self._in_flight(later)
        if not self.engine.has_work:
            self.seen.count("engine", "idle")
        outputs = self.engine.step()
        failure = self.engine.last_failure
        if failure is not None and not isinstance(failure, StubFailure):
            raise failure  # raised inside the executor: the engine took it for a failure of the model
        self.steps += 1
        self._ended.clear()
        for output in outputs:
            self._take(output)
        if self.model.during is not None:  # nothing was computed
            self.model.during = None
            for op in later:
                self._do(op)
        if self.steps % self._audit_every == 0:
            self._audit()

    def _audit(self) -> None:
        snapshot = self.engine.snapshot(order_from=self._order_from)
        if not self.checker.audit(snapshot):
            raise Unsound("no audit", "the checker still waits for the end of the step")
        if snapshot.order is not None:
            self._order_from = snapshot.order.next_start

    # -- operations ------------------------------------------------------------------------------------------------

    def _do(self, op: AnyOp) -> None:
        match op:
            case Arrive():
                self._arrive(op)
            case Abort():
                self._abort_in_phase(op)
            case Expire():
                self._turn_away(self.engine.overdue(op.limit_ns), Cause.QUEUE_TIMEOUT)
            case Displace():
                self._turn_away(self.engine.displaceable(op.priority, op.count), Cause.DISPLACED)
            case Fail():
                self.model.spoil = op.spoiled
            case Miss():
                self._misses = op.count
            case Slow():
                self.model.slow_ns = op.ns
                self.seen.count("executor", "slow")
            case Jump():
                self.clock.move(op.ns)
                self.seen.count("clock", "on" if op.ns >= 0 else "back")
            case Respond():
                self._respond(op)

    def _in_flight(self, ops: Sequence[AnyOp]) -> None:
        for op in ops:
            self._do(op)
            if isinstance(op, Arrive):
                self.seen.count("arrival", "in flight")

    def _arrive(self, op: Arrive) -> None:
        if self.engine.num_waiting >= self.scenario.most_waiting:
            self.seen.count("arrival", "stayed away")
            return
        request = EngineRequest(
            rid=op.rid,
            prompt_ids=prompt_of(op),
            params=SamplingParams(
                max_new_tokens=op.max_new,
                ignore_eos=op.ignore_eos,
                stop_token_ids=STOPS if op.stops else (),
                min_new_tokens=min(op.minimum, op.max_new),
            ),
            priority=op.priority,
            routing_key=op.routing_key,
            accepted_ns=max(0, self.clock.now_ns() - op.late_ns),
        )
        due = self._refusal_due(request)
        try:
            self.engine.add_request(request)
        except RequestRefused as refused:
            if refused.cause is not due:
                raise Unsound("refused", f"{refused.cause} instead of {due}: {refused}", op.rid) from refused
            self.seen.count("refused", due.value)
            return
        if due is not None:
            raise Unsound("not refused", f"{due} was due", op.rid)
        if op.rid in self._known:
            self.seen.count("id", "again")
        self._known.add(op.rid)
        self.accepted += 1
        self.lives[op.rid] = _Life(request, self.engine.scheduler.state.requests[op.rid].max_new_tokens)

    def _refusal_due(self, request: EngineRequest) -> RefusalCause | None:
        if request.rid in self.lives:  # alive, or ended and not told yet
            self.seen.count("id", "still live")
            return RefusalCause.INVALID
        if not request.prompt_ids:
            return RefusalCause.INVALID
        largest = self.engine.scheduler.largest_output(len(request.prompt_ids))
        return RefusalCause.NEVER_FITS if largest < 1 else None

    def _abort_in_phase(self, op: Abort) -> None:
        rids = self._in_phase(op.phase)
        if not rids:
            return
        rid = rids[op.pick % len(rids)]
        self.seen.count("abort", op.phase)
        self._abort(rid)
        if op.twice and op.phase == "in_flight":
            self._abort(rid)

    def _in_phase(self, phase: str) -> list[str]:
        state = self.engine.scheduler.state
        match phase:
            case "waiting":
                return [request.rid for request in state.waiting if not request.num_retractions]
            case "pushed_back":
                return [request.rid for request in state.waiting if request.num_retractions]
            case "partly":
                return [state.continuation.rid] if state.continuation is not None else []
            case "running":
                return [request.rid for request in state.live_running]
            case "in_flight":
                return [request.rid for request in state.requests.values() if request.in_flight]
            case "just_finished":
                return [rid for rid in self._ended if rid not in state.requests]
        return ["nobody"]

    def _abort(self, rid: str) -> None:
        request = self.engine.scheduler.state.requests.get(rid)
        if request is not None and request.in_flight and request.state is RequestState.PREFILL:
            self.seen.count("abort", "in_flight/partly" if request is self._middle() else "in_flight/last piece")
        if request is not None and request.abort_requested:
            self.seen.count("abort", "twice")
        took = self.engine.abort_request(rid, "simulated")
        if took != (request is not None):
            raise Unsound("abort", f"answered {took} for a request that is {'live' if request else 'not live'}", rid)
        if took:
            self.lives[rid].asked = FinishReason.ABORT

    def _turn_away(self, rids: Sequence[str], cause: Cause) -> None:
        for rid in rids:
            if not self.engine.turn_away(rid, cause):
                raise Unsound("turned away", f"refused for a request that the engine had named, {cause}", rid)
            self.lives[rid].asked = FinishReason.REFUSED

    def _middle(self) -> Any:
        """The request whose piece in flight is not its last."""
        return self.engine.scheduler.state.continuation

    def _respond(self, op: Respond) -> None:
        if self._last_ended is not None:
            now = self.clock.now_ns()
            self.engine.record_response(self._last_ended, now, now, 100, 0, op.disconnected)

    def _allocation_misses(self, kind: str) -> bool:
        if self._misses == 0:
            return False
        self._misses -= 1
        self.seen.count("miss", kind)
        return True

    # -- what comes out --------------------------------------------------------------------------------------------

    def _take(self, output: TokenOutput) -> None:
        life = self.lives.get(output.rid)
        if life is None:
            raise Unsound("speaks after its end", f"index {output.output_index}, {output.finish}", output.rid)
        if output.output_index != len(life.tokens):
            raise Unsound("index", f"{output.output_index} after {len(life.tokens)} tokens", output.rid)
        if output.token_id is not None:
            life.tokens.append(output.token_id)
        if output.finish is None:
            return
        self.seen.count("end", f"{output.finish}/{'' if output.finish is FinishReason.ABORT else output.detail}")
        self._judge(life, output, output.finish)
        del self.lives[output.rid]
        self._ended.append(output.rid)
        self._last_ended = output.rid

    def _judge(self, life: _Life, output: TokenOutput, finish: FinishReason) -> None:
        """The end is one that was due, and the tokens are those of the request alone, as far as it got."""
        rid, tokens = output.rid, life.tokens
        due = {life.asked} if life.asked else {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR}
        if life.asked is FinishReason.ABORT:  # a failing executor ends also those whose abort came while it computed
            due.add(FinishReason.ERROR)
        if finish not in due:
            raise Unsound("end", f"{finish} {output.detail}, asked for: {life.asked}", rid)
        if finish is FinishReason.ERROR and self.engine.last_failure is None:
            raise Unsound("end", f"{finish} {output.detail}, and no step failed", rid)
        expected = expected_tokens(life.request.prompt_ids, life.request.params, limit=life.limit)
        if tokens != expected[: len(tokens)]:
            raise Unsound("tokens", f"{tokens[:8]}… are not those of the request alone", rid)
        whole = finish in {FinishReason.STOP, FinishReason.LENGTH} and output.detail != "kv_pool_exhausted"
        if whole and len(tokens) != len(expected):
            raise Unsound("tokens", f"{len(tokens)} of {len(expected)} at {finish}", rid)


def prompt_of(op: Arrive) -> tuple[int, ...]:
    """Token ids. Two operations of one family agree on what they share; of one salt, on their own part too."""
    shared = [32 + (op.family * 7 + place * place) % 90 for place in range(op.share)]
    return (*shared, *[33 + (op.salt * 31 + place * 17 + op.salt * place) % 90 for place in range(op.own)])
