"""The engine loop: determinism to the byte, same tokens whatever the settings, failures, aborts, its own end."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec
import pytest

from engine.clock import VirtualClock
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDead, RefusalCause, RequestRefused
from engine.events import EngineStarted, NullSink, RecordingSink, StepCompleted
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import LLMEngine
from engine.request import FinishReason
from engine.scheduler.plan import StepKind
from tests.builders import engine_config
from tests.engine.stub_model import StubRun


def busy(sink: RecordingSink, **changes: Any) -> StubRun:
    """Shared prefixes, chunks, mixing, pressure, an abort, a failed step and a missed allocation."""
    page_size = changes.pop("page_size", 16)
    settings = {
        "page_size": page_size,
        "num_pages": 384 // page_size,
        "chunked_prefill_size": 96,
        "max_running_requests": 4,
        "schedule_policy": "lpm",
        "schedule_conservativeness": 0.05,
    }
    faults = changes.pop("faults", True)
    run = StubRun(engine_config(**(settings | changes)), sink)
    for index in range(14):
        shared = [40 + i % 50 for i in range((0, 40, 72, 100)[index % 4])]
        own = [35 + (index * 31 + i * 17) % 90 for i in range((30, 90, 9, 61)[index % 4])]
        run.add(f"r{index}", [*shared, *own], (9, 30, 60)[index % 3], ignore_eos=index % 2 == 0)
        if faults and index == 5:
            run.engine.abort_request("r5", "gone")
        if faults and index == 7:
            run.model.fail_next = True
        if faults and index == 9:
            misses = iter([True])
            run.kv.allocation_fault = lambda _kind, misses=misses: next(misses, False)
        run.step()
    run.run()
    return run


def stream_hash(sink: RecordingSink) -> str:
    encoder = msgspec.json.Encoder(enc_hook=lambda value: value.hex())
    return blake2b(b"\n".join(encoder.encode(event) for event in sink.events), digest_size=16).hexdigest()


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "shortest-prefill-first"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_same_inputs_give_the_same_bytes(policy: str, page_size: int) -> None:
    sinks = [RecordingSink(), RecordingSink()]
    for sink in sinks:
        busy(sink, schedule_policy=policy, page_size=page_size)
    assert len(sinks[0].events) > 300
    assert stream_hash(sinks[0]) == stream_hash(sinks[1])
    assert [event.seq for event in sinks[0].events] == list(range(len(sinks[0].events)))


def test_the_hash_sees_a_difference() -> None:
    one, two = RecordingSink(), RecordingSink()
    busy(one)
    busy(two, schedule_conservativeness=0.06)
    assert stream_hash(one) != stream_hash(two)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 64},
        {"chunked_prefill_size": None},
        {"enable_mixed_chunk": False},
        {"enable_radix": False},
        {"schedule_policy": "shortest-prefill-first"},
        {"max_running_requests": 1},
        {"schedule_conservativeness": 1.0},
        {"prefill_max_requests": 1},
    ],
    ids=str,
)
def test_settings_change_times_and_never_tokens(changes: dict[str, Any]) -> None:
    """Cache, chunks, mixing, retraction, order: the tokens depend on the whole prefix and on nothing else."""
    run = busy(RecordingSink(), faults=False, **changes)
    run.assert_nothing_held()
    for rid in run.requests:
        run.assert_right_tokens(rid)
        assert run.end(rid) is not None


def test_a_failed_step_ends_its_members_and_nobody_else() -> None:
    sink = RecordingSink()
    run = StubRun(engine_config(page_size=16, num_pages=64, enable_mixed_chunk=False), sink)
    run.add("decodes", range(40, 60), 9)
    run.step()
    run.add("prefills", range(60, 90), 9)
    run.model.fail_next = True
    outputs = run.step()
    assert [(o.rid, o.token_id, o.finish, o.detail) for o in outputs] == [
        ("prefills", None, FinishReason.ERROR, "executor_failed")
    ]
    assert str(run.engine.last_failure) == "ordered"
    assert not run.engine.is_dead
    run.run()
    run.assert_right_tokens("decodes")
    assert run.end("decodes") == ("length", "")
    assert [event.failed for event in sink.events if isinstance(event, StepCompleted)].count(True) == 1
    run.assert_nothing_held()


def test_a_failed_step_is_logged_by_kind_and_place_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    run = StubRun(engine_config(num_pages=20))
    run.add("r", [1, 2, 3])
    run.model.fail_next = True
    run.step()
    (record,) = caplog.records
    assert "step 1: the executor failed with StubFailure" in record.getMessage()
    assert "stub_model.py" in record.getMessage()
    assert "ordered" not in caplog.text


def test_pages_of_a_failed_step_are_not_cached() -> None:
    """What a failed executor wrote cannot be trusted: the same prompt is computed again."""
    run = StubRun(engine_config(page_size=16, num_pages=64))
    run.add("a", range(40, 80), 3)
    run.model.fail_next = True
    run.step()
    assert run.kv.pool.counts == (64, 0, 0, 0)
    run.add("b", range(40, 80), 3)
    run.run()
    assert run.outputs["b"][0].cached_tokens == 0
    run.assert_right_tokens("b")


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_an_abort_gives_one_end_in_every_phase(steps: int) -> None:
    """Waiting, between pieces, after the last piece, decoding."""
    run = StubRun(engine_config(page_size=16, num_pages=64, chunked_prefill_size=32))
    run.add("r", range(40, 120), 9)
    for _ in range(steps):
        run.step()
    said = len(run.tokens("r"))
    assert run.engine.abort_request("r", "why")
    assert not run.engine.abort_request("r")
    assert not run.engine.abort_request("never heard of")
    assert run.engine.has_work
    run.run()
    last = run.outputs["r"][-1]
    assert (last.token_id, last.output_index, last.finish, last.detail) == (None, said, FinishReason.ABORT, "why")
    assert len(run.outputs["r"]) == said + 1
    run.assert_nothing_held()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_while_the_executor_computes_gives_one_end(steps: int) -> None:
    """The first piece, a middle one, the last one, decoding: also a piece that brings no token brings the end."""
    run = StubRun(engine_config(page_size=16, num_pages=64, chunked_prefill_size=32))
    run.add("r", range(40, 120), 9)
    for _ in range(steps):
        run.step()
    run.model.during = lambda: run.engine.abort_request("r", "why") or pytest.fail("not live")
    run.run()
    assert run.end("r") == ("abort", "")
    assert len(run.tokens("r")) == max(0, steps - 1)
    run.assert_nothing_held()


def test_an_id_is_free_again_once_its_end_was_handed_out() -> None:
    """Before that, the next step would hand out the end of the first request to whoever asks for the second."""
    run = StubRun(engine_config())
    run.add("r", range(40, 80), 2)
    assert run.engine.abort_request("r")
    with pytest.raises(RequestRefused, match="'r' is the id of a live request"):
        run.add("r", range(40, 80), 2)
    assert run.end("r") is None
    run.step()
    assert run.end("r") == ("abort", "")
    del run.outputs["r"]
    run.add("r", range(40, 80), 2)
    run.run()
    assert run.end("r") == ("length", "")
    run.assert_right_tokens("r")
    run.assert_nothing_held()


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    run = StubRun(engine_config(page_size=16, num_pages=64))
    run.add("a", range(40, 90), 2)
    run.run()
    run.add("b", [*range(40, 90), 33, 34], 2)
    run.run()
    assert [o.cached_tokens for o in run.outputs["a"]] == [0, 0]
    assert [(o.cached_tokens, o.prompt_tokens) for o in run.outputs["b"]] == [(48, 52), (48, 52)]


@pytest.mark.parametrize(
    ("prompt", "limit", "cause", "message"),
    [
        ((), 4, RefusalCause.INVALID, "prompt is empty"),
        ((40, 512), 4, RefusalCause.INVALID, "token id 512; ids are 0 to 511"),
        ((40, -1), 4, RefusalCause.INVALID, "token id -1"),
        ((40,), 0, RefusalCause.INVALID, "max_new_tokens is 0; at least 1"),
        (tuple([40] * 1017), 1, RefusalCause.NEVER_FITS, "do not fit the KV pool of 1024 tokens"),
        (tuple([40] * 10), 1 << 20, RefusalCause.TOO_LONG, "exceeds the context of 1048576 tokens"),
    ],
)
def test_what_is_refused_leaves_nothing(prompt: tuple[int, ...], limit: int, cause: RefusalCause, message: str) -> None:
    sink = RecordingSink()
    run = StubRun(engine_config(page_size=16, num_pages=64), sink)
    events = len(sink.events)
    with pytest.raises(RequestRefused, match=message) as refused:
        run.add("r", prompt, limit)
    assert refused.value.cause is cause
    assert len(sink.events) == events
    assert len(run.engine.tokens) == 0
    assert not run.engine.has_work
    assert run.engine.step() == []


def test_an_idle_engine_does_nothing_and_says_so_once() -> None:
    sink = RecordingSink()
    run = StubRun(engine_config(), sink)
    assert not run.engine.has_work
    for _ in range(3):
        assert run.step() == []
    assert [type(event) for event in sink.events] == [EngineStarted]
    run.add("r", range(40, 50), 2)
    run.run()
    idle = [event for event in sink.events if isinstance(event, StepCompleted) and event.kind is StepKind.IDLE]
    assert len(idle) == 1
    seen = len(sink.events)
    assert run.step() == []
    assert len(sink.events) == seen


def test_a_step_that_breaks_between_writes_kills_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing further runs on a state that cannot be trusted."""
    run = StubRun(engine_config())
    run.add("r", range(40, 50), 9)
    run.step()

    def broken(*_args: object, **_kwargs: object) -> int:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(type(run.kv), "evict_until_free", broken)
    with pytest.raises(RuntimeError, match="disk on fire"):
        run.step()
    assert run.engine.is_dead
    for call in (run.engine.step, lambda: run.add("s", range(40, 50), 2)):
        with pytest.raises(EngineDead, match="disk on fire"):
            call()


@pytest.mark.parametrize(
    ("num_pages", "page_size", "is_taken"), [(2, 16, False), (3, 16, True), (3, 1, False), (4, 1, True)]
)
def test_a_pool_that_could_serve_nobody_is_refused_at_start(num_pages: int, page_size: int, is_taken: bool) -> None:
    config = EngineConfig.model_validate(
        {"cache": {"num_pages": num_pages, "page_size": page_size}, "executor": {"kind": "simulated"}}
    )

    def start() -> LLMEngine:
        return LLMEngine(config, executor=SimulatedExecutor(config), clock=VirtualClock(), sink=NullSink())

    if is_taken:
        assert start().scheduler.largest_output(1) >= 1
    else:
        with pytest.raises(ConfigError, match=rf"cache\.num_pages={num_pages} with cache\.page_size={page_size}"):
            start()
