"""Siblings. Owns: choices of one prompt that wait outside the engine until the first of them has computed it.

Together in one step they would compute the same prompt once each; one step later its pages are in the tree. Lives on
the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.llm_engine import EngineRequest, TokenOutput
from engine.request import FinishReason

Held = dict[str, list[EngineRequest]]
"""Requests behind another, by the id of that one."""


class Siblings:
    """Who waits behind whom. `share_from`: tokens of a prompt that make it worth a step; None: nobody waits."""

    def __init__(self, share_from: int | None) -> None:
        self._share_from = share_from
        self._behind: Held = {}
        self._first_of: dict[str, str] = {}
        self._since: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._first_of)

    def divide(self, requests: Sequence[EngineRequest]) -> tuple[list[EngineRequest], Held]:
        """Who goes to the engine now, and who waits behind whom. Choices of one prompt hold the same tuple of it."""
        now: list[EngineRequest] = []
        behind: Held = {}
        for request in requests:
            shares = self._share_from is not None and len(request.prompt_ids) >= self._share_from
            if shares and now and request.prompt_ids is now[-1].prompt_ids:
                behind.setdefault(now[-1].rid, []).append(request)
            else:
                now.append(request)
        return now, behind

    def hold(self, behind: Held, now_ns: int = 0) -> None:
        """Keep these until `follow` lets them go. Their wait began now, unless it had begun before."""
        for first, requests in behind.items():
            self._behind[first] = requests
            for request in requests:
                self._since.setdefault(request.rid, now_ns)
            self._first_of.update((request.rid, first) for request in requests)

    def drop(self, rid: str) -> bool:
        """Forget a request that waits here; False when it does not."""
        first = self._first_of.pop(rid, None)
        if first is None:
            return False
        del self._since[rid]
        left = [request for request in self._behind[first] if request.rid != rid]
        if left:
            self._behind[first] = left
        else:
            del self._behind[first]
        return True

    def since(self, rid: str) -> int:
        """When the wait of a request that `follow` let go began; it is forgotten here then."""
        return self._since.pop(rid)

    def follow(self, outputs: Sequence[TokenOutput]) -> tuple[list[EngineRequest], list[TokenOutput]]:
        """Who goes to the engine after a step with these `outputs`, and the ends of those who share a refusal.

        When the first ended without a token, the next one computes the prompt and the others wait on.
        """
        freed: list[EngineRequest] = []
        ends: list[TokenOutput] = []
        for output in outputs:
            requests = self._behind.pop(output.rid, None)
            if requests is None:
                continue
            for request in requests:
                del self._first_of[request.rid]
            if output.finish is FinishReason.REFUSED:
                for request in requests:
                    del self._since[request.rid]
                ends += [msgspec.structs.replace(output, rid=request.rid) for request in requests]
            elif output.token_id is None:
                freed.append(requests[0])
                self.hold({requests[0].rid: requests[1:]} if len(requests) > 1 else {})
            else:
                freed += requests
        return freed, ends
