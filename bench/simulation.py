"""How fast the simulator is, and what it holds: the Mooncake conversation trace under everything on, and bare.

    python -m bench.simulation [--limit N] [--json]

12,031 requests with 145 M prompt tokens, an hour of traffic: page 16, a pool of 500,000 tokens, chunk 8,192, lpm.
`watched` judges every event (tier 1) and writes a journal; `bare` does neither. Each runs in a process of its own, so
that its peak of memory is its own. Prints figures, asserts none.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
from typing import Any, Final

SETTINGS: Final = (
    "page_size=16",
    "num_pages=31250",
    "chunked_prefill_size=8192",
    "max_prefill_tokens=8192",
    "enable_mixed_chunk=true",
    "schedule_policy=lpm",
)


def run(name: str, words: list[str]) -> dict[str, Any]:
    """One simulation in a child; CPU seconds beside wall seconds, since the machine may be shared."""
    command = [sys.executable, "-m", "telemetry.cli", "sim", "mooncake", "--cost", "h200-8b", "--json", *words]
    command += [word for setting in SETTINGS for word in ("--set", setting)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "run": name,
        "requests": result["requests"],
        "refused": result["refused"],
        "prompt_tokens": result["prompt_tokens"],
        "steps": result["steps"],
        "wall_s": result["wall_s"],
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        # Of the largest child so far: the bare run comes first.
        "peak_mib": round(after.ru_maxrss / 1024),
        "violations": result["violations"],
        "hit_rate": result["cache_hit_rate"],
    }


def main() -> int:
    """Print the table, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=None, help="the first so many requests (default: all)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    limit = [] if args.limit is None else ["--limit", str(args.limit)]
    with tempfile.TemporaryDirectory() as folder:
        rows = [run("bare", [*limit, "--no-check"]), run("watched", [*limit, "--journal", folder])]
    for row in rows:
        if args.json:
            print(json.dumps({"bench": "simulation", **row}))
    if args.json:
        return 0
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    heads = list(rows[0])
    print("".join(f"{head:>15}" for head in heads))
    for row in rows:
        print("".join(f"{row[head] if row[head] is not None else '-':>15}" for head in heads))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
