"""`make sabotage`: which law catches which fault, how soon, and whether events alone were enough.

Prints one line per fault, then the figures. Exit status 0 when every fault was caught by its law and every law has a
fault; 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from invariants import LAWS
from tests.sabotage.every import FAULTS, KNOWN
from tests.sabotage.measure import Caught, Measure, kind_of

_SHOWN_LAWS: Final = 4
#: Steps within which a fault is to be noticed, once its law can know.
SOON: Final = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run all faults, or those whose law or name has the word given."""
    parser = argparse.ArgumentParser(prog="make sabotage", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only faults whose law or name has this in it")
    word = parser.parse_args(argv).word
    started = time.monotonic()
    measure = Measure()
    print(f"{'fault':<64} {'kind':<8} {'law':<14} {'steps':>5} {'events alone':>12}  noticed by")
    results = []
    for fault in (one for one in FAULTS if word in one.law or word in one.name):
        results.append(measure.of(fault))
        print(_line(results[-1]), flush=True)
    print()
    faults = complaints(results, whole=not word)
    _print_figures(results, time.monotonic() - started)
    for complaint in faults:
        print(f"  {complaint}")
    caught = sum(result.lag is not None for result in results)
    print(f"sabotage: caught {caught} of {len(results)}")
    return 1 if faults else 0


def _line(result: Caught) -> str:
    fault = result.fault
    others = [law for law in result.laws if law != fault.law]
    laws = [*([fault.law] if result.lag is not None else []), *others]
    more = f" and {len(laws) - _SHOWN_LAWS} more" if len(laws) > _SHOWN_LAWS else ""
    steps = "never" if result.lag is None else str(result.lag)
    alone = str(result.alone) if result.alone is not None else "other law" if result.alone_laws else "no"
    return (
        f"{fault.name:<64} {result.kind:<8} {fault.law:<14} {steps:>5} {alone:>12}  "
        f"{', '.join(law.removeprefix('INV-') for law in laws[:_SHOWN_LAWS])}{more}"
    )


def _print_figures(results: Sequence[Caught], seconds: float) -> None:
    """How soon, how many by events alone, and where the faults were put in."""
    kinds = Counter(kind_of(result.fault) for result in results)
    print(
        f"{len(results)} faults in {seconds:.0f} s: {kinds['engine']} broken methods of the engine, "
        f"{kinds['metrics']} of the metrics, {kinds['spans']} of the spans, {kinds['events']} lies in a true stream of "
        "events"
    )
    lags = Counter(result.lag for result in results if result.lag is not None)
    print(
        "steps from when the law could know, with an audit after every step: "
        + ", ".join(f"{lag}: {count}" for lag, count in sorted(lags.items()))
    )
    late = [result for result in results if result.lag is not None and result.lag > SOON]
    print(f"within {SOON} step: {sum(count for lag, count in lags.items() if lag <= SOON)} of {len(results)}")
    for result in late:
        print(f"  later: {result.fault.name} ({result.fault.law}), {result.lag} steps")
    by_law = sum(result.alone is not None for result in results)
    by_any = sum(bool(result.alone_laws) for result in results)
    alone = Counter(result.alone for result in results if result.alone is not None)
    print(
        "the same by tier 1 alone, without any audit: "
        + ", ".join(f"{lag}: {count}" for lag, count in sorted(alone.items()))
    )
    print(f"known faults: {len(KNOWN)} have a sabotage")
    print(f"tier 1 alone: {by_any} of {len(results)} ({by_law} by the law named)")


def complaints(results: Sequence[Caught], *, whole: bool) -> list[str]:
    """What makes the run fail."""
    found = [f"missed: {result.fault.name} ({result.fault.law})" for result in results if result.lag is None]
    found += [
        f"the checker itself failed: {result.fault.name}: {result.internal_error}"
        for result in results
        if result.internal_error
    ]
    if whole:
        laws = {fault.law for fault in FAULTS}
        found += [f"a law without a sabotage: {law}" for law in sorted(LAWS.keys() - laws)]
        found += [f"a sabotage of a law that is none: {law}" for law in sorted(laws - LAWS.keys())]
        names = Counter(fault.name for fault in FAULTS)
        found += [f"a known fault without its sabotage: {name}" for name in KNOWN if KNOWN[name] not in names]
    return found


if __name__ == "__main__":
    sys.exit(main())
