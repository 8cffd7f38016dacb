"""Who decodes, in the second books. Owns: the running requests, their output counts, and how much they may still grow.

A decode step gives one token to everybody who runs. That is one number (`ticks`), not one per request: the outputs of a
running request are what it came with and the ticks since, and the growth of all falls by as many as are near their end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from engine.events import RequestArrived
from engine.request import RequestState


class ShadowRequest:
    """One live request, counts only.

    outputs      output tokens
    cursor       tokens whose K/V is computed or planned: where the next piece must start; None outside prefill
    planned_end  end of the piece of the step in flight, None when it has none
    token_step   step whose output token a transition told before the outcome; it is in `outputs` already
    locks        locks held, all nodes together
    """

    __slots__ = (
        "_group",
        "_joined",
        "_outputs",
        "_shrinks_at",
        "cursor",
        "ignore_eos",
        "locks",
        "max_new",
        "planned_end",
        "prompt_len",
        "rid",
        "row",
        "state",
        "token_step",
    )

    def __init__(self, event: RequestArrived) -> None:
        self.rid = event.rid
        self.prompt_len = event.prompt_len
        self.max_new = event.max_new_tokens
        self.ignore_eos = event.ignore_eos
        self.state: RequestState | None = None
        self.cursor: int | None = None
        self.planned_end: int | None = None
        self.row: int | None = None
        self.locks = 0
        self.token_step = -1
        self._outputs = 0
        self._group: Running | None = None
        self._joined = 0
        self._shrinks_at = 0

    @property
    def outputs(self) -> int:
        group = self._group
        return self._outputs if group is None else self._outputs + group.ticks - self._joined

    @outputs.setter
    def outputs(self, outputs: int) -> None:
        group = self._group
        if group is None:
            self._outputs = outputs
        else:
            group.change(self, outputs)

    @property
    def seq_len(self) -> int:
        return self.prompt_len + self.outputs


def growth_of(request: ShadowRequest, *, clip: int, ratio: float, page_size: int) -> int:
    """Exact accounting: tokens of the pages that a running request is promised beyond those it holds."""
    computed = request.seq_len - 1
    left = min(request.max_new - request.outputs, clip) * (1.0 if request.ignore_eos else ratio)
    held = math.ceil(computed / page_size)
    return max(0, math.ceil((computed + max(left, 1)) / page_size) - held) * page_size


class Running(Mapping[str, ShadowRequest]):
    """The requests in decode by id, in the order in which they came to it.

    clip          most tokens of one request that are promised ahead
    plain_growth  tokens that they may still add, as far as they are promised: those that end at EOS
    eos_growth    the same of those that ignore EOS, whose length is known
    ticks         steps so far that gave every one of them a token
    named         all of them, in the order in which a plan or an outcome last named them all
    came, went    who began and who stopped to decode since then
    """

    def __init__(self, clip: int) -> None:
        self.clip = clip
        self.ticks = 0
        #: Of those that end at EOS, and of those that ignore it: tokens that they may still add.
        self.growth = [0, 0]
        #: How many of either kind lose growth with each tick, because less than `clip` is left.
        self._shrinking = [0, 0]
        #: tick -> how many of either kind begin to shrink with it
        self._begins: dict[int, list[int]] = {}
        self._requests: dict[str, ShadowRequest] = {}
        self.named: tuple[str, ...] = ()
        self.came: list[str] = []
        self.went: list[str] = []
        self._order: tuple[str, ...] | None = ()
        #: Outputs, most outputs, prompt lengths and ignore_eos of everybody as of a tick: int64 [running] each.
        self._arrays: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __getitem__(self, rid: str) -> ShadowRequest:
        return self._requests[rid]

    @property
    def plain_growth(self) -> int:
        return self.growth[0]

    @property
    def eos_growth(self) -> int:
        return self.growth[1]

    @property
    def order(self) -> tuple[str, ...]:
        """Their ids in the order in which they were last named, then those that came since."""
        if self._order is None:
            gone = set(self.went)
            stay = [rid for rid in self.named if rid not in gone] if gone else self.named
            self._order = (*stay, *self.came)
        return self._order

    def are(self, order: tuple[str, ...]) -> bool:
        """Whether `order` names the running requests, each once. If so, it is how they were last named.

        It hardly changes from step to step, and comparing tuples of the same strings is far quicker than sets: the same
        as before, or with those that came since at the end or, after a mixed step, in front.
        """
        now, came = self.order, len(self.came)
        if order != now and (
            len(order) != len(now)
            or (order != (*now[len(now) - came :], *now[: len(now) - came]) and set(order) != set(now))
        ):
            return False
        self.named = self._order = order
        if self.came or self.went:
            self.came, self.went = [], []
        return True

    def tick(self) -> None:
        """Everybody got one token."""
        growth, shrinking = self.growth, self._shrinking
        begin = self._begins.pop(self.ticks, None)
        if begin is not None:
            shrinking[0] += begin[0]
            shrinking[1] += begin[1]
        growth[0] -= shrinking[0]
        growth[1] -= shrinking[1]
        self.ticks += 1

    def pages_promised(self, ratio: float, page_size: int) -> tuple[int, int]:
        """Exact accounting, in tokens: pages that they are promised beyond those they hold, and those that the next
        token of each claims. The K/V of the last output token is never written."""
        if self._arrays is None:
            rows = [(r.outputs, r.max_new, r.prompt_len, r.ignore_eos) for r in self._requests.values()]
            self._arrays = self.ticks, np.array(rows, dtype=np.int64).reshape(-1, 4).T
        since, (came_with, most, prompts, ignore_eos) = self._arrays
        outputs = came_with + (self.ticks - since)
        computed = prompts + outputs - 1
        left = np.minimum(most - outputs, self.clip) * np.where(ignore_eos, 1.0, ratio)
        held = np.ceil(computed / page_size)
        grown = np.maximum(np.ceil((computed + np.maximum(left, 1)) / page_size) - held, 0)
        return int(grown.sum()) * page_size, int(np.count_nonzero(computed % page_size == 0)) * page_size

    def join(self, request: ShadowRequest) -> None:
        """`request` begins to decode."""
        if request.rid not in self._requests:
            self.came.append(request.rid)
            self._order = None
        self._requests[request.rid] = request
        self._enter(request)

    def leave(self, request: ShadowRequest) -> None:
        """`request` decodes no more; nothing when it did not."""
        rid = request.rid
        if self._requests.pop(rid, None) is not None:
            if rid in self.came:
                self.came.remove(rid)
            else:
                self.went.append(rid)
            self._order = None
            self._exit(request)

    def hold_back(self, request: ShadowRequest) -> None:
        """The last tick was not for `request`, which began to decode after the one before: it stays as it came."""
        self._arrays = None
        kind, begins = int(request.ignore_eos), request._shrinks_at
        request._joined += 1
        if begins < self.ticks:
            self.growth[kind] += 1
            return
        self._begins[begins][kind] -= 1
        if self._begins[begins] == [0, 0]:
            del self._begins[begins]
        self._begins.setdefault(begins + 1, [0, 0])[kind] += 1
        request._shrinks_at = begins + 1

    def change(self, request: ShadowRequest, outputs: int) -> None:
        """A running request has `outputs` tokens, whatever the ticks say."""
        self._exit(request)
        request.outputs = outputs
        self._enter(request)

    def _enter(self, request: ShadowRequest) -> None:
        self._arrays = None
        left, kind = request.max_new - request.outputs, int(request.ignore_eos)
        self.growth[kind] += min(left, self.clip)
        begins = self.ticks + max(left - self.clip, 0)
        counts = self._begins.get(begins)
        if counts is None:
            counts = self._begins[begins] = [0, 0]
        counts[kind] += 1
        request._shrinks_at, request._joined, request._group = begins, self.ticks, self

    def _exit(self, request: ShadowRequest) -> None:
        self._arrays = None
        request._outputs, request._group = request.outputs, None
        kind, begins = int(request.ignore_eos), request._shrinks_at
        self.growth[kind] -= min(request.max_new - request.outputs, self.clip)
        if begins < self.ticks:
            self._shrinking[kind] -= 1
            return
        counts = self._begins[begins]
        counts[kind] -= 1
        if counts == [0, 0]:
            del self._begins[begins]
