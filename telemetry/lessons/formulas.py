"""Formulas. Owns: arithmetic written out with this step's numbers, never against what the core recorded.

The terms are read from the state, the result from the record. Where terms do not come out at the recorded result (a
pricing that these lines do not describe), only the result is written: a lesson shows less rather than something wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from engine.request import Request
from engine.scheduler.accounting import ReferenceAccounting
from engine.scheduler.decision import AdmissionDecision, LedgerView, Reason
from engine.scheduler.plan import StepPlan
from engine.scheduler.state import SchedulerState
from telemetry.lessons.moment import Formula
from telemetry.lessons.words import number


class Term(NamedTuple):
    """One summand: its value in tokens, how it is written, and its sign."""

    value: float
    shown: str
    is_minus: bool = False

    @property
    def signed(self) -> float:
        return -self.value if self.is_minus else self.value


def plus(name: str, value: float) -> Term:
    return Term(value, f"{name} {number(value)}")


def minus(name: str, value: float) -> Term:
    return Term(value, f"{name} {number(value)}", is_minus=True)


def total(name: str, terms: Sequence[Term], recorded: float) -> Formula:
    """`name = a 64 + b 50 = 114`."""
    if not math.isclose(sum(term.signed for term in terms), recorded, abs_tol=1e-6):
        return Formula(f"{name} = {number(recorded)}")
    text = "".join(
        f"{'' if not place else ' - ' if term.is_minus else ' + '}{term.shown}" for place, term in enumerate(terms)
    )
    return Formula(
        f"{name} = {text}"
        if len(terms) == 1 and text.endswith(f" {number(recorded)}")
        else f"{name} = {text} = {number(recorded)}"
    )


def opening(state: SchedulerState, plan: StepPlan, *, free: int, evictable: int) -> list[Formula]:
    """How the four ledgers of a pass come about. `free` and `evictable` are pages."""
    opened, config, size = plan.budget_open, state.config, state.kv.page_size
    assert opened is not None, f"step {plan.step} made no pass"
    riding = plan.mixed_rows
    chunk = plan.chunk_size if plan.chunk_size is not None else config.chunked_prefill_size
    ride = [minus("decode rows", riding)] if riding else []
    lines = [total("rem_input", [plus("max_prefill_tokens", config.max_prefill_tokens), *ride], opened.rem_input)]
    if chunk is not None and opened.rem_chunk is not None:
        lines.append(total("rem_chunk", [plus("chunked_prefill_size", chunk), *ride], opened.rem_chunk))
    room = [
        Term(free * size, f"free {free}×{size}"),
        Term(evictable * size, f"evictable {evictable}×{size}"),
    ]
    now = sum(term.value for term in room) - opened.remaining_current
    taken = [minus("decode rows", now)] if now else []
    lines.append(total("remaining_current", [*room, *taken], opened.remaining_current))
    promised = _promised(state, plan)
    if promised is not None:
        lines.append(promised)
    lines.append(
        total("remaining_total", [*room, *taken, minus("promised", plan.promised_tokens)], opened.remaining_total)
    )
    return lines


def _promised(state: SchedulerState, plan: StepPlan) -> Formula | None:
    """`promised = 8 × (max_new 64 - outputs 4) × ratio 0.7 + …`; None when nothing is."""
    if not state.running and not plan.promised_tokens:
        return None
    if not isinstance(state.accounting, ReferenceAccounting):
        return Formula(f"promised = {number(plan.promised_tokens)}")
    groups: dict[tuple[int, int], int] = {}
    for request in state.running:
        key = (request.max_new_tokens, request.output_len)
        groups[key] = groups.get(key, 0) + 1
    ratio = plan.ratio
    clip = state.config.clip_max_new_tokens
    terms = [
        Term(
            count * min(max_new - outputs, clip) * ratio,
            f"{f'{count} × ' if count > 1 else ''}(max_new {max_new} - outputs {outputs}) × {ratio:.4g}",
        )
        for (max_new, outputs), count in groups.items()
    ]
    return total("promised", terms, plan.promised_tokens)


def asked(state: SchedulerState, request: Request, found: AdmissionDecision) -> list[Formula]:
    """What a candidate asks of the memory: extend, need and have."""
    outputs = found.prefix_len + found.candidate_extend - request.prompt_len
    has = [plus("outputs", outputs)] if outputs else []
    lines = [
        total(
            "extend",
            [plus("prompt", request.prompt_len), *has, minus("cached", found.prefix_len)],
            found.candidate_extend,
        )
    ]
    if found.kv_need is None or found.kv_limit is None:
        return lines
    left = min(max(request.max_new_tokens - outputs, 0), state.config.clip_max_new_tokens)
    size = state.kv.page_size
    if isinstance(state.accounting, ReferenceAccounting):
        # Outputs that it has already are part of what is computed, and not to come again.
        more = (
            Term(left, f"(max_new {request.max_new_tokens} - outputs {outputs})") if outputs else plus("max_new", left)
        )
        terms = [plus("extend", found.candidate_extend), more, plus("page", size)]
    else:
        whole = request.prompt_len + outputs + max(left - 1, 0)
        terms = [
            Term(_up(whole, size), f"ceil{size}(prompt {request.prompt_len + outputs} + max_new {left} - 1)"),
            minus("cached", found.prefix_len),
        ]
    lines.append(total("need", terms, found.kv_need))
    pinned = found.before.remaining_total - found.kv_limit
    locks = [minus("pinned", pinned)] if pinned else []
    lines.append(total("have", [plus("remaining_total", found.before.remaining_total), *locks], found.kv_limit))
    return lines


def admitted(state: SchedulerState, found: AdmissionDecision, *, unit: int) -> list[Formula]:
    """The tests that an admitted candidate passed, and what it is charged. `unit`: a cut is a multiple of it."""
    lines, size = [], state.kv.page_size
    if found.kv_need is not None and found.kv_limit is not None:
        sign = "<" if isinstance(state.accounting, ReferenceAccounting) else "<="
        lines.append(Formula(f"need {number(found.kv_need)} {sign} have {number(found.kv_limit)}"))
    chunk = found.before.rem_chunk
    if chunk is not None and not found.is_continuation:
        charge = state.accounting.rounded(found.candidate_extend)
        asks = f"ceil{size}(extend {found.candidate_extend}) {charge}"
        if not found.is_chunked:
            lines.append(Formula(f"{asks} <= rem_chunk {chunk} -> extend {found.selected_extend}"))
        else:
            cut = (found.prefix_len + chunk // unit * unit) // size * size - found.prefix_len
            how = f"floor{unit}(rem_chunk {chunk})" if cut == found.selected_extend else "extend"
            lines.append(Formula(f"{asks} > rem_chunk {chunk} -> {how} {found.selected_extend}"))
    return lines + charges(state, found)


def continued(plan: StepPlan, found: AdmissionDecision) -> list[Formula]:
    """Why the continuation gets as much as it gets."""
    rest, before = found.candidate_extend, found.before
    lines = [Formula(f"rest = prompt {found.prefix_len + rest} - done {found.prefix_len} = {rest}")]
    if before.rem_chunk is None:
        return lines
    sides = {"rem_chunk": before.rem_chunk, "remaining_total": int(before.remaining_total)}
    if plan.chunk_limit is not None:
        sides["cap"] = plan.chunk_limit
    if found.is_admitted and min([rest, *sides.values()]) == found.selected_extend:
        shown = ", ".join(f"{name} {value}" for name, value in sides.items())
        lines.append(Formula(f"extend = min(rest {rest}, {shown}) = {found.selected_extend}"))
    else:
        lines.append(Formula(f"extend = {found.selected_extend}"))
    return lines


def charges(state: SchedulerState, found: AdmissionDecision) -> list[Formula]:
    """What each ledger loses by an admission."""
    before, after, size = found.before, found.after, state.kv.page_size
    extend = found.selected_extend
    rounded = state.accounting.rounded(extend)
    shown = f"extend {extend}" if rounded == extend else f"ceil{size}(extend {extend}) {rounded}"
    piece = Term(rounded, shown, is_minus=True)
    lines = [total("rem_input", [plus("rem_input", before.rem_input), piece], after.rem_input)]
    if before.rem_chunk is not None and after.rem_chunk is not None:
        lines.append(total("rem_chunk", [plus("rem_chunk", before.rem_chunk), piece], after.rem_chunk))
    spare = [minus("page", size)] if isinstance(state.accounting, ReferenceAccounting) else []
    pinned = before.remaining_current - after.remaining_current - rounded - (size if spare else 0)
    locks = [minus("pinned", pinned)] if pinned > 0 else []
    lines.append(
        total(
            "remaining_current",
            [plus("remaining_current", before.remaining_current), *locks, piece, *spare],
            after.remaining_current,
        )
    )
    promise = [minus("max_new", found.reserved_new_tokens)] if found.reserved_new_tokens else []
    lines.append(
        total(
            "remaining_total",
            [plus("remaining_total", before.remaining_total), *locks, piece, *spare, *promise],
            after.remaining_total,
        )
    )
    return lines


def refused(found: AdmissionDecision, *, size: int) -> list[Formula]:
    """The test that said no."""
    ends = f"-> {found.reason.value} ({found.result.value})"
    if found.need is None or found.have is None:
        return [Formula(ends.removeprefix("-> "))]
    need, have = number(found.need), number(found.have)
    match found.reason:
        case Reason.CHUNK_BELOW_PAGE:
            return (
                [Formula(f"floor{size}(rem_chunk {have}) = 0 {ends}")]
                if found.have < size
                else [Formula(f"smallest piece {need} > rem_chunk {have} {ends}")]
            )
        case Reason.ROWS_EXHAUSTED:
            return [Formula(f"rows needed {need} > rows {have} {ends}")]
        case Reason.PREFILL_MAX_REACHED:
            return [Formula(f"prompts of the batch {need} > prefill_max_requests {have} {ends}")]
        case Reason.FULL_FLAG_SET:
            return [Formula(ends.removeprefix("-> "))]
        case _:
            sign = ">" if found.need > found.have else ">="
            return [Formula(f"need {need} {sign} have {have} {ends}")]


def growth(*, needed: int, free: int, evictable: int, fits: bool) -> Formula:
    """The test of a decode step, in pages."""
    room = free + evictable
    sign = "<=" if fits else ">"
    return Formula(f"pages needed {needed} {sign} free {free} + evictable {evictable} = {room}")


def ratio_after_retraction(plan: StepPlan, outputs_then: dict[str, tuple[int, int]]) -> Formula:
    """`ratio = min(1, (outputs 40 + 20 × 2) / (max_new 200 + 1))`. `outputs_then`: rid -> (outputs, max_new)."""
    staying = [outputs_then[rid] for rid in plan.decodes]
    outputs, limits = sum(each[0] for each in staying), sum(each[1] for each in staying)
    count = len(staying)
    if not staying or not math.isclose(min(1.0, (outputs + 20 * count) / (limits + 1)), plan.ratio_after):
        return Formula(f"ratio = {plan.ratio_after:.4g}")
    return Formula(
        f"ratio = min(1, (outputs {outputs} + 20 × {count}) / (max_new {limits} + 1)) = {plan.ratio_after:.4g}"
    )


def ledger(view: LedgerView, name: str) -> float | None:
    """One of the four by its name."""
    value: float | None = getattr(view, name)
    return value


def _up(tokens: int, size: int) -> int:
    return -(-tokens // size) * size
