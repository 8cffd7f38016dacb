"""FR-39: liveness and readiness are about progress, not about a socket."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from engine.llm_engine import LLMEngine, TokenOutput
from engine.server.engine_thread import EngineStatus
from engine.server.health import liveness, readiness
from tests.engine.server.live import DEADLINE_S, GatedExecutor, until

SECOND = 1_000_000_000
BODY = {"model": "simulated", "prompt": "p", "max_tokens": 3, "ignore_eos": True}


class StallingEngine:
    """The real engine, whose steps can be made to do nothing (FR-39 c) or to raise (FR-39 a)."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self.stalled = False
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[TokenOutput]:
        if self.broken:
            raise RuntimeError("law broken")
        return [] if self.stalled else self._engine.step()


def start(serve: Any, **options: Any) -> tuple[Any, StallingEngine]:
    engines: list[StallingEngine] = []

    def wrap(engine: LLMEngine) -> StallingEngine:
        engines.append(StallingEngine(engine))
        return engines[0]

    return serve(wrap_engine=wrap, **options), engines[0]


class Asker(threading.Thread):
    """One request on a thread of its own."""

    def __init__(self, live: Any, **body: Any) -> None:
        super().__init__()
        self._live, self._body = live, BODY | body
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.response = httpx.post(f"{self._live.url}/v1/completions", json=self._body, timeout=DEADLINE_S)

    def answer(self) -> httpx.Response:
        self.join(DEADLINE_S)
        assert self.response is not None
        return self.response


def probe(live: Any, path: str) -> tuple[int, str]:
    response = live.http.get(path)
    body = response.json()
    for field in (
        "waiting",
        "running",
        "steps",
        "last_step_age_s",
        "last_token_age_s",
        "last_progress_age_s",
        "reason",
    ):
        assert field in body
    return response.status_code, body["status"]


@pytest.mark.parametrize("stream", [False, True])
def test_fr_39_a_a_dead_engine_is_neither_alive_nor_ready_and_answers_everybody(serve: Any, stream: bool) -> None:
    live, engine = start(serve, make_executor=GatedExecutor)
    live.executor.gate.clear()
    asked = Asker(live, stream=stream)
    until(lambda: live.executor.batches, "first step")
    second = Asker(live)  # still in the mailbox when the engine dies
    until(lambda: live.thread.open_replies == 2, "both submitted")
    engine.broken = True
    live.executor.gate.set()
    first_answer, second_answer = asked.answer(), second.answer()
    if stream:
        assert first_answer.text.count('"error"') == 1
        assert first_answer.text.endswith("data: [DONE]\n\n")
    else:
        assert (first_answer.status_code, first_answer.json()["error"]["code"]) == (503, "engine_error")
    assert second_answer.status_code == 503
    assert probe(live, "/health") == (503, "dead")
    assert probe(live, "/ready") == (503, "dead")
    later = live.post()
    assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_dead")
    assert live.thread.open_replies == 0


def test_fr_39_b_a_loop_that_does_not_come_back_is_blocked(serve: Any) -> None:
    live, _ = start(serve, make_executor=GatedExecutor, server={"stall_after_s": 0.6})
    live.executor.gate.clear()
    asked = Asker(live)
    until(lambda: live.executor.batches, "a step")
    until(lambda: probe(live, "/health") == (503, "blocked"), "the threshold")
    live.executor.gate.set()
    assert asked.answer().status_code == 200
    until(lambda: probe(live, "/health") == (200, "alive"), "recovery")


def test_fr_39_c_rounds_without_result_are_a_stall_with_its_reason(serve: Any) -> None:
    live, engine = start(serve, server={"stall_after_s": 0.6})
    engine.stalled = True
    asked = [Asker(live) for _ in range(3)]
    until(lambda: live.thread.status.waiting == 3, "three waiting")
    until(lambda: probe(live, "/health") == (503, "stalled"), "the threshold")
    body = live.http.get("/ready").json()
    assert body["waiting"] == 3
    assert "3 waiting, 0 running" in body["reason"]
    engine.stalled = False
    assert [one.answer().status_code for one in asked] == [200, 200, 200]


def test_fr_39_d_a_full_queue_that_moves_is_alive_but_not_ready(serve: Any) -> None:
    live, _ = start(
        serve,
        step_ms=5,
        make_executor=GatedExecutor,
        scheduler={"max_running_requests": 1},
        server={"max_queued_requests": 1, "stall_after_s": 20},
    )
    asked = [Asker(live, max_tokens=400) for _ in range(2)]
    until(lambda: live.thread.status.waiting == 1 and live.thread.status.running == 1, "a full queue")
    live.executor.gate.clear()  # for as long as it takes to look, and far below the threshold
    assert probe(live, "/health") == (200, "alive")
    assert probe(live, "/ready") == (503, "queue_full")
    live.executor.gate.set()
    assert [one.answer().status_code for one in asked] == [200, 200]
    until(lambda: probe(live, "/ready") == (200, "ready"), "room again")


def test_fr_39_e_an_idle_engine_is_alive_and_ready(serve: Any) -> None:
    live, _ = start(serve, server={"stall_after_s": 1.5})
    live.post(max_tokens=1)
    until(lambda: (live.http.get("/health").json()["last_token_age_s"] or 0) > 2, "idle for longer than the threshold")
    until(lambda: probe(live, "/health") == (200, "alive"), "alive")
    until(lambda: probe(live, "/ready") == (200, "ready"), "ready")


def test_a_failed_step_ends_its_requests_and_the_engine_lives_on(serve: Any) -> None:
    live, _ = start(serve, make_executor=GatedExecutor)
    live.executor.fail_next = True
    failed = live.post()
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_error")
    live.assert_nothing_held()
    assert probe(live, "/health") == (200, "alive")
    assert live.post(max_tokens=2).status_code == 200


def status(**changes: Any) -> EngineStatus:
    fields: dict[str, Any] = {"heartbeat_ns": 0, "progress_ns": 0, "last_token_ns": 0, "steps": 5, "waiting": 0}
    return EngineStatus(**(fields | {"running": 0, "has_work": False} | changes))


@pytest.mark.parametrize(
    ("changes", "now", "alive", "ready"),
    [
        ({}, 1, "alive", "ready"),
        ({}, 11, "blocked", "blocked"),
        ({"heartbeat_ns": 11 * SECOND}, 11, "alive", "ready"),
        ({"heartbeat_ns": 11 * SECOND, "has_work": True, "waiting": 1}, 11, "stalled", "stalled"),
        ({"dead": "LawBroken"}, 1, "dead", "dead"),
        ({"stopped": True}, 1, "stopped", "stopped"),
        ({"draining": True}, 1, "alive", "draining"),
        ({"waiting": 4}, 1, "alive", "queue_full"),
        ({"waiting": 3}, 1, "alive", "ready"),
    ],
)
def test_judgement(changes: dict[str, Any], now: int, alive: str, ready: str) -> None:
    live = liveness(status(**changes), now * SECOND, 10.0)
    assert (live.state, live.ok) == (alive, alive == "alive")
    able = readiness(status(**changes), now * SECOND, 10.0, 4)
    assert (able.state, able.ok) == (ready, ready == "ready")
    assert bool(able.reason) != able.ok
