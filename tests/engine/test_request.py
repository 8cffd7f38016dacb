"""The request state machine: the legal edges with their causes, and nothing else."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from engine.errors import IllegalTransition
from engine.kvcache.page_keys import PageKeys
from engine.request import TRANSITIONS, Cause, Request, RequestState

W, P, D, F = RequestState.WAITING, RequestState.PREFILL, RequestState.DECODE, RequestState.FINISHED
ENDS = {Cause.STOP, Cause.LENGTH, Cause.ABORT, Cause.ERROR, Cause.KV_POOL_EXHAUSTED}

#: Written out a second time, on purpose: the table of the engine must not change by accident.
LEGAL = {
    (W, P): {Cause.ADMIT},
    (W, F): {Cause.ABORT, Cause.ERROR, Cause.NEVER_FITS, Cause.QUEUE_TIMEOUT, Cause.DISPLACED},
    (P, P): {Cause.NEXT_CHUNK},
    (P, D): {Cause.FINAL_CHUNK},
    (P, W): {Cause.RETRACT, Cause.PREEMPT},
    (P, F): ENDS,
    (D, W): {Cause.RETRACT, Cause.PREEMPT},
    (D, F): ENDS,
}


def request_in(state: RequestState) -> Request:
    request = Request(rid="r7", prompt_len=5, max_new_tokens=3, keys=PageKeys(np.empty(0, dtype=np.int64)))
    request.state = state
    return request


@pytest.mark.parametrize(("source", "target", "cause"), list(product(RequestState, RequestState, Cause)))
def test_every_edge(source: RequestState, target: RequestState, cause: Cause) -> None:
    request = request_in(source)
    if cause in LEGAL.get((source, target), set()):
        request.transition(target, cause)
        assert request.state is target
        return
    with pytest.raises(IllegalTransition, match=f"request r7: no transition {source} -> {target} by {cause}"):
        request.transition(target, cause)
    assert request.state is source


def test_the_table_is_the_one_written_out() -> None:
    assert {edge: set(causes) for edge, causes in TRANSITIONS.items()} == LEGAL


def test_nothing_leaves_the_end() -> None:
    assert not [edge for edge in TRANSITIONS if edge[0] is F]
    assert request_in(F).is_finished


def test_a_new_request_owns_nothing() -> None:
    request = request_in(W)
    assert (request.lease, request.computed_len, request.output_len, request.in_flight) == (None, 0, 0, 0)
    request.output_len = 2
    assert request.seq_len == 7
