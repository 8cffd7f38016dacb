"""One command for each incident of docs/debugging.md.

    python -m bench.incidents starvation     one of: starvation, over-reservation, retract-storm, chunk-too-small,
                                             chunk-too-large; `all` plays the five
    python -m bench.incidents all --docs     also writes the figures of docs/debugging.md and docs/img anew

Serves a real engine under a seeded load on a virtual clock (20 seconds of it, a few of yours), prints the way from
metrics to trace, record and explanation, then the numbers before and after the cure. Journals and plots lie in
artifacts/incidents/NAME afterwards, for `admitscope explain`, `check`, `replay` and `export`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench.incidents import page, plot
from bench.incidents.cases import INCIDENTS, named
from bench.incidents.diagnosis import diagnose

ARTIFACTS = Path("artifacts/incidents")


def main() -> int:
    """Print one diagnosis, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*(incident.name for incident in INCIDENTS), "all"])
    parser.add_argument("--out", type=Path, default=ARTIFACTS, help="folder of journals and plots")
    parser.add_argument("--docs", action="store_true", help="write docs/debugging.md and docs/img anew")
    args = parser.parse_args()
    wanted = INCIDENTS if args.name == "all" else (named(args.name),)
    for incident in wanted:
        folder = args.out / incident.name
        told = diagnose(incident, folder)
        document = plot.drawn(told)
        (folder / "plot.svg").write_text(document, encoding="utf-8")
        print(told.text())
        print(f"\n{folder}: before/journal.jsonl, after/journal.jsonl, plot.svg\n")
        if args.docs:
            page.write(told, document)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
