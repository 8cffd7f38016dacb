"""One command for each study of docs/studies.

    python -m bench.studies policies          one of: policies, chunk-size, accounting, mixed, lpm-fallback; or all
    python -m bench.studies all --docs        also writes the figures of docs/studies anew
    python -m bench.studies policies --limit 0     the whole trace (an hour of traffic, 12,031 requests)

Simulates the Mooncake conversation trace, which comes with this program, under each configuration; prints the table of
the page, and leaves figures and plots in artifacts/studies. Equal arguments give equal figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.studies import page
from bench.studies.cases import STUDIES, Study, lines_of
from bench.studies.runs import simulated
from telemetry.sim.svg import drawn

ARTIFACTS = Path("artifacts/studies")


def main() -> int:
    """Print one study, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*STUDIES, "all"])
    parser.add_argument("--limit", type=int, default=None, help="requests of the trace; 0: all (default: the study's)")
    parser.add_argument("--out", type=Path, default=ARTIFACTS, help="folder of figures and plots")
    parser.add_argument("--docs", action="store_true", help="write the page of docs/studies anew")
    args = parser.parse_args()
    for study in STUDIES.values() if args.name == "all" else (STUDIES[args.name],):
        limit = study.limit if args.limit is None else args.limit or None
        result, plots = studied(study, limit=limit)
        lines = lines_of(study, result)
        print(f"\n{study.title}\n\n" + "\n".join(lines))
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{study.name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for plot, document in plots.items():
            (args.out / f"{study.name}-{plot}.svg").write_text(document, encoding="utf-8")
        if args.docs:
            page.write(study.name, result, lines, plots)
    return 0


def studied(study: Study, *, limit: int | None) -> tuple[dict[str, Any], dict[str, str]]:
    """The figures of a study, and its plots as SVG. Says on stderr how far it is."""
    figures = []
    for number, run in enumerate(study.runs, 1):
        began = time.monotonic()
        figures.append(simulated(run, limit=limit))
        took = time.monotonic() - began
        print(f"{study.name} {number}/{len(study.runs)}: {run.group}, {run.name}: {took:.1f} s", file=sys.stderr)
    plots = {name: drawn(chart) for name, chart in study.plots(figures).items()}
    return {"study": study.name, "limit": limit, "plots": list(plots), "runs": figures}, plots


if __name__ == "__main__":
    raise SystemExit(main())
