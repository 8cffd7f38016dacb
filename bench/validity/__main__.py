"""Predicted against measured: what-if, and what the real engine then did.

    python -m bench.validity [--requests 40] [--repeats 3] [--threads 1] [--docs]

Finds how fast the base configuration answers, then serves the same requests under it and under three others, in turns,
each time with a fresh server. From each base journal `whatif` predicts the three. Prints the table; with --docs, writes
docs/studies/validity.md anew. Half an hour on two busy cores, of which the journals remain in artifacts/validity;
--journals FOLDER judges those again without serving.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench.studies import page
from bench.validity.judge import judged, lines_of, measured, predicted
from bench.validity.runs import BASE, CASES, UTILISATION, capacity, newest, serve_once, workload

ARTIFACTS: Final = Path("artifacts/validity")
_FACTS: Final = "facts.json"


def main() -> int:
    """Run, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of the model; one is least disturbed by other programs")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=ARTIFACTS, help="folder of journals and results")
    parser.add_argument("--journals", type=Path, default=None, help="judge these again instead of serving")
    parser.add_argument("--docs", action="store_true", help="write docs/studies/validity.md anew")
    args = parser.parse_args()
    if args.requests < 8 or args.repeats < 1 or args.threads < 1:
        parser.error("at least 8 requests, 1 repeat and 1 thread are needed")
    folder: Path = args.journals or args.out
    if args.journals is None:
        _serve_all(folder, args)
    result = judge_all(folder)
    lines = lines_of(result)
    print("\n".join(lines))
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.docs:
        page.write("validity", result, lines, {})
    return 0


def _serve_all(folder: Path, args: argparse.Namespace) -> None:
    """Every configuration once in each repeat, in an order of its own."""
    from bench.executor_steps import machine

    requests = workload(args.requests, args.seed)
    able = capacity(folder / "calibration", requests, args.threads)
    rate = UTILISATION * able
    print(
        f"the base configuration answers {able:.3g} requests a second; {rate:.3g} a second will come", file=sys.stderr
    )
    facts = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "requests": args.requests,
        "repeats": args.repeats,
        "threads": args.threads,
        "rate": rate,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for repeat in range(args.repeats):
        order = ["base", *CASES]
        random.Random(repeat).shuffle(order)
        for name in order:
            began = time.monotonic()
            serve_once(folder / f"{repeat}-{slug(name)}", CASES.get(name, {}), requests, rate, args.threads)
            print(f"repeat {repeat + 1}, {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)


def slug(name: str) -> str:
    """As a folder."""
    return name.replace(" ", "-")


def judge_all(folder: Path) -> dict[str, Any]:
    """Of the journals in `folder`."""
    facts = json.loads((folder / _FACTS).read_text("utf-8"))
    journals = {
        name: [newest(folder / f"{repeat}-{slug(name)}") for repeat in range(facts["repeats"])]
        for name in ("base", *CASES)
    }
    base = [measured(journal) for journal in journals["base"]]
    cases: dict[str, Any] = {}
    baselines: list[dict[str, Any]] = []
    for name, settings in CASES.items():
        guesses = [predicted(journal, settings) for journal in journals["base"]]
        cases[name] = judged(base, [measured(journal) for journal in journals[name]], guesses)
        baselines = baselines or [
            {"recorded": was, "checks": guess["checks"], "held_out_median": guess["held_out_median"]}
            for was, guess in zip(base, guesses, strict=True)
        ]
    return {**facts, "base": BASE, "changes": CASES, "cases": cases, "baselines": baselines}


if __name__ == "__main__":
    raise SystemExit(main())
