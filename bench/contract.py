"""`python -m bench.contract`: the server against its own OpenAPI document. Owns: the cases, the checks and their count.

schemathesis draws requests from the document, valid and invalid ones, and sends them over a socket to a server with a
tiny model. Every answer has to have a documented status, media type and shape. No 5xx counts as good, 503 included:
cases are sent one at a time, so nothing is overloaded, and nobody stops the server.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from schemathesis.checks import CheckFunction
from schemathesis.core.failures import FailureGroup
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bench.tiny_server import tiny_server

#: A short context: a chat that does not say how much it wants gets all of it.
FLAGS: Final = ("--model.max-context-tokens", "48", "--cache.num-pages", "64", "--journal", "none")
#: One in so many cases goes to each operation that generates nothing.
_SPARSE: Final = 50
CHECKS: Final[list[CheckFunction]] = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@dataclass(slots=True)
class Report:
    """What the cases gave: answers by (operation, status), and what was wrong, by sentence."""

    wall_s: float = 0.0
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return self.statuses.total()


def run(url: str, *, cases: int, seed_: int = 0, progress: Progress | None = None) -> Report:
    """Send `cases` cases to the server at `url`, or a few more, some to each operation."""
    report, began = Report(), time.monotonic()
    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    # Those that generate come last and get what is left: the others run out of different cases.
    operations = sorted((result.ok() for result in schema.get_all_operations()), key=lambda op: op.method == "post")
    bar = progress.add_task("contract", total=cases) if progress else None

    def advance() -> None:
        if progress is not None and bar is not None:
            progress.advance(bar)

    for index, operation in enumerate(operations):
        is_post = operation.method == "post"
        share = -(-(cases - report.cases) // (len(operations) - index)) if is_post else cases // _SPARSE
        for mode, examples in modes_of(share):
            _play(operation, mode, examples, model, seed_, report, advance)
    report.wall_s = time.monotonic() - began
    return report


def modes_of(share: int) -> tuple[tuple[GenerationMode, int], ...]:
    """How many valid and how many invalid cases of an operation's share: a third invalid, and one of each at least."""
    invalid = max(share // 3, 1)
    return (GenerationMode.POSITIVE, max(share - invalid, 1)), (GenerationMode.NEGATIVE, invalid)


def _play(
    operation: Any, mode: GenerationMode, examples: int, model: str, seed_: int, report: Report, advance: Any
) -> None:
    """`examples` cases of one operation. What is wrong is counted, and the next case follows."""
    cases = operation.as_strategy(generation_mode=mode)

    @seed(seed_)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # cases come from a document: slow, large and often filtered
    )
    @given(case=cases, knows_model=st.integers(0, 9))
    def play(case: Any, knows_model: int) -> None:
        if isinstance(case.body, dict) and knows_model:
            _tame(case.body, model, knows_model)
        response = case.call(timeout=60)
        label = f"{operation.method.upper()} {operation.path}"
        report.statuses[label, response.status_code] += 1
        advance()
        if response.status_code >= 500:
            report.faults[f"{label}: status {response.status_code}"] += 1
        try:
            case.validate_response(response, checks=CHECKS)
        except FailureGroup as group:
            for failure in group.exceptions:
                report.faults[f"{label}: {response.status_code}: {failure}"[:400]] += 1

    with contextlib.suppress(Unsatisfiable):  # nothing about this operation can be wrong
        play()


def _tame(body: dict[str, Any], model: str, degree: int) -> None:
    """Take out of the way what every drawn body would be refused for: another model, then what contradicts itself."""
    body["model"] = model
    if degree > 3:
        for name in ("max_completion_tokens", "min_tokens", "stream_options", "top_logprobs", "stop_token_ids"):
            body.pop(name, None)
        body["max_tokens"] = degree
    if degree > 6:
        for name in ("messages", "prompt"):
            if name in body:
                body[name] = [{"role": "user", "content": "hi"}] if name == "messages" else "hi"


def render(report: Report) -> Table:
    """Cases by operation and status."""
    table = Table(title=f"{report.cases:,} cases in {report.wall_s:.0f} s")
    table.add_column("operation")
    table.add_column("cases", justify="right")
    table.add_column("answers")
    for label in dict.fromkeys(label for label, _ in report.statuses):
        found = {status: count for (name, status), count in sorted(report.statuses.items()) if name == label}
        table.add_row(
            label, f"{sum(found.values()):,}", ", ".join(f"{count:,} x {status}" for status, count in found.items())
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every answer was as documented."""
    parser = argparse.ArgumentParser(prog="python -m bench.contract", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    columns = (TextColumn("contract"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        tiny_server(Path(folder), FLAGS) as server,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        report = run(server.url, cases=options.cases, seed_=options.seed, progress=progress)
    Console().print(render(report))
    for fault, count in report.faults.most_common(20):
        print(f"  {count} x {fault}")
    bad = report.faults.total()
    print(f"contract: {report.cases} cases, " + (f"{bad} faults" if bad else "no 5xx, every answer as documented"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
