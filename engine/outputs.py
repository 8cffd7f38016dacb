"""Outputs. Owns: what clients see of their requests, made of token values, and what is kept of each for that."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.executor.base import StepResult, TokenLogprobs
from engine.request import FinishReason, Request
from engine.scheduler.flight import Flight
from engine.scheduler.plan import StepOutcome, StepPlan, StepTimes
from engine.token_store import TokenStore


class TokenOutput(msgspec.Struct, frozen=True):
    """One output token, or an end without a token (abort, error: token_id None).

    cached_tokens  prompt tokens found in the cache at the request's first admission
    """

    rid: str
    token_id: int | None
    output_index: int
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    detail: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0


class OutputDesk:
    """Turns results into outputs and outcomes. `requests`: the live ones of the scheduler, by id."""

    def __init__(self, tokens: TokenStore, requests: Mapping[str, Request]) -> None:
        self._tokens = tokens
        self._requests = requests
        self._cached_tokens: dict[str, int] = {}
        self._prompt_tokens: dict[str, int] = {}

    def open(self, rid: str, prompt_len: int) -> None:
        """A request was taken."""
        self._prompt_tokens[rid] = prompt_len

    def remember_hits(self, plan: StepPlan) -> None:
        """Cached prompt tokens count once, at the admission that counts (FR-27)."""
        for decision in plan.decisions:
            if decision.is_admitted and not decision.is_continuation and decision.rid not in self._cached_tokens:
                self._cached_tokens[decision.rid] = min(decision.prefix_len, self._prompt_tokens[decision.rid])

    def retraction_ends(self, plan: StepPlan) -> list[TokenOutput]:
        """Ends of those that the plan found no memory for, whoever else would give way."""
        return [
            self.end(victim.rid, FinishReason.LENGTH, "kv_pool_exhausted")
            for victim in plan.retractions
            if victim.aborted
        ]

    def settle(
        self, flight: Flight, result: StepResult | None, times: StepTimes
    ) -> tuple[list[TokenOutput], StepOutcome]:
        """Turn token values into an outcome for the scheduler, and outputs for clients. Tokens of void rows go to
        nobody. `result` None: the executor raised."""
        plan, void = flight.plan, flight.void
        outputs: list[TokenOutput] = []
        if result is None:
            rids = dict.fromkeys([*(row.rid for row in plan.prefills), *plan.decodes])
            outputs.extend(self.end(rid, FinishReason.ERROR, "executor_failed") for rid in flight.wanted(tuple(rids)))
            return outputs, StepOutcome(plan.step, (), times, failed=True)
        rows = []
        for token in result.tokens:
            if void and token.rid in void:
                continue
            request = self._requests[token.rid]
            settled = self._tokens.settle(token.rid, token.token_id)
            rows.append(settled.row)
            finish, detail = settled.row.finish, settled.row.detail
            if request.abort_requested:
                finish, detail = FinishReason.ABORT, ""
            outputs.append(
                TokenOutput(
                    rid=token.rid,
                    token_id=token.token_id,
                    output_index=settled.output_index,
                    logprobs=token.logprobs,
                    finish=finish,
                    detail=detail,
                    cached_tokens=self._cached_tokens.get(token.rid, 0),
                    prompt_tokens=request.prompt_len,
                )
            )
        # A piece that is not the last brings no token, which else would carry the end of an abort in flight.
        outputs += [
            self.end(row.rid, FinishReason.ABORT, "")
            for row in plan.prefills
            if not row.is_last and row.rid not in void and self._requests[row.rid].abort_requested
        ]
        return outputs, StepOutcome(plan.step, tuple(rows), times)

    def end(self, rid: str, reason: FinishReason, detail: str) -> TokenOutput:
        """An end without a token."""
        output = TokenOutput(
            rid=rid,
            token_id=None,
            output_index=self._tokens.output_index(rid),
            finish=reason,
            detail=detail,
            cached_tokens=self._cached_tokens.get(rid, 0),
            prompt_tokens=self._prompt_tokens.get(rid, 0),
        )
        if reason in (FinishReason.ABORT, FinishReason.REFUSED):
            self.forget(rid)
        return output

    def forget_ended(self, outputs: list[TokenOutput]) -> None:
        """Those that end in `outputs` are over."""
        for output in outputs:
            if output.finish is not None:
                self.forget(output.rid)

    def forget(self, rid: str) -> None:
        """Nothing of the request is kept."""
        self._tokens.drop(rid)
        self._cached_tokens.pop(rid, None)
        self._prompt_tokens.pop(rid, None)
