"""A small KV pool: what can never fit is refused, what hits the wall ends, a retraction is not seen."""

from __future__ import annotations

from typing import Any

from engine.errors import RefusalCause
from tests.engine.server.live import ScriptedExecutor


def test_a_prompt_that_never_fits_is_refused_with_the_pool_named(serve: Any) -> None:
    live = serve(cache={"num_pages": 4})
    for stream in (False, True):
        response = live.post(prompt=[40] * 100, max_tokens=5, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "never_fits"
        assert "64 tokens" in error["message"]
    assert live.observer.rejected == {RefusalCause.NEVER_FITS: 2}
    live.assert_nothing_held()


def test_an_answer_that_hits_the_end_of_the_pool_ends_with_length(serve: Any) -> None:
    live = serve(cache={"num_pages": 6})
    answer = live.post(prompt=[40] * 20, max_tokens=500, ignore_eos=True).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] < 96
    live.assert_nothing_held()
    assert live.post(max_tokens=2).status_code == 200


def test_fr_44_retraction_in_the_middle_of_a_character_is_not_seen_by_clients(serve: Any) -> None:
    text = "日本語👩‍👩‍👧 é " * 8
    script = list(text.encode())
    live = serve(
        make_executor=ScriptedExecutor,
        scheduler={"schedule_conservativeness": 0.05, "clip_max_new_tokens": 16},
        cache={"num_pages": 60},
    )
    live.executor.script = script
    prompts = [[40 + index] * 40 for index in range(6)]
    answer = live.post(prompt=prompts, max_tokens=len(script), ignore_eos=True).json()
    retracted = [e for e in live.sink.events if type(e).__name__ == "RequestTransitioned" and e.cause == "retract"]
    assert retracted  # else the test shows nothing
    assert [choice["text"] for choice in answer["choices"]] == [text] * 6
    assert answer["usage"]["completion_tokens"] == 6 * len(script)
    live.assert_nothing_held()
