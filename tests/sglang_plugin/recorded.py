"""Recorded facts. Owns: reading what `record` wrote, and making a journal of it as the plugin does."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from telemetry.sglang.facts import AnyFact
from telemetry.sglang.support import Described
from telemetry.sglang_plugin import JournalTarget

DATA = Path(__file__).parent / "data"
_FACTS = msgspec.json.Decoder(AnyFact)


def read(name: str) -> tuple[Described, list[AnyFact]]:
    """The scheduler that was recorded, and the facts that its thread handed over."""
    head, *lines = gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes()).splitlines()
    found: dict[str, Any] = msgspec.json.decode(head)
    described = Described(**(found | {"config": EngineConfig.model_validate(found["config"])}))
    return described, [_FACTS.decode(line) for line in lines]


def journal(path: Path, described: Described, facts: list[AnyFact]) -> JournalTarget:
    """Write the journal of these facts; what made it."""
    target = JournalTarget(described, path, max_mib=64, began=(facts[0].t_ns, 1_800_000_000_000_000_000))
    for fact in facts:
        target.take(fact)
    target.close()
    return target
