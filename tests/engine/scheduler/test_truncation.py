"""truncation_align_size: lengths of cuts, a cut of nothing is refused, contradictions are named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.config import EngineConfig
from engine.events import AdmissionDecided, RecordingSink
from engine.scheduler.decision import Reason
from invariants import InvariantChecker
from tests.builders import CoreRun, engine_config


class Kept(RecordingSink):
    def __init__(self) -> None:
        super().__init__()
        self.checker = InvariantChecker()

    def emit(self, event: Any) -> None:
        self.checker.emit(event)
        super().emit(event)

    def decisions(self) -> list[AdmissionDecided]:
        return [event for event in self.events if isinstance(event, AdmissionDecided)]


@pytest.mark.parametrize("accounting", ["reference", "exact"])
@pytest.mark.parametrize(
    ("page", "align", "chunk", "pieces"),
    [
        (16, None, 100, [96, 96, 58]),
        (16, 32, 100, [96, 96, 58]),
        (16, 64, 100, [64, 64, 64, 58]),
        (1, 64, 100, [64, 64, 64, 58]),
        (16, 24, 100, [96, 96, 58]),  # whole pages and multiples of 24: 48, 96, ...
        (16, 40, 100, [80, 80, 90]),
    ],
)
def test_lengths_of_cuts(accounting: str, page: int, align: int | None, chunk: int, pieces: list[int]) -> None:
    kept = Kept()
    config = engine_config(
        page_size=page,
        num_pages=1024 // page,
        chunked_prefill_size=chunk,
        truncation_align_size=align,
        kv_accounting=accounting,
    )
    run = CoreRun(config, kept)
    run.add("p", 250, 3)
    run.run()
    found = [decision.selected_extend for decision in kept.decisions()]
    if align is None and accounting == "reference":
        assert found == [96, 100, 54]  # the reference rounds the first cut only
    else:
        assert found == pieces


def test_a_cut_of_nothing_is_refused_with_both_sides() -> None:
    kept = Kept()
    config = engine_config(chunked_prefill_size=96, truncation_align_size=64, enable_mixed_chunk=False)
    run = CoreRun(config, kept)
    run.add("a", 48, 4)
    run.add("b", 100, 4)
    run.step()
    refused = kept.decisions()[1]
    assert (refused.reason, refused.need, refused.have) == (Reason.CHUNK_BELOW_PAGE, 64, 48)
    assert refused.selected_extend == 0
    run.run()
    assert [d.selected_extend for d in kept.decisions() if d.rid == "b" and d.selected_extend] == [64, 36]


def test_decode_rows_sit_out_rather_than_starve_an_aligned_cut() -> None:
    """Chunk 64, alignment 64, one decode row: 63 are left, in every step as long as it decodes."""
    kept = Kept()
    run = CoreRun(engine_config(chunked_prefill_size=64, truncation_align_size=64), kept)
    run.add("d", 10, 200)
    run.step()
    run.add("p", 200, 4)
    for _ in range(12):
        run.step()
    assert [d.selected_extend for d in kept.decisions() if d.rid == "p" and d.selected_extend] == [64, 64, 64, 8]
    run.run()


def test_a_second_cut_is_not_made() -> None:
    """The aligned piece of the first prompt leaves room for a cut of the second, which the slot forbids."""
    kept = Kept()
    config = engine_config(chunked_prefill_size=112, truncation_align_size=48, num_pages=200)
    run = CoreRun(config, kept)
    run.add("a", 250, 4)
    run.add("b", 250, 4)
    run.step()  # a: 96 of 112, 16 left
    run.run()
    chunked = [d for d in kept.decisions() if d.reason is Reason.CHUNK_SLOT_TAKEN]
    empty = [d for d in kept.decisions() if d.reason is Reason.CHUNK_BELOW_PAGE and d.rid == "b"]
    assert empty or chunked
    assert all(d.need > d.have for d in [*chunked, *empty] if d.need is not None and d.have is not None)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_cut_is_aligned_and_everyone_finishes(data: st.DataObject) -> None:
    page = data.draw(st.sampled_from([1, 2, 16]))
    align = data.draw(st.integers(1, 60))
    accounting = data.draw(st.sampled_from(["reference", "exact"]))
    policy = data.draw(st.sampled_from(["fcfs", "lpm", "shortest-prefill-first"]))
    settings_ = {
        "page_size": page,
        "num_pages": 640 // page,
        "truncation_align_size": align,
        "chunked_prefill_size": data.draw(st.integers(16, 200)),
        "kv_accounting": accounting,
        "schedule_policy": policy,
        "schedule_conservativeness": 0.1,
    }
    try:
        config: EngineConfig = engine_config(**settings_)
    except ValidationError:
        return  # the alignment does not fit the slice: see below
    kept = Kept()
    run = CoreRun(config, kept)
    for index in range(data.draw(st.integers(1, 8))):
        run.add(f"r{index}", data.draw(st.integers(1, 300)), data.draw(st.integers(1, 60)))
        run.step()
    run.run(4000)
    for decision in kept.decisions():
        if decision.is_chunked:
            assert decision.selected_extend > 0
            assert decision.selected_extend % align == 0 == decision.selected_extend % page


@pytest.mark.parametrize(
    ("settings_", "names"),
    [
        ({"truncation_align_size": 128, "chunked_prefill_size": 64}, ("chunked_prefill_size=64", "align_size=128")),
        ({"truncation_align_size": 8, "chunked_prefill_size": None}, ("chunked_prefill_size=None", "align_size=8")),
        ({"truncation_align_size": 24, "chunked_prefill_size": 40}, ("chunked_prefill_size=40", "align_size=24")),
        (
            {"truncation_align_size": 64, "max_prefill_tokens": 32, "kv_accounting": "exact"},
            ("max_prefill_tokens=32", "align_size=64"),
        ),
    ],
)
def test_contradictions_name_both_fields(settings_: dict[str, Any], names: tuple[str, str]) -> None:
    with pytest.raises(ValidationError) as refused:
        engine_config(**settings_)
    assert all(name in str(refused.value) for name in names)
