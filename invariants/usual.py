"""The usual life. Owns: judging a transition that is as it should be in one look, instead of law by law.

Four transitions make most lives: into the queue, admitted, prompt complete, ended after decoding. Each function here
asks at once everything that the laws would ask of it. If all holds, it follows the transition as they would have; if
anything is odd it follows nothing and says False, and the laws say what it is.
"""

from __future__ import annotations

from typing import Final

from engine.events import RequestTransitioned
from engine.request import TRANSITIONS, Cause
from invariants.members import ADMIT, ARRIVE, DECODE, FINAL_CHUNK, FINISHED, PREFILL, WAITING
from invariants.shadow import Shadow
from invariants.watch import Watch

#: A failed step brings no token: the laws themselves judge who ends by it.
_ENDS: Final = TRANSITIONS[DECODE, FINISHED] - {Cause.ERROR}


def arrives(books: Shadow, watch: Watch, event: RequestTransitioned) -> bool:
    """Into the queue, for the first time."""
    request = books.requests.get(event.rid)
    if (
        request is None
        or request.state is not None
        or event.source is not None
        or event.target is not WAITING
        or event.row is not None
        or event.computed_len
        or event.cached_len
        or event.num_retractions
    ):
        return False
    watch.queue.changes += 1
    books.set_state(request, WAITING)
    return True


def is_admitted(books: Shadow, watch: Watch, event: RequestTransitioned) -> bool:
    """Out of the queue, with a row that nobody has and the prefix that was decided."""
    rid, row, prefix = event.rid, event.row, event.cached_len
    request, track = books.requests.get(rid), watch.queue.live.get(rid)
    if (
        request is None
        or track is None
        or request.state is not WAITING
        or event.source is not WAITING
        or event.target is not PREFILL
        or row is None
        or row in books.rows
        or not 0 <= row < books.max_rows
        or event.computed_len != prefix
        or books.decided_prefix.get(rid, prefix) != prefix
        or event.num_retractions != track.ways_back
    ):
        return False
    watch.queue.changes += 1
    watch.queue.admit(track, event)
    watch.meters.on_transition(track, event)
    books.rows[row] = rid
    request.row = row
    books.set_state(request, PREFILL)
    return True


def completes_prompt(books: Shadow, watch: Watch, event: RequestTransitioned) -> bool:
    """From the last piece of its prompt to decoding, with one token."""
    rid = event.rid
    request, track = books.requests.get(rid), watch.queue.live.get(rid)
    if (
        request is None
        or track is None
        or request.state is not PREFILL
        or event.source is not PREFILL
        or event.target is not DECODE
        or request.row is None
        or event.row is not None
        or event.cached_len
        or event.num_retractions != track.ways_back
        or event.computed_len != track.cached + track.computed
        or (request.planned_end is not None and event.computed_len != request.planned_end)
        or request.token_step == event.step
        or event.output_len != request.outputs + 1
    ):
        return False
    watch.queue.changes += 1
    request.token_step = event.step
    request.outputs = event.output_len
    request.planned_end = None
    books.set_state(request, DECODE)
    return True


def ends(books: Shadow, watch: Watch, event: RequestTransitioned) -> bool:
    """From decoding to its end, with every token that it was given, and its row."""
    rid, row, queue = event.rid, event.row, watch.queue
    request, track = books.requests.get(rid), queue.live.get(rid)
    if (
        request is None
        or track is None
        or request.state is not DECODE
        or event.source is not DECODE
        or event.target is not FINISHED
        or row is None
        or row != request.row
        or books.rows.get(row) != rid
        or event.cause not in _ENDS
        or event.cached_len
        or event.num_retractions != track.ways_back
        or event.output_len > request.max_new
        or event.output_len != books.outputs_due(request, event)
        or rid in queue.waiting
    ):
        return False
    queue.changes += 1
    queue.end(track, event)
    watch.meters.on_transition(track, event)
    watch.spans.on_end(event)
    if not queue.live:
        watch.meters.promising = None
    del books.rows[row]
    books.leaving[rid] = (request, row, event.seq, True)
    request.row = request.cursor = request.planned_end = None
    books.remember_end(rid, event.seq)
    books.set_state(request, FINISHED)
    return True


#: Cause → what follows a transition of that cause when it is the usual one; any other end is an `ends`.
BY_CAUSE: Final = {ARRIVE: arrives, ADMIT: is_admitted, FINAL_CHUNK: completes_prompt}
