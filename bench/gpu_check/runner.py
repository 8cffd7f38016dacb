"""Runner. Owns: the sections in their order, what each may take, and a report that is written after each of them.

A section gives its findings one by one and is left when its time is up. One that hangs in the device cannot be left:
then the report is written as it stands and the process ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from bench.gpu_check import (
    correctness,
    cuda,
    end_to_end,
    engine_checks,
    graphs_and_race,
    operators,
    speed,
    whole_engine,
)
from bench.gpu_check.report import Finding, Report, SectionReport, Status
from bench.gpu_check.rig import Rig

#: Seconds beyond its limit after which a section that gives nothing counts as hung.
GRACE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Section:
    """counts: a section of checks, not of speed."""

    number: int
    title: str
    limit_s: float
    run: Callable[[Rig], Iterable[Finding]]
    counts: bool = True


def sections() -> list[Section]:
    """All but section 0, in order. Those of speed share what section 1 measured."""
    ceilings = speed.Ceilings()
    return [
        Section(1, "ceilings: copy and matrix product", 15, ceilings.measure, counts=False),
        Section(2, "attention against float64", 60, correctness.attention),
        Section(3, "K/V write and small operators", 20, _writes_and_operators),
        Section(4, "alone and in company", 20, correctness.invariance),
        Section(5, "graphs", 60, graphs_and_race.graphs),
        Section(6, "steps behind a busy device", 40, graphs_and_race.race),
        Section(7, "answers against the CPU", 60, engine_checks.against_cpu),
        Section(8, "answers, cut and batched otherwise", 40, engine_checks.against_itself),
        Section(9, "decode attention", 40, lambda rig: speed.decode(rig, ceilings), counts=False),
        Section(10, "prefill attention", 40, lambda rig: speed.prefill(rig, ceilings), counts=False),
        Section(11, "mixed batches, plan included", 60, speed.mixed, counts=False),
        Section(12, "whole decode steps", 90, lambda rig: end_to_end.decode_steps(rig, ceilings), counts=False),
        Section(13, "whole engine", 30, lambda rig: whole_engine.whole_engine(rig, cuda.CudaMarks()), counts=False),
    ]


#: What no section does, and why.
LEFT_OUT: Final = [
    ("section 2: log-sum-exp", "the engine uses none"),
    ("section 12: share of plan, copy and launch", "its steps are timed whole; section 13 tells what is not computing"),
    ("section 13: HTTP", "it is the engine in this process: `bench/serve.py` loads a server"),
]


def _writes_and_operators(rig: Rig) -> Iterator[Finding]:
    return chain(correctness.kv_write(rig), operators.operators(rig))


def chosen(all_sections: list[Section], only: set[int] | None) -> list[Section]:
    """Those of `only`; None: all. Raises ValueError for a number that no section has."""
    if only is None:
        return all_sections
    if unknown := only - {0} - {section.number for section in all_sections}:
        raise ValueError(f"--only {', '.join(map(str, sorted(unknown)))}: sections are 0 to {all_sections[-1].number}")
    return [section for section in all_sections if section.number in only]


def run_section(section: Section, rig: Rig, report: Report, folder: Path) -> SectionReport:
    """Run it, add it to the report, write the report."""
    done = SectionReport(section.number, section.title, section.limit_s, section.counts)
    report.sections.append(done)
    start = time.monotonic()
    with _watched(done, report, folder):
        try:
            done.status = Status.DONE
            for finding in section.run(rig):
                done.findings.append(finding)
                if time.monotonic() - start > section.limit_s:
                    done.status = Status.TIME_LIMIT
                    break
        except Exception as error:  # whatever a kernel raises belongs into the report, and the next section goes on
            done.status = Status.FAILED
            done.error = f"{type(error).__name__}: {str(error)[:500]}"
    done.seconds = time.monotonic() - start
    report.write(folder)
    return done


@contextmanager
def _watched(done: SectionReport, report: Report, folder: Path) -> Iterator[None]:
    """End the process, with the report written, if the section does not come back."""

    def give_up() -> None:
        done.status, done.seconds = Status.HUNG, done.limit_s + GRACE_S
        report.write(folder)
        os._exit(max(1, report.exit_status))

    timer = threading.Timer(done.limit_s + GRACE_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
