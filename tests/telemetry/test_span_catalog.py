"""The catalogue of spans is complete and true: nothing leaves that is not in it, and all that is in it can leave."""

from __future__ import annotations

import random
import re

import pytest

from engine.scheduler.plan import StepOutcome, StepTimes
from invariants.violation import Violation
from telemetry.spans.catalog import BLOCKER, REQUEST, STEP, kind_of, undeclared
from telemetry.spans.draft import SpanDraft
from telemetry.spans.keep import KEPT_BECAUSE
from telemetry.spans.page import PAGE, page
from telemetry.spans.step_tree import STEP_KEPT_BECAUSE
from tests.builders import engine_config
from tests.telemetry.live_run import MS, TimedRun, busy, play
from tests.telemetry.test_spans import started


def fail_a_step(run: TimedRun) -> None:
    """One step whose computation raised."""
    now = run.now_ns + MS
    run.scheduler.prepare(now)
    plan = run.scheduler.commit(run.scheduler.plan(now))
    times = StepTimes(*[now] * 7)
    run.now_ns = now
    run.scheduler.apply(plan, StepOutcome(plan.step, (), times, failed=True))
    run.scheduler.complete(times)


def everything() -> list[SpanDraft]:
    """Spans of many runs: pressure, long waits, late tokens, failures, broken laws, responses, a shutdown."""
    spans: list[SpanDraft] = []
    for seed in range(24):
        config, program = busy(seed)
        run, sink, output = started(config, responses=seed % 2 == 0, gap_ns=3)
        if seed % 2:
            faults = random.Random(seed)
            run.scheduler.kv.allocation_fault = lambda _caller, faults=faults: faults.random() < 0.05
        play(run, program)
        sink.close()
        spans += [span for tree in output.trees for span in tree]
    run, sink, output = started(engine_config(max_running_requests=2), responses=True, gap_ns=5 * MS)
    for at in range(3):
        run.add(f"chatcmpl-{at}", 8, 40, ignore_eos=True, priority=at)
    run.timed_step((1, 1, 1, 1, 1, MS, 1))
    sink.note_violation(Violation("INV-PAGE-01", "", "8", "7", 2, "chatcmpl-0", ()))
    for at in range(1_000):  # more stretches of waiting than one timeline keeps, and steps than one in so many
        run.add(f"later-{at}", 8, 1)
        run.timed_step((1, 1, 1, 1, 1, MS, 1))
    run.timed_step((0, 0, 0, 0, 0, 60 * MS, 0))
    run.respond("chatcmpl-0", run.now_ns)
    run.add("fails", 8, 4)
    fail_a_step(run)
    run.add("open", 8, 4)
    sink.close()
    return spans + [span for tree in output.trees for span in tree]


@pytest.fixture(scope="module")
def spans() -> list[SpanDraft]:
    return everything()


def test_every_span_that_leaves_is_in_the_catalogue_with_its_attributes_events_and_types(
    spans: list[SpanDraft],
) -> None:
    assert len(spans) > 1_000
    for span in spans:
        kind = kind_of(span.name)
        assert not list(undeclared(dict(span.attributes), kind.attributes)), span.name
        assert not span.links or kind.links
        assert span.error is None or kind.errors
        for event in span.events:
            told = next(one for one in kind.events if one.name == event.name)
            assert not list(undeclared(dict(event.attributes), told.attributes)), event.name
        for one in kind.events:
            assert one.most is None or sum(event.name == one.name for event in span.events) <= one.most


def test_everything_in_the_catalogue_leaves_at_some_time(spans: list[SpanDraft]) -> None:
    by_kind: dict[str, list[SpanDraft]] = {}
    for span in spans:
        by_kind.setdefault(kind_of(span.name).name, []).append(span)
    assert set(by_kind) == {kind.name for kind in (*REQUEST, *STEP)}
    for kind in (*REQUEST, *STEP):
        of_kind = by_kind[kind.name]
        seen = {name for span in of_kind for name in span.attributes}
        assert not [one.name for one in kind.attributes if not any(map(one.pattern.fullmatch, seen))], kind.name
        for event in kind.events:
            told = [one for span in of_kind for one in span.events if one.name == event.name]
            assert told, f"{kind.name}: no {event.name}"
            names = {name for one in told for name in one.attributes}
            assert not [one.name for one in event.attributes if not any(map(one.pattern.fullmatch, names))], event.name
        assert any(span.links for span in of_kind) == bool(kind.links), kind.name
        assert any(span.error for span in of_kind) == bool(kind.errors), kind.name


def test_every_reason_to_keep_is_in_the_catalogue(spans: list[SpanDraft]) -> None:
    whys = {str(span.attributes["admitscope.kept_because"]) for span in spans if span.is_server}
    assert whys <= set(KEPT_BECAUSE)
    assert whys >= {"violation", "shutdown", "abort", "retracted", "ratio", "gap"}
    steps = {str(span.attributes["admitscope.kept_because"]) for span in spans if span.name == "engine.step"}
    assert steps <= set(STEP_KEPT_BECAUSE)
    assert steps >= {"violation", "failed", "retraction", "slow", "ratio"}


def test_the_committed_page_is_current_and_names_everything() -> None:
    text = page()
    assert PAGE.read_text(encoding="utf-8") == text, "run: make docs"
    for kind in (*REQUEST, *STEP):
        assert f"### `{kind.name}`" in text
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (PAGE.parent / target).exists(), target
    assert BLOCKER in text
