"""Everything that has to be tried on a GPU, in one command of less than ten minutes.

    python -m bench.gpu_check [--only 0,1,2] [--out artifacts/gpu_check]
    python -m bench.gpu_check --compile

Writes gpu_check.json and gpu_check.md after every section. The exit status is the number of checks that failed; figures
of speed fail nothing. Without a GPU it says so after section 0 and ends with 0. docs/gpu.md says what the sections do.
--compile takes as long as it takes, and has sections find their kernels ready.
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

import numpy as np

from bench.gpu_check import cuda
from bench.gpu_check.compiling import attention_kernels, small_kernels
from bench.gpu_check.report import Report, SectionReport, Status, table
from bench.gpu_check.rig import Rig, Sizes
from bench.gpu_check.runner import LEFT_OUT, Section, chosen, run_section, sections
from engine.attention.device import CudaRuntime

SEED = 20_260


def main(argv: list[str] | None = None) -> int:
    """Run the chosen sections; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=_numbers, help="sections, as 0,2,5; all by default")
    parser.add_argument("--compile", action="store_true", help="compile FlashInfer's kernels, run no section")
    parser.add_argument("--out", type=Path, default=Path("artifacts") / "gpu_check", help="folder of the report")
    args = parser.parse_args(argv)
    try:
        wanted = chosen(sections(), args.only)
    except ValueError as error:
        parser.error(str(error))
    report = Report(machine=cuda.machine(), left_out=list(LEFT_OUT))
    first = SectionReport(0, "machine", 20, counts=True, status=Status.DONE)
    report.sections.append(first)
    if not (args.compile and cuda.has_gpu()):
        try:
            # Now, before minutes of a GPU are spent on what could not be written down.
            report.write(args.out)
        except OSError as error:
            parser.error(f"--out {args.out}: {error.strerror}; a folder that can be written to is needed")
    for name, value in report.machine.items():
        print(f"{name}: {value}")
    if not cuda.has_gpu():
        report.sections += [_not_run(section) for section in wanted]
        report.write(args.out)
        print(
            "\nNo GPU that torch can use here: nothing of the sections after 0 was run, and nothing is shown by this."
        )
        print(f"{args.out / 'gpu_check.md'}")
        return 0
    rig = _rig(first)
    if args.compile:
        return _compiled(rig)
    report.write(args.out)
    if rig is not None:
        for section in wanted:
            print(f"\n{section.number}. {section.title} (at most {section.limit_s:.0f} s)", flush=True)
            done = run_section(section, rig, report, args.out)
            print("\n".join(table(done.findings)))
            print(f"{done.status} in {done.seconds:.1f} s, {done.failed} failed {done.error}", flush=True)
    print("\nLeft out:")
    for what, why in LEFT_OUT:
        print(f"- {what}: {why}")
    print(f"{args.out / 'gpu_check.md'}: {report.exit_status} checks failed")
    return report.exit_status


def _rig(first: SectionReport) -> Rig | None:
    """What the sections work with; None, with the reason in section 0, where FlashInfer cannot be had."""
    first.findings += list(cuda.facts_of_the_gpu())
    try:
        kernels = cuda.import_flashinfer()
    except ImportError as error:
        first.status, first.error = Status.FAILED, f"flashinfer cannot be imported: {error} (docs/gpu.md)"
        print(first.error)
        return None
    return Rig(CudaRuntime(), kernels, cuda.CudaStopwatch(), Sizes(), np.random.default_rng(SEED))


def _compiled(rig: Rig | None) -> int:
    """Compile what is missing, and tell each kernel as soon as it is there; how many cannot be had."""
    failed = int(rig is None)
    for finding in chain(attention_kernels(rig), small_kernels(rig)) if rig is not None else ():
        print(table([finding])[-1], flush=True)
        failed += finding.ok is False
    return failed


def _not_run(section: Section) -> SectionReport:
    return SectionReport(section.number, section.title, section.limit_s, section.counts, error="no GPU")


def _numbers(text: str) -> set[int]:
    """Raises ArgumentTypeError, whose words argparse shows."""
    try:
        return {int(part) for part in text.split(",")}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers of sections with commas between, as 0,2,5") from None


if __name__ == "__main__":
    sys.exit(main())
