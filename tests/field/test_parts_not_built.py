"""Field reports that need a part which is not built: what asks for the part is refused, by name.

FR-15, 16, 17 and 18 need a host tier of the K/V cache, FR-26 log-probabilities of the prompt. What of them applies to
every build is proven here and in test_queue_reports.py (FR-18) too.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.config import CacheConfig
from engine.scheduler.decision import Reason
from telemetry.cli import main
from tests.builders import engine_config
from tests.field.test_admission_reports import all_end_well, decisions, mixed_on_and_off, plans, prompt, started
from tests.field.whole import whole
from tests.stateful.laws import check_state

HOST_TIER = ["host_pages", "host_pool", "host_tier", "host_memory_mib", "write_back", "prefetch_tokens"]


@pytest.mark.parametrize("name", HOST_TIER)
def test_fr_15_a_host_tier_is_refused_by_name(name: str) -> None:
    """No pages of a host pool, so no request holds a loaded prefix while it waits for the rest."""
    with pytest.raises(ValidationError, match=name):
        CacheConfig.model_validate({name: 10})


@pytest.mark.parametrize("name", HOST_TIER)
def test_fr_17_the_command_line_has_no_host_tier(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No copy between host and device is ever under way."""
    assert _status(["serve", f"--cache.{name.replace('_', '-')}", "10"]) == 2
    assert name.replace("_", "-") in capsys.readouterr().err


def _status(arguments: list[str]) -> Any:
    """The exit status of a command, returned or raised."""
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize("field", [{"echo": True, "logprobs": 2}, {"prompt_logprobs": 3}, {"prompt_logprobs": 0}])
def test_fr_26_log_probabilities_of_the_prompt_are_refused_at_submission(field: dict[str, Any]) -> None:
    with whole() as live:
        answer = live.post(**field)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_parameter"
        assert answer.json()["error"]["param"] in field
        assert live.status.steps == 0, "no work for a refused request"


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("accounting", ["reference", "exact"])
@mixed_on_and_off
def test_fr_16_a_prefix_that_is_locked_leaves_the_evictable_amount_at_once(
    enable_mixed_chunk: bool, accounting: str, page_size: int
) -> None:
    """P (200) is cached and unlocked, somebody holds about 100, 512 in all; 230 fresh tokens on top of P do not fit.

    Counted as evictable and as cached at once, P would make them fit, and the allocation would fail.
    """
    config = engine_config(
        page_size=page_size,
        num_pages=512 // page_size,
        kv_accounting=accounting,
        enable_mixed_chunk=enable_mixed_chunk,
        chunked_prefill_size=None,
    )
    run, sink = started(config)
    shared = prompt(0, 200)
    run.add("P", shared, 1)
    run.run()
    run.add("holder", prompt(1, 80), 20)
    run.step()
    run.step()
    run.add("new", [*shared, *prompt(2, 230)], 20)
    run.step()
    refused = decisions(sink)[-1]
    assert (refused.rid, refused.reason) == ("new", Reason.KV_TOTAL_EXHAUSTED)
    assert refused.prefix_len == 200
    assert refused.need is not None
    assert refused.have is not None
    assert refused.need >= 230 + 19
    # P is no longer evictable for the one that would use it: free pages alone are left.
    assert refused.have <= run.kv.free_pages * page_size
    assert refused.have < refused.remaining_total_before
    run.run()
    admitted = next(event for event in decisions(sink) if event.rid == "new" and event.selected_extend)
    assert (admitted.prefix_len, admitted.selected_extend) == (200, 230)
    assert not any(plan.claim_failed for plan in plans(sink))
    all_end_well(run)


@pytest.mark.parametrize("accounting", ["reference", "exact"])
def test_fr_16_an_admission_takes_pages_output_and_lock_from_the_ledger_together(accounting: str) -> None:
    run, sink = started(engine_config(page_size=1, num_pages=512, kv_accounting=accounting, chunked_prefill_size=None))
    shared = prompt(0, 200)
    run.add("P", shared, 1)
    run.run()
    evictable = run.kv.evictable_pages
    run.add("new", [*shared, *prompt(2, 80)], 20)
    run.step()
    check_state(run.state)
    admitted = decisions(sink)[-1]
    assert admitted.selected_extend == 80
    taken = admitted.remaining_total_before - admitted.remaining_total_after
    assert taken >= 200 + 80 + 19, "the prefix, the fresh tokens and the output reserve"
    assert run.kv.evictable_pages == evictable - 200
    run.run()
    all_end_well(run)
