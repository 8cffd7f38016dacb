"""A whole engine watched while it runs: readers on other threads see consistent answers, and the end adds up."""

from __future__ import annotations

import random
import threading

from engine.clock import MonotonicClock
from engine.events import FanOut, RecordingSink
from engine.executor.simulated import SimulatedExecutor
from engine.llm_engine import EngineRequest, LLMEngine
from engine.sampling_params import SamplingParams
from telemetry.buffered import BufferedSink
from telemetry.exposition import Exposition
from telemetry.metrics import MetricsSink
from telemetry.read_model import ReadModel
from tests.builders import engine_config


class Readers:
    """Threads that ask until told to stop; what they find wrong is kept."""

    def __init__(self, model: ReadModel, exposition: Exposition) -> None:
        self.wrong: list[str] = []
        self.asked = 0
        self._model = model
        self._exposition = exposition
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        try:
            while not self._stop.wait(0.002):
                self._look()
                self.asked += 1
        except Exception as error:  # told to the test, which runs on another thread
            self.wrong.append(repr(error))

    def _look(self) -> None:
        model = self._model
        queue, status, pages = model.queue(50), model.status(), model.page_map()
        if sum(queue.by_blocker.values()) != queue.total:
            self.wrong.append(f"queue {queue.by_blocker} of {queue.total}")
        counts = status.kv_pages
        if counts.free + counts.private + counts.protected + counts.evictable != counts.capacity:
            self.wrong.append(f"pages {counts}")
        if sum(owner.pages for owner in pages.owners) != pages.num_pages - pages.counts.free:
            self.wrong.append("owners do not add up")
        for entry in queue.entries[:2]:
            model.explain(entry.rid)
        model.requests(50)
        model.latency()
        shown = {
            line.split(" ")[0]: float(line.split(" ")[1])
            for line in self._exposition.text().splitlines()
            if line.startswith(("admitscope_requests{", "admitscope_waiting_by_blocker{"))
        }
        waiting = shown['admitscope_requests{state="waiting"}'] + shown['admitscope_requests{state="retracted"}']
        if waiting != sum(value for name, value in shown.items() if "blocker" in name):
            self.wrong.append(f"metrics {shown}")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=20)


def test_readers_on_other_threads_see_whole_events_and_the_end_adds_up() -> None:
    clock, rng = MonotonicClock(), random.Random(7)
    recorded, metrics = RecordingSink(), MetricsSink(clock=clock, expects_responses=True)
    model = ReadModel(clock=clock, expects_responses=True)
    buffered = BufferedSink(model, "read_model", period_s=0.001)
    config = engine_config(num_pages=60, page_size=4, max_running_requests=8, max_prefill_tokens=64)
    engine = LLMEngine(
        config,
        executor=SimulatedExecutor(config),
        clock=clock,
        sink=FanOut((recorded, metrics, buffered)),
        engine_id="watched",
    )
    buffered.flush()
    readers = Readers(model, Exposition(metrics))
    shared = tuple(range(100, 124))
    ends = 0
    for at in range(120):
        head = shared if rng.random() < 0.5 else ()
        prompt = (*head, *(rng.randrange(32, 127) for _ in range(rng.randint(1, 40))))
        params = SamplingParams(max_new_tokens=rng.randint(1, 25), ignore_eos=True)
        engine.add_request(
            EngineRequest(rid=f"r{at}", prompt_ids=prompt, params=params, accepted_ns=clock.now_ns() - 1000)
        )
        if rng.random() < 0.1:
            engine.abort_request(f"r{rng.randrange(at + 1)}", "client_disconnected")
        if at % 3 == 0:
            ends += _step(engine, clock)
    while engine.has_work:
        ends += _step(engine, clock)
    buffered.flush()
    readers.stop()
    buffered.close()
    assert readers.wrong == []
    assert readers.asked > 0
    assert ends == 120
    status = model.status()
    assert status.requests == {"waiting": 0, "prefill": 0, "decode": 0, "retracted": 0, "emitting": 0}
    assert sum(status.requests_finished.values()) == status.requests_received == 120
    assert status.kv_pages.private == status.kv_pages.protected == 0
    finished = model.requests(500).finished
    assert len(finished) == 120
    for row in finished:
        detail = model.request(row.rid)
        assert detail is not None
        if detail.timeline.ttft_ns is not None:
            assert sum(detail.timeline.parts_ns.values()) == detail.timeline.ttft_ns
            assert detail.timeline.parts_ns["intake"] >= 1000
        assert row.outputs <= row.max_new_tokens
    assert metrics.refused_increments == 0
    assert buffered.stats().dropped == buffered.stats().errors == 0


def _step(engine: LLMEngine, clock: MonotonicClock) -> int:
    """One step; each end is followed by the report of its response. Returns the ends."""
    ends = 0
    for output in engine.step():
        if output.finish is not None:
            ends += 1
            now = clock.now_ns()
            engine.record_response(output.rid, now, now, 100, 1000, False)
    return ends
