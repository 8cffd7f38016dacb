"""Reply. Owns: what comes back for one HTTP request: acceptance once, outputs in order, one end per engine request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.llm_engine import TokenOutput
from engine.request import FinishReason


class Reply:
    """Lives on the event loop; nothing here may be called from another thread."""

    def __init__(self, rids: Iterable[str]) -> None:
        self._live = dict.fromkeys(rids)
        self._outputs: list[TokenOutput] = []
        self._news = asyncio.Event()
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def live_rids(self) -> tuple[str, ...]:
        """Requests that have had no end yet."""
        return tuple(self._live)

    def settle(self, refusal: Exception | None) -> None:
        """Tell the submitter whether the engine has taken its requests. One that was cancelled does not listen."""
        if self.accepted.done():
            return
        if refusal is None:
            self.accepted.set_result(None)
        else:
            self.accepted.set_exception(refusal)

    def deliver(self, output: TokenOutput) -> None:
        """Take one output; anything after a request's end is dropped, so an end cannot come twice."""
        if output.rid not in self._live:
            return
        if output.finish is not None:
            del self._live[output.rid]
        self._outputs.append(output)
        self._news.set()

    def fail(self, error: Exception, finish: FinishReason, detail: str) -> None:
        """The engine will answer no more: refuse when not yet accepted, else end what is live."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self._live.clear()
            self._news.set()
            return
        for rid in self.live_rids:
            self.deliver(TokenOutput(rid, None, -1, finish=finish, detail=detail))

    async def batch(self) -> list[TokenOutput]:
        """Everything that has come since the last call, waiting for at least one; [] when every request has ended."""
        while not self._outputs:
            if not self._live:
                return []
            self._news.clear()
            await self._news.wait()
        outputs, self._outputs = self._outputs, []
        return outputs
