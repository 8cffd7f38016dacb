"""The five workloads. Owns: what each request of W1 to W5 is, as seeded token ids; nothing about sending them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from telemetry.demo.trace import Scale, load_rows, scaled

#: Prompt ids are drawn from here, both ends included: past the special tokens of common vocabularies, within 49,152.
TOKEN_IDS: Final = (100, 47_999)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: prompt token ids, and how many tokens it must answer with (end-of-sequence is ignored)."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A named set of requests. `build` makes them from a generator: another seed, other ids, the same shape."""

    name: str
    sentence: str
    build: Callable[[random.Random], list[BenchRequest]]
    #: May requests of one repetition hit the cache of a server that has never seen them: only when they share a prefix.
    shares_prefix: bool = False
    #: May its arrivals be spread with a rate.
    takes_rate: bool = False

    def requests(self, *, seed: int, repetition: int) -> list[BenchRequest]:
        """The requests of one repetition. The same arguments give the same ids on every machine."""
        # Seeding with text is stable across Python versions, unlike hash().
        return self.build(random.Random(f"{self.name}/{seed}/{repetition}"))


def _ids(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randint(*TOKEN_IDS) for _ in range(count))


def _uniform(count: int, prompt_tokens: int, output_tokens: int) -> Callable[[random.Random], list[BenchRequest]]:
    def build(rng: random.Random) -> list[BenchRequest]:
        return [BenchRequest(_ids(rng, prompt_tokens), output_tokens) for _ in range(count)]

    return build


def _shared_prefix(rng: random.Random) -> list[BenchRequest]:
    prefix = _ids(rng, 512)
    return [BenchRequest(prefix + _ids(rng, 64), 32) for _ in range(32)]


def _azure(rng: random.Random) -> list[BenchRequest]:
    rows = (scaled(row, context=Scale(4, 8, 512), generated=Scale(4, 4, 64)) for row in load_rows(40))
    return [BenchRequest(_ids(rng, row.context_tokens), row.generated_tokens) for row in rows]


WORKLOADS: Final[dict[str, Workload]] = {
    workload.name: workload
    for workload in (
        Workload("W1", "32 requests, 256 in, 64 out, at once", _uniform(32, 256, 64)),
        Workload("W2", "32 requests sharing 512 in, 64 own in, 32 out, at once", _shared_prefix, shares_prefix=True),
        Workload("W3", "1 request, 512 in, 128 out", _uniform(1, 512, 128)),
        Workload("W4", "40 rows of the Azure conversation trace, lengths / 4 and clipped", _azure, takes_rate=True),
        Workload("W5", "8 requests, 32 in, 128 out, at once", _uniform(8, 32, 128)),
    )
}
