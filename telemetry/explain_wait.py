"""Waiting in words. Owns: the sentences about one stay in the queue, and about refusals, from a recorded life.

Each sentence is one whole text, with alternatives where a part of it may be missing: no other language puts English
parts together in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

from engine.scheduler.decision import Reason
from telemetry.explain_words import (
    REASON_WORDS,
    apart,
    both,
    first_few,
    in_steps,
    is_telling,
    listed,
    need_have,
    other,
    passes,
    percent_of,
    requests,
    span,
    steps,
    tokens,
)
from telemetry.life_facts import HeldShare, NoPass, NotReached, Refusals, SliceShare, Wait
from telemetry.policy_words import bound_words, rule_and_tie
from telemetry.words import t, tn

_NAMED: Final = 5
_C = TypeVar("_C", NotReached, NoPass)


class WaitLine(NamedTuple):
    """A sentence about a stay, and when what it tells began. `step` is None where that is no step."""

    at_ns: int
    step: int | None
    text: str


def wait_told(wait: Wait) -> list[WaitLine]:
    """One stay in the queue: how long and by what, then what kept it there, cause by cause, each from when it began."""
    details = []

    def tell(text: str, at_ns: int | None = None, step: int | None = None) -> None:
        details.append(WaitLine(wait.from_ns if at_ns is None else at_ns, step, f"  {text}"))

    if len(wait.held) > 1:
        tell(_shares(wait))
    if wait.ahead:
        tell(
            tn(
                wait.ahead_admitted,
                "Ahead of it: {requests}; {n} was admitted meanwhile.",
                "Ahead of it: {requests}; {n} were admitted meanwhile.",
                n=wait.ahead_admitted,
                requests=requests(wait.ahead),
            )
        )
    for refusals in wait.refusals:
        tell(refused(refusals), refusals.first_ns, refusals.first_step)
    for stopped in _by_reason(wait.not_reached):
        tell(_not_reached(stopped), *_first(stopped))
    for skipped in _by_reason(wait.no_pass):
        tell(_no_pass(skipped), *_first(skipped))
    if wait.slices_taken:
        tell(_slices(wait.slices_taken), wait.slices_ns)
    if wait.overtaken_passes:
        tell(_overtaken(wait), wait.overtaken_ns)
    return [WaitLine(wait.from_ns, wait.from_step, _how_long(wait)), *sorted(details, key=lambda line: line.at_ns)]


def _first(facts: Sequence[NotReached | NoPass]) -> tuple[int | None, int]:
    """When the first of them began, and its step."""
    first = min(facts, key=lambda fact: fact.first_step)
    return first.first_ns, first.first_step


def _shares(wait: Wait) -> str:
    """What held it, by share of the stay: what holds a request at last is often the least of it."""
    total = sum(share.ns for share in wait.held)
    named = [share for share in wait.held[:_NAMED] if is_telling(share.ns, total)]
    told = [
        t("{cause} {time} ({share})", cause=_holder(share), time=span(share.ns), share=percent_of(share.ns, total))
        for share in named
    ]
    return t(
        "By what held it: {shares}.", shares=apart([*told, *other(total - sum(share.ns for share in named), total)])
    )


def _holder(share: HeldShare) -> str:
    if share.reason is None:
        return t("no pass yet")
    return share.reason if share.is_own else t("{reason} ahead of it", reason=share.reason)


def _how_long(wait: Wait) -> str:
    told = {"time": span(wait.to_ns - wait.from_ns), "cause": wait.after}
    is_first = wait.after == "arrive"
    if wait.end == "admitted" and wait.passes == 1 and not wait.no_pass:
        if is_first:
            return t("Waited {time} and was admitted by the first pass, step {step}.", step=wait.to_step, **told)
        return t(
            "Back in the queue ({cause}), waited {time} and was admitted by the first pass, step {step}.",
            step=wait.to_step,
            **told,
        )
    if wait.to_step == wait.from_step:
        return _no_step(is_first=is_first, is_over=wait.end != "waiting", told=told)
    told |= {
        "first": str(wait.from_step + 1),
        "last": str(max(wait.to_step, wait.from_step + 1)),
        "passes": tn(wait.passes, "{n} prefill pass", "{n} prefill passes"),
    }
    if wait.end != "waiting":
        if is_first:
            return t("Waited {time}, steps {first} to {last}, {passes}.", **told)
        return t("Back in the queue ({cause}), waited {time}, steps {first} to {last}, {passes}.", **told)
    if is_first:
        return t("Still waiting when the record ends: so far {time}, steps {first} to {last}, {passes}.", **told)
    return t("Back in the queue ({cause}), waited so far, {time}, steps {first} to {last}, {passes}.", **told)


def _no_step(*, is_first: bool, is_over: bool, told: dict[str, str]) -> str:
    if is_over and is_first:
        return t("Waited {time}; no step was planned meanwhile.", **told)
    if is_over:
        return t("Back in the queue ({cause}), waited {time}; no step was planned meanwhile.", **told)
    if is_first:
        return t("Still waiting when the record ends: so far {time}; no step was planned meanwhile.", **told)
    return t("Back in the queue ({cause}), waited so far, {time}; no step was planned meanwhile.", **told)


def refused(refusals: Refusals) -> str:
    """In how many steps one reason refused it, and the numbers of the last time."""
    test = need_have(refusals.reason, refusals.need, refusals.have)
    told = {
        "steps": in_steps(refusals.count, refusals.first_step, refusals.last_step),
        "reason": refusals.reason,
        "why": t(REASON_WORDS[refusals.reason]),
        "test": test,
    }
    if not test:
        return t("Refused in {steps} by {reason}: {why}.", **told)
    if refusals.count > 1:
        return t("Refused in {steps} by {reason}: {why}; at the last one {test}.", **told)
    return t("Refused in {steps} by {reason}: {why}: {test}.", **told)


def _not_reached(stopped: list[NotReached]) -> str:
    reason = stopped[0].reason
    enders = Counter({fact.rid: fact.count for fact in stopped if fact.rid is not None})
    told = {
        "steps": _all_steps(stopped),
        "reason": reason,
        "why": t(REASON_WORDS[reason]),
    }
    if enders:
        return t(
            "Not looked at in {steps}: the pass ended ahead of it, at {where}, by {reason} ({why}).",
            where=_counted(enders),
            **told,
        )
    return t("Not looked at in {steps}: the pass ended before its turn by {reason} ({why}).", **told)


def _no_pass(skipped: list[NoPass]) -> str:
    reason = skipped[0].reason
    told = {
        "steps": _all_steps(skipped),
        "reason": reason,
        "why": t(REASON_WORDS[reason]),
    }
    marked = [fact for fact in skipped if fact.set_by is not None and fact.set_by_rid is not None]
    latest = max(marked, key=lambda fact: fact.last_step, default=None)
    by = latest.set_by if latest is not None else None
    if latest is None or by is None:
        return t("No prefill pass in {steps} by {reason}: {why}.", **told)
    test = need_have(by.reason, by.need, by.have)
    told |= {
        "refused": _counted(Counter({str(fact.set_by_rid): fact.count for fact in marked})),
        "rid": str(latest.set_by_rid),
        "step": str(by.last_step),
        "last_reason": by.reason,
        "test": test,
    }
    if not test:
        return t(
            "No prefill pass in {steps} by {reason}: {why} after refusing {refused}; "
            "last {rid} in step {step} by {last_reason}.",
            **told,
        )
    return t(
        "No prefill pass in {steps} by {reason}: {why} after refusing {refused}; "
        "last {rid} in step {step} by {last_reason}: {test}.",
        **told,
    )


def _slices(taken: Sequence[SliceShare]) -> str:
    """Who got the prefill budget in its stead: the refusals name only those that did not."""
    named = listed(_with(share.rid, tokens(share.tokens)) for share in taken[:_NAMED])
    rest = taken[_NAMED:]
    names = _and_others(named, len(rest), tokens(sum(each.tokens for each in rest))) if rest else named
    return t("The steps that had nothing left for it computed prompts of {names}.", names=names)


def _overtaken(wait: Wait) -> str:
    told = {
        "passes": passes(wait.overtaken_passes),
        "names": first_few(wait.overtaken_by, _NAMED) if wait.overtaken_by else "",
        "rules": both(rule_and_tie(policy) for policy in wait.overtaken_under) if wait.overtaken_under else "",
        "bound": bound_words(wait.overtaken_under[-1] if wait.overtaken_under else ""),
    }
    if told["names"] and told["rules"]:
        return t("Passed over by {names}, which came later, in {passes}, ordered by {rules}. {bound}", **told)
    if told["names"]:
        return t("Passed over by {names}, which came later, in {passes}. {bound}", **told)
    if told["rules"]:
        return t("Passed over in {passes}, ordered by {rules}. {bound}", **told)
    return t("Passed over in {passes}. {bound}", **told)


def _by_reason(facts: Iterable[_C]) -> list[list[_C]]:
    """Facts of one reason together, in order of first appearance."""
    groups: dict[Reason, list[_C]] = {}
    for fact in facts:
        groups.setdefault(fact.reason, []).append(fact)
    return list(groups.values())


def _counted(counts: Counter[str]) -> str:
    """`r7 (12 steps), r9 (3 steps) and 4 others (5 steps)`, most frequent first."""
    ranked = sorted(counts.items(), key=lambda entry: -entry[1])
    named = listed(_with(rid, steps(count)) for rid, count in ranked[:_NAMED])
    rest = ranked[_NAMED:]
    return _and_others(named, len(rest), steps(sum(n for _, n in rest))) if rest else named


def _with(name: str, measure: str) -> str:
    return t("{name} ({amount})", name=name, amount=measure)


def _and_others(names: str, count: int, measure: str) -> str:
    return tn(
        count,
        "{names} and {n} other ({amount})",
        "{names} and {n} others ({amount})",
        names=names,
        amount=measure,
    )


def _all_steps(facts: Sequence[NotReached | NoPass]) -> str:
    first, last = min(fact.first_step for fact in facts), max(fact.last_step for fact in facts)
    return in_steps(sum(fact.count for fact in facts), first, last)
