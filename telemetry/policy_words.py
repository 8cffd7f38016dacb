"""Words of policies. Owns: what each policy puts first, and the sentence about a request that later ones overtook."""

from __future__ import annotations

from typing import Final

from engine.config import Policy
from telemetry.explain_words import amount, passes, requests
from telemetry.words import mark, t

#: What comes first under each policy.
PUTS_FIRST: Final = {
    Policy.FCFS: mark("who came first"),
    Policy.LPM: mark("the longest cached prefix"),
    Policy.DFS_WEIGHT: mark("the branch of the prefix tree that most requests share"),
    Policy.HRRN: mark("the longest wait for each token to compute"),
    Policy.SHORTEST_PREFILL_FIRST: mark("the fewest uncached tokens"),
    Policy.LOF: mark("the largest max_tokens"),
    Policy.ROUTING_KEY: mark("the routing keys that run most"),
}
#: What a pass sorted by, as `PassRow.order_key` names it: both sides are known, and its own is not.
_COMPARED: Final = {
    "cached_tokens": (
        mark("its cached prefix is {own} tokens, that of {rid} was {other} tokens"),
        mark("the cached prefix of {rid} was {other} tokens, its own is not known before a pass looks at it"),
    ),
    "uncached_tokens": (
        mark("its uncached part is {own} tokens, that of {rid} was {other} tokens"),
        mark("the uncached part of {rid} was {other} tokens, its own is not known before a pass looks at it"),
    ),
    "max_new_tokens": (
        mark("its max_tokens is {own}, that of {rid} was {other}"),
        mark("the max_tokens of {rid} was {other}, its own is not known before a pass looks at it"),
    ),
    "priority": (
        mark("its priority is {own}, that of {rid} was {other}"),
        mark("the priority of {rid} was {other}, its own is not known before a pass looks at it"),
    ),
}


def rule_words(policy: str, order_key: str = "") -> str:
    """`lpm, which puts the longest cached prefix first`; a policy that puts nobody in particular first is its name."""
    if order_key == "priority":
        return t("{policy}, which puts the most important first", policy=policy)
    first = PUTS_FIRST.get(Policy(policy)) if policy in set(Policy) else None
    return t("{policy}, which puts {first} first", policy=policy, first=t(first)) if first is not None else policy


def compared(order_key: str, own: float | None, other: float | None, rid: str) -> str:
    """`its cached prefix is 0 tokens, that of r7 was 96 tokens`; empty where the records do not have it."""
    if order_key not in _COMPARED or other is None:
        return ""
    both_known, own_unknown = _COMPARED[order_key]
    if own is None:
        return t(own_unknown, rid=rid, other=amount(other))
    return t(both_known, own=amount(own), rid=rid, other=amount(other))


def overtaken_words(count: int, overtakers: int) -> str:
    """In how many passes later ones went first, and how many of them were admitted meanwhile."""
    if not overtakers:  # pieces of a prompt that was admitted before
        return t("Passed over in {passes}, for further pieces of later prompts.", passes=passes(count))
    return t(
        "Passed over in {passes}, with {requests} that came later.", passes=passes(count), requests=requests(overtakers)
    )


def bound_words(policy: str) -> str:
    """What would change it."""
    if policy == Policy.FCFS:
        return t("A limit would bound this: max_overtakes (passes) or starvation_limit_s (seconds).")
    return t(
        "A limit would bound this: max_overtakes (passes) or starvation_limit_s (seconds); "
        "schedule_policy=fcfs looks at requests as they came."
    )
