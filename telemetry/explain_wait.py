"""Waiting in words. Owns: the sentences about one stay in the queue, and about refusals, from a recorded life.

Each sentence is one whole text, with alternatives where a part of it may be missing: no other language puts English
parts together in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from engine.scheduler.decision import Reason
from telemetry.explain_words import (
    REASON_WORDS,
    both,
    first_few,
    how_often,
    listed,
    need_have,
    passes,
    requests,
    span,
    steps_from,
    tokens,
)
from telemetry.life_facts import NoPass, NotReached, Refusals, SliceShare, Wait
from telemetry.policy_words import bound_words, rule_and_tie
from telemetry.words import t, tn

_NAMED: Final = 5
_C = TypeVar("_C", NotReached, NoPass)


def wait_told(wait: Wait) -> list[str]:
    """One stay in the queue: how long, then what kept it there, cause by cause."""
    details = [
        *(refused(refusals) for refusals in wait.refusals),
        *(_not_reached(stopped) for stopped in _by_reason(wait.not_reached)),
        *(_no_pass(skipped) for skipped in _by_reason(wait.no_pass)),
    ]
    if wait.slices_taken:
        details.append(_slices(wait.slices_taken))
    if wait.ahead:
        details.append(
            tn(
                wait.ahead_admitted,
                "Ahead of it: {requests}; {n} was admitted meanwhile.",
                "Ahead of it: {requests}; {n} were admitted meanwhile.",
                n=wait.ahead_admitted,
                requests=requests(wait.ahead),
            )
        )
    if wait.overtaken_passes:
        details.append(_overtaken(wait))
    return [_how_long(wait), *(f"  {detail}" for detail in details)]


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
    """How often one reason refused it, and the numbers of the last time."""
    test = need_have(refusals.reason, refusals.need, refusals.have)
    told = {
        "times": how_often(refusals.count),
        "steps": steps_from(refusals.first_step, refusals.last_step),
        "reason": refusals.reason,
        "why": t(REASON_WORDS[refusals.reason]),
        "test": test,
    }
    if not test:
        return t("Refused {times} ({steps}) by {reason}: {why}.", **told)
    if refusals.count > 1:
        return t("Refused {times} ({steps}) by {reason}: {why}; at the last one {test}.", **told)
    return t("Refused {times} ({steps}) by {reason}: {why}: {test}.", **told)


def _not_reached(stopped: list[NotReached]) -> str:
    reason = stopped[0].reason
    enders = Counter({fact.rid: fact.count for fact in stopped if fact.rid is not None})
    told = {
        "times": how_often(sum(fact.count for fact in stopped)),
        "steps": _all_steps(stopped),
        "reason": reason,
        "why": t(REASON_WORDS[reason]),
    }
    if enders:
        return t(
            "Not looked at {times} ({steps}): the pass ended ahead of it, at {where}, by {reason} ({why}).",
            where=_counted(enders),
            **told,
        )
    return t("Not looked at {times} ({steps}): the pass ended before its turn by {reason} ({why}).", **told)


def _no_pass(skipped: list[NoPass]) -> str:
    reason = skipped[0].reason
    told = {
        "count": tn(sum(fact.count for fact in skipped), "{n} step", "{n} steps"),
        "steps": _all_steps(skipped),
        "reason": reason,
        "why": t(REASON_WORDS[reason]),
    }
    marked = [fact for fact in skipped if fact.set_by is not None and fact.set_by_rid is not None]
    latest = max(marked, key=lambda fact: fact.last_step, default=None)
    by = latest.set_by if latest is not None else None
    if latest is None or by is None:
        return t("No prefill pass in {count} ({steps}) by {reason}: {why}.", **told)
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
            "No prefill pass in {count} ({steps}) by {reason}: {why} after refusing {refused}; "
            "last {rid} in step {step} by {last_reason}.",
            **told,
        )
    return t(
        "No prefill pass in {count} ({steps}) by {reason}: {why} after refusing {refused}; "
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
    """`r7 (12 times), r9 (3 times) and 4 others (5 times)`, most frequent first."""
    ranked = sorted(counts.items(), key=lambda entry: -entry[1])
    named = listed(_with(rid, how_often(count)) for rid, count in ranked[:_NAMED])
    rest = ranked[_NAMED:]
    return _and_others(named, len(rest), how_often(sum(n for _, n in rest))) if rest else named


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
    return steps_from(min(fact.first_step for fact in facts), max(fact.last_step for fact in facts))
