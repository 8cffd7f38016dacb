"""Words of policies. Owns: what each policy puts first, and the sentence about a request that later ones overtook."""

from __future__ import annotations

from typing import Final

from engine.config import Policy
from telemetry.explain_words import amount, passes, requests
from telemetry.observe import Overtaker
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
#: Who goes first of those that the policy puts alike, and what may stand behind it all the same. A shuffle has no ties.
TIES: Final = {
    Policy.FCFS: mark("between equals, who came first goes first"),
    Policy.LPM: mark(
        "between equals, who stood first in the last pass goes first, and who shares its first 32 tokens, not cached "
        "yet, with one ahead goes last"
    ),
    Policy.DFS_WEIGHT: mark("within a branch, who stood first in the last pass goes first"),
    Policy.HRRN: mark(
        "between equals, the id that sorts first as text goes first, and who shares its first 32 tokens, not cached "
        "yet, with one ahead goes last"
    ),
    Policy.SHORTEST_PREFILL_FIRST: mark(
        "between equals, who came first goes first, and who shares its first 32 tokens, not cached yet, with one ahead "
        "goes last"
    ),
    Policy.LOF: mark("between equals, who stood first in the last pass goes first"),
    Policy.ROUTING_KEY: mark("between equals, who stood first in the last pass goes first"),
}
#: The same number on both sides: it decided nothing.
_EQUAL: Final = {
    "cached_tokens": mark("its cached prefix and that of {rid} were {own} tokens each"),
    "uncached_tokens": mark("its uncached part and that of {rid} were {own} tokens each"),
    "max_new_tokens": mark("its max_tokens and that of {rid} were {own} each"),
    "priority": mark("its priority and that of {rid} were {own} each"),
}
#: Keys of which more goes first; of the uncached tokens fewer do, of a priority that is configured.
_MORE_FIRST: Final = {"cached_tokens": True, "max_new_tokens": True, "uncached_tokens": False}
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


def overtaker_words(last: Overtaker) -> str:
    """By which rule the last later comer went first: what the pass ordered by, both sides, and what decided a tie."""
    told = {"step": str(last.step), "rule": rule_words(last.policy, last.order_key), "rid": last.rid}
    keys, tie = compared(last), tie_words(last.policy)
    if keys and not _decided(last) and tie:
        return t("Step {step} ordered by {rule}: {keys}; {tie}.", keys=keys, tie=tie, **told)
    if keys:
        return t("Step {step} ordered by {rule}: {keys}.", keys=keys, **told)
    if tie:
        return t("Step {step} ordered by {rule}: {rid} went first; {tie}.", tie=tie, **told)
    return t("Step {step} ordered by {rule}: {rid} went first.", **told)


def rule_and_tie(policy: str) -> str:
    """The rule with what decides between equals: who was passed over may have been one of them."""
    rule, tie = rule_words(policy), tie_words(policy)
    return t("{rule} ({tie})", rule=rule, tie=tie) if tie else rule


def tie_words(policy: str) -> str:
    """Who goes first of equals; "" for a policy that knows none."""
    said = TIES.get(Policy(policy)) if policy in set(Policy) else None
    return t(said) if said is not None else ""


def compared(last: Overtaker) -> str:
    """`its cached prefix is 0 tokens, that of r7 was 96 tokens`; empty where the records do not have it."""
    own, other = last.own_key, last.key
    if last.order_key not in _COMPARED or other is None:
        return ""
    both_known, own_unknown = _COMPARED[last.order_key]
    if own is None:
        return t(own_unknown, rid=last.rid, other=amount(other))
    if own == other:
        return t(_EQUAL[last.order_key], own=amount(own), rid=last.rid)
    return t(both_known, own=amount(own), rid=last.rid, other=amount(other))


def _decided(last: Overtaker) -> bool:
    """Whether the two numbers alone put the later comer first; so they do where one of them is not known."""
    own, other = last.own_key, last.key
    if own is None or other is None:
        return True
    more_first = _MORE_FIRST.get(last.order_key)
    return own != other if more_first is None else (other > own if more_first else other < own)


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
