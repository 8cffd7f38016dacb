"""`python -m tests.conformance.run [DIRECTORY]`. Owns: playing every recorded case of a folder and printing the score.

One line per file, `file: passed/total`; under it one line per case that did not pass, with the first field that differs
and both values. The last line is `conformance: P of T`. Exit status 0 only when every case passed; a case that this
build cannot run counts as not passed and says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conformance.cases import RECORDED, Verdict, cases_of, files_of, play


def _played(case: dict[str, object]) -> Verdict:
    try:
        return play(case)
    except Exception as error:  # a case that breaks the engine is a failure of that case, not of the run
        scenario = case.get("scenario")
        case_id = scenario.get("id", "?") if isinstance(scenario, dict) else "?"
        return Verdict(str(case_id), "failed", f"raised {type(error).__name__}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.run", description=__doc__)
    parser.add_argument("directory", nargs="?", type=Path, default=RECORDED, help="a folder of case files")
    folder = parser.parse_args(arguments).directory
    files = files_of(folder)
    if not files:
        parser.error(f"{folder} holds no *.jsonl or *.jsonl.xz file")
    passed_of_all = all_cases = 0
    for path in files:
        verdicts = [_played(case) for case in cases_of(path)]
        passed = sum(verdict.status == "passed" for verdict in verdicts)
        print(f"{path.name}: {passed}/{len(verdicts)}")
        for verdict in verdicts:
            if verdict.status != "passed":
                print(f"  {verdict.case_id}: {verdict.status}: {verdict.detail}")
        passed_of_all += passed
        all_cases += len(verdicts)
    print(f"conformance: {passed_of_all} of {all_cases}")
    return 0 if passed_of_all == all_cases else 1


if __name__ == "__main__":
    sys.exit(main())
