"""Records what the hooks see of SGLang's own scheduler, for tests that need no SGLang. By hand, when facts change:

.venv-sglang/bin/python -m tests.sglang_plugin.record
"""

from __future__ import annotations

import gzip
import warnings
from pathlib import Path
from typing import Any

import msgspec

from tests.sglang_plugin import stand_ins

DATA = Path(__file__).parent / "data"


class Keeper:
    """An outlet that keeps everything."""

    def __init__(self) -> None:
        self.described: Any = None
        self.facts: list[Any] = []

    def begin(self, scheduler: Any) -> bool:
        from telemetry.sglang.support import describe

        self.described = describe(scheduler)
        return True

    def put(self, fact: Any) -> None:
        self.facts.append(fact)


def main() -> None:
    """Write one file for each scenario."""
    warnings.simplefilter("ignore")
    stand_ins.install()
    from telemetry.sglang.hooks import Hooks
    from tests.sglang_plugin import harness
    from tests.sglang_plugin.hooked import hooked
    from tests.sglang_plugin.scenarios import SCENARIOS

    DATA.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        keeper = Keeper()
        with hooked(Hooks(keeper)):
            harness.play(harness.scheduler(**scenario.settings), scenario)
        found = keeper.described
        head = {name: getattr(found, name) for name in found.__slots__ if name != "config"}
        head["config"] = found.config.model_dump(mode="json")
        lines = [msgspec.json.encode(head), *map(msgspec.json.encode, keeper.facts)]
        packed = gzip.compress(b"\n".join(lines) + b"\n", mtime=0)
        (DATA / f"{scenario.name}.jsonl.gz").write_bytes(packed)
        print(f"{scenario.name}: {len(keeper.facts):,} facts, {len(packed):,} bytes")


if __name__ == "__main__":
    main()
