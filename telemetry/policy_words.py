"""Words of policies. Owns: what each policy puts first, and the sentence about a request that later ones overtook."""

from __future__ import annotations

from typing import Final

from engine.config import Policy
from telemetry.explain_words import amount, times

#: What comes first under each policy.
PUTS_FIRST: Final = {
    Policy.FCFS: "who came first",
    Policy.LPM: "the longest cached prefix",
    Policy.DFS_WEIGHT: "the branch of the prefix tree that most requests share",
    Policy.HRRN: "the longest wait for each token to compute",
    Policy.SHORTEST_PREFILL_FIRST: "the fewest uncached tokens",
    Policy.LOF: "the largest max_tokens",
    Policy.RANDOM: "nobody in particular: a hash decides",
    Policy.ROUTING_KEY: "the routing keys that run most",
}
#: What a pass sorted by, as `PassRow.order_key` names it, and its unit.
KEY_WORDS: Final = {
    "cached_tokens": ("cached prefix", " tokens"),
    "uncached_tokens": ("uncached part", " tokens"),
    "max_new_tokens": ("max_tokens", ""),
    "priority": ("priority", ""),
}


def rule_words(policy: str, order_key: str = "") -> str:
    """`lpm, which puts the longest cached prefix first`."""
    if order_key == "priority":
        return f"{policy}, which puts the most important first"
    first = PUTS_FIRST.get(Policy(policy)) if policy in set(Policy) else None
    return f"{policy}, which puts {first} first" if first and policy != Policy.RANDOM else policy


def compared(order_key: str, own: float | None, other: float | None, rid: str) -> str:
    """`its cached prefix is 0 tokens, that of r7 was 96`; empty where the records do not have it."""
    what, unit = KEY_WORDS.get(order_key, ("", ""))
    if not what or other is None:
        return ""
    if own is None:
        return f"the {what} of {rid} was {amount(other)}{unit}, its own is not known before a pass looks at it"
    return f"its {what} is {amount(own)}{unit}, that of {rid} was {amount(other)}{unit}"


def overtaken_words(passes: int, requests: int) -> str:
    """`2 passes, which admitted 33 requests that came later`."""
    if not requests:  # pieces of a prompt that was admitted before
        return f"{times(passes, 'pass', 'passes')}, for further pieces of later prompts"
    return f"{times(passes, 'pass', 'passes')}, with {times(requests, 'request')} that came later"


def bound_words(policy: str) -> str:
    """What would change it."""
    other = "" if policy == Policy.FCFS else "; schedule_policy=fcfs looks at requests as they came"
    return f"A limit would bound this: max_overtakes (passes) or starvation_limit_s (seconds){other}."
