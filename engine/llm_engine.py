"""LLMEngine. Owns: the doors of an engine — add, abort, step, snapshot — and whether it lives. Steps: `stepping.py`.

All calls must come from one thread. Nothing here blocks but the executor.
"""

from __future__ import annotations

import msgspec

from engine.clock import Clock
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDead, RefusalCause, RequestRefused
from engine.events import SCHEMA_VERSION, EngineStarted, EventSink, ResponseSent
from engine.executor.base import Executor, OverlappingExecutor
from engine.kvcache.snapshot import SchedulerSnapshot
from engine.outputs import OutputDesk, TokenOutput
from engine.request import Cause, FinishReason
from engine.sampling_params import SamplingParams
from engine.scheduler.scheduler import Arrival, Scheduler
from engine.scheduler.turn_away import displaceable, overdue
from engine.stepping import OverlappedSteps, SerialSteps, Steps
from engine.token_store import Grammar, GrammarFactory, StopWatcherFactory, TokenStore


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller hands to the engine. `grammar`: the beginning of that in `params`; None: made by the engine."""

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    priority: int | None = None
    routing_key: str | None = None
    accepted_ns: int = 0
    trace_id: str = ""
    parent_span_id: str = ""
    trace_sampled: bool = False


class LLMEngine:
    """The engine loop's body. `step` does one step and returns what clients should see of it.

    key_secret   keys the page-key hash chain; None keeps raw ids at page size 1 (simulation only)
    wall_ns      calendar time of now, for listeners that turn monotonic times into dates
    """

    def __init__(  # noqa: PLR0913 - the composition root names every seam once
        self,
        config: EngineConfig,
        *,
        executor: Executor,
        clock: Clock,
        sink: EventSink,
        stop_watcher: StopWatcherFactory | None = None,
        grammars: GrammarFactory | None = None,
        key_secret: bytes | None = b"",
        version: str = "",
        engine_id: str = "",
        wall_ns: int = 0,
    ) -> None:
        self.config = config
        self.info = executor.info()
        self._executor = executor
        self._clock = clock
        self.tokens = TokenStore(
            page_size=config.cache.page_size,
            secret=key_secret,
            eos_token_ids=self.info.eos_token_ids,
            stop_watcher=stop_watcher,
            grammars=grammars,
        )
        self.scheduler = Scheduler(
            config, num_pages=self.info.num_pages, sink=sink, chained_keys=self.tokens.chained_keys
        )
        self._desk = OutputDesk(self.tokens, self.scheduler.state.requests)
        self._steps = self._made_steps(executor)
        #: Ends not handed out yet, by rid. Until a step has returned them the id is not free: whose end would it be?
        self._pending_ends: dict[str, TokenOutput] = {}
        self._dead: str | None = None
        self._condemned: Exception | None = None
        self._check_pool()
        self._publish_start(version, engine_id, wall_ns)

    # -- the doors -------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestRefused, and then keeps nothing of it; EngineDead when the engine is dead."""
        self._check_alive()
        self._check_request(request)
        keys = self.tokens.add(request.rid, request.prompt_ids, request.params, request.grammar)
        try:
            entered = self.scheduler.add(
                Arrival(
                    rid=request.rid,
                    prompt_len=len(request.prompt_ids),
                    max_new_tokens=request.params.max_new_tokens,
                    page_keys=keys.page_keys,
                    head32_key=keys.head32_key,
                    ignore_eos=request.params.ignore_eos,
                    priority=request.priority,
                    routing_key=request.routing_key,
                    accepted_ns=request.accepted_ns,
                    trace_id=request.trace_id,
                    parent_span_id=request.parent_span_id,
                    trace_sampled=request.trace_sampled,
                ),
                self._clock.now_ns(),
            )
        except RequestRefused:
            self.tokens.drop(request.rid)
            raise
        self.tokens.clamp(request.rid, entered.max_new_tokens)
        self._desk.open(request.rid, entered.prompt_len)

    def abort_request(self, rid: str, detail: str = "") -> bool:
        """End a request early; False when it is not live. Its one end comes out of a later `step`."""
        ended = self.scheduler.abort(rid, self._clock.now_ns(), detail=detail)
        if ended:
            self._pending_ends[rid] = self._desk.end(rid, FinishReason.ABORT, detail)
        return ended is not False

    def overdue(self, limit_ns: int) -> list[str]:
        """Requests that have waited `limit_ns` for their first admission."""
        return overdue(self.scheduler.state, self._clock.now_ns(), limit_ns)

    def displaceable(self, priority: int | None, count: int) -> list[str]:
        """`count` waiting requests that would give way to one of `priority`; [] when there are not so many."""
        return displaceable(self.scheduler.state, priority, count)

    def turn_away(self, rid: str, cause: Cause) -> bool:
        """Refuse a waiting request after all, for a cause of TURNED_AWAY; False when it does not wait."""
        ended = self.scheduler.abort(rid, self._clock.now_ns(), cause=cause)
        if ended:
            self._pending_ends[rid] = self._desk.end(rid, FinishReason.REFUSED, cause.value)
        return ended is True

    def record_response(
        self,
        rid: str,
        first_byte_ns: int | None,
        last_byte_ns: int | None,
        bytes_sent: int,
        worst_send_ns: int,
        disconnected: bool,
    ) -> None:
        """Publish what the HTTP layer saw of a response."""
        publisher = self.scheduler.publisher
        publisher.t_ns = self._clock.now_ns()
        publisher.emit(
            ResponseSent(*publisher.head(), rid, first_byte_ns, last_byte_ns, bytes_sent, worst_send_ns, disconnected)
        )

    @property
    def has_work(self) -> bool:
        """Whether a call of `step` would do, or return, anything."""
        return bool(self._pending_ends or self._condemned) or self.scheduler.state.has_work or not self._steps.was_idle

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.state.waiting)

    @property
    def num_running(self) -> int:
        state = self.scheduler.state
        return len(state.live_running) + (state.continuation is not None) + len(state.leaving)

    @property
    def steps_done(self) -> int:
        return self._steps.done

    @property
    def work_steps(self) -> int:
        """Steps that compute something."""
        return self._steps.with_work

    @property
    def moves(self) -> int:
        """Rises with each call of `step` that began or ended a computation: what tells progress from spinning."""
        return self._steps.moves

    @property
    def last_failure(self) -> BaseException | None:
        """The last executor failure, for a debugger; events and the log do not hold its text."""
        return self._steps.last_failure

    @property
    def is_dead(self) -> bool:
        return self._dead is not None

    def snapshot(self, *, order_from: int = 0) -> SchedulerSnapshot:
        """State between two steps, immutable. Its sample of an indexed order begins at position `order_from`."""
        return self.scheduler.snapshot(order_from=order_from)

    def condemn(self, error: Exception) -> None:
        """End the engine at its next step, which raises `error`: something found it wrong between two steps."""
        self._condemned = error

    def close(self) -> None:
        self._executor.close()

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self) -> list[TokenOutput]:
        """One step. Raises EngineDead when a step failed after its first write earlier, and what `condemn` was told."""
        self._check_alive()
        if self._condemned is not None:
            self._dead = f"{type(self._condemned).__name__}: {self._condemned}"
            raise self._condemned
        ends = tuple(self._pending_ends.items())
        outputs = [output for _, output in ends]
        if self.scheduler.state.has_work or not self._steps.was_idle:
            try:
                outputs.extend(self._steps.run())
            except Exception as error:  # whatever broke, broke between writes: the state can no longer be trusted
                self._dead = f"{type(error).__name__}: {error}"
                raise
        for rid, _ in ends:
            del self._pending_ends[rid]
        return outputs

    # -- inside ----------------------------------------------------------------------------------------------------

    def _made_steps(self, executor: Executor) -> Steps:
        """The way of making steps that is configured. Raises ConfigError when the executor cannot do it."""

        def now_ns() -> int:
            return self._clock.now_ns()

        if not self.config.executor.overlap:
            return SerialSteps(self.scheduler, self.tokens, self._desk, executor, now_ns=now_ns)
        if not isinstance(executor, OverlappingExecutor):
            raise ConfigError(
                f"executor.overlap=True: {self.info.model} is computed by an executor that cannot overlap"
            )
        return OverlappedSteps(self.scheduler, self.tokens, self._desk, executor, now_ns=now_ns)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine stopped after a failed step: {self._dead}")

    def _check_pool(self) -> None:
        """Raise ConfigError when the pool is so small that not even one token in and one out would be taken."""
        largest, cache = self.scheduler.largest_output(1), self.config.cache
        if largest < 1:
            raise ConfigError(
                f"cache.num_pages={self.info.num_pages} with cache.page_size={cache.page_size} holds no request: under "
                f"scheduler.kv_accounting='{self.config.scheduler.kv_accounting}' a prompt of 1 token could ask for at "
                f"most {largest} output tokens"
            )

    def _check_request(self, request: EngineRequest) -> None:
        prompt, limit = len(request.prompt_ids), self.info.max_context_tokens
        if prompt == 0:
            raise RequestRefused(RefusalCause.INVALID, "prompt is empty; at least 1 token is needed", field="prompt")
        if request.params.max_new_tokens < 1:
            wanted = request.params.max_new_tokens
            raise RequestRefused(
                RefusalCause.INVALID, f"max_new_tokens is {wanted}; at least 1 is needed", field="max_tokens"
            )
        if prompt + request.params.max_new_tokens > limit:
            raise RequestRefused(
                RefusalCause.TOO_LONG,
                f"prompt of {prompt} tokens plus max_new_tokens {request.params.max_new_tokens} exceeds the context "
                f"of {limit} tokens",
                field="prompt",
            )
        if request.rid in self.scheduler.state.requests or request.rid in self._pending_ends:
            raise RequestRefused(RefusalCause.INVALID, f"rid {request.rid!r} is the id of a live request", field="rid")
        bad = next((token for token in request.prompt_ids if not 0 <= token < self.info.vocab_size), None)
        if bad is not None:
            raise RequestRefused(
                RefusalCause.INVALID,
                f"prompt holds token id {bad}; ids are 0 to {self.info.vocab_size - 1}",
                field="prompt",
            )

    def _publish_start(self, version: str, engine_id: str, wall_ns: int) -> None:
        publisher = self.scheduler.publisher
        publisher.t_ns = self._clock.now_ns()
        publisher.emit(
            EngineStarted(
                *publisher.head(),
                SCHEMA_VERSION,
                version,
                self.config.model_dump_json(exclude={"server"}),
                self.info.model,
                self.info.attention_backend,
                self.config.cache.page_size,
                self.info.num_pages,
                self.config.scheduler.max_running_requests,
                wall_ns,
                engine_id,
            )
        )


__all__ = ["EngineRequest", "LLMEngine", "TokenOutput"]
