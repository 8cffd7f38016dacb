"""How fast the simulator is, and what it holds: an hour of Mooncake traffic and a million short requests.

    python -m bench.simulation [--limit N] [--short N] [--json FILE]

Mooncake: 12,031 requests with 145 M prompt tokens; page 16, a pool of 500,000 tokens, chunk 8,192, mixed, lpm.
`watched` judges every event (tier 1) and writes a journal, `bare` does neither, `replay` runs that journal again.
Parts of the trace show how cost grows with its length. Short requests come 100 a second, prompts of 32 to 256 tokens,
answers of 4 to 16. Each run is a process of its own on one core. CPU seconds stand beside wall seconds, since the
machine may be shared. Asserts nothing; `misses` says which aim was missed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

SETTINGS: Final = (
    "page_size=16",
    "num_pages=31250",
    "chunked_prefill_size=8192",
    "max_prefill_tokens=8192",
    "enable_mixed_chunk=true",
    "schedule_policy=lpm",
)
MOONCAKE: Final = 12_031
SHORT: Final = 1_000_000
_SHORT_PER_S: Final = 100.0
_PROGRESS: Final = "progress "
#: One core for each run: libraries that bring threads of their own would count as speed.
_ONE_CORE: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Aim:
    """What a whole run has to keep to: seconds of one core, and MiB at the most; None: no aim."""

    cpu_s: float | None = None
    peak_mib: float | None = None


@dataclass
class Row:
    """One run. Memory in MiB: at its half, at its end, and the most of it; None where the system does not tell."""

    run: str
    requests: int
    prompt_tokens: int
    steps: int
    wall_s: float
    cpu_s: float
    half_mib: float | None
    end_mib: float | None
    peak_mib: float
    violations: int | None = None
    hit_rate: float | None = None
    aim_cpu_s: float | None = None
    aim_peak_mib: float | None = None

    @property
    def us_a_request(self) -> float:
        """CPU microseconds for each request."""
        return self.cpu_s * 1e6 / max(self.requests, 1)


def short_requests(count: int, *, seed: int = 1) -> Iterator[str]:
    """Lines of a Mooncake trace: a quarter of the prompts begin like others."""
    rng = random.Random(seed)
    now_ms = 0.0
    for number in range(count):
        now_ms += rng.expovariate(_SHORT_PER_S) * 1e3
        block = number + 1_000 if number % 4 else rng.randrange(1_000)
        prompt, answer = rng.randint(32, 256), rng.randint(4, 16)
        yield (
            f'{{"timestamp": {round(now_ms)}, "input_length": {prompt}, "output_length": {answer}, '
            f'"hash_ids": [{block}]}}\n'
        )


def machine() -> str:
    """The machine in one line."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def _resident_mib(pid: int) -> float | None:
    """What a process holds now; None where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:
        return None
    found = next((line for line in text.splitlines() if line.startswith("VmRSS:")), None)
    return None if found is None else int(found.split()[1]) / 1024


#: Starts the command and says what it used. A process between, since a child starts with its parent's peak of memory
#: (`exec` carries it over), and this one has next to none.
_BETWEEN: Final = """
import os, sys
pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-m", "telemetry.cli", *sys.argv[1:]])
print(pid, file=sys.stderr, flush=True)
_, status, used = os.wait4(pid, 0)
print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status) & 255)
"""


def _watch(lines: IO[str]) -> tuple[list[tuple[float, float]], list[str]]:
    """(share done, MiB) at each line of progress, and what else was said. The first line names the process."""
    held: list[tuple[float, float]] = []
    said: list[str] = []
    pid = int(lines.readline())
    for line in lines:
        if line.startswith(_PROGRESS):
            mib = _resident_mib(pid)
            if mib is not None:
                held.append((float(line.split()[1]), mib))
        else:
            said.append(line)
    return held, said


def measured(words: list[str]) -> tuple[str, dict[str, Any]]:
    """What `admitscope WORDS` printed, and what it cost. Raises RuntimeError when it failed."""
    with tempfile.TemporaryFile("w+") as answer:
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, "-S", "-c", _BETWEEN, *words],
            stdout=answer,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ONE_CORE},
        ) as process:
            assert process.stderr is not None
            held, said = _watch(process.stderr)
        wall_s = time.monotonic() - began
        cpu_s, peak = said.pop().split()
        if process.returncode:
            raise RuntimeError(f"admitscope {' '.join(words)}: status {process.returncode}: {''.join(said)}")
        answer.seek(0)
        return answer.read(), {
            "wall_s": round(wall_s, 1),
            "cpu_s": round(float(cpu_s), 1),
            "half_mib": next((round(mib) for share, mib in held if share >= 0.5), None),
            "end_mib": round(held[-1][1]) if held else None,
            # Kilobytes on Linux, bytes on macOS.
            "peak_mib": round(int(peak) / (1024 * 1024 if sys.platform == "darwin" else 1024)),
        }


def simulated(name: str, trace: str, *words: str, aim: Aim | None = None) -> Row:
    """One simulation."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    text, cost = measured(["sim", trace, "--cost", "h200-8b", "--json", "--progress-lines", *settings, *words])
    result = json.loads(text)
    return Row(
        run=name,
        requests=result["requests"],
        prompt_tokens=result["prompt_tokens"],
        steps=result["steps"],
        violations=result["violations"],
        hit_rate=result["cache_hit_rate"],
        aim_cpu_s=None if aim is None else aim.cpu_s,
        aim_peak_mib=None if aim is None else aim.peak_mib,
        **cost,
    )


def replayed(name: str, journal: Path, like: Row) -> Row:
    """The replay of the journal that `like` wrote, which it is to be faster than."""
    text, cost = measured(["replay", str(journal)])
    if not text.startswith("identical"):
        raise RuntimeError(f"replay of {journal}: {text}")
    return Row(
        run=name,
        requests=like.requests,
        prompt_tokens=like.prompt_tokens,
        steps=like.steps,
        aim_cpu_s=like.cpu_s,
        **cost,
    )


def mooncake_rows(limit: int | None, folder: Path) -> Iterator[Row]:
    """Parts of the trace, then all of it bare, watched and replayed."""
    whole = limit or MOONCAKE
    is_whole = limit is None
    for name, count in (("start", 1), ("quarter, watched", whole // 4), ("half, watched", whole // 2)):
        part = folder / name
        yield simulated(name, "mooncake", "--limit", str(count), "--journal", str(part))
        _remove(part)
    words = ("--limit", str(whole))
    yield simulated("bare", "mooncake", *words, "--no-check", aim=Aim(cpu_s=60.0) if is_whole else None)
    journal = folder / "whole"
    aim = Aim(cpu_s=120.0, peak_mib=2048) if is_whole else None
    watched = simulated("watched", "mooncake", *words, "--journal", str(journal), aim=aim)
    yield watched
    yield replayed("replay", journal, watched)
    _remove(journal)


def short_rows(count: int, folder: Path) -> Iterator[Row]:
    """Short requests, bare and judged."""
    trace = folder / "short.jsonl"
    with trace.open("w", encoding="ascii") as file:
        file.writelines(short_requests(count))
    aim = Aim(cpu_s=600.0) if count >= SHORT else None
    yield simulated("short, bare", str(trace), "--no-check", aim=aim)
    yield simulated("short, judged", str(trace), aim=aim)


def _remove(folder: Path) -> None:
    """A journal that is not needed any more: each has hundreds of megabytes."""
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def growth(rows: list[Row]) -> float | None:
    """The exponent with which CPU time grows with requests, from a quarter of the trace to all of it; 1: linear.

    Without the time to start. None where the runs are too short to say.
    """
    found = {row.run: row for row in rows}
    start, part, whole = found["start"], found["quarter, watched"], found["watched"]
    took, of_part = whole.cpu_s - start.cpu_s, part.cpu_s - start.cpu_s
    if of_part <= start.cpu_s or whole.requests <= part.requests:
        return None
    return math.log(took / of_part) / math.log(whole.requests / part.requests)


def misses(rows: list[Row]) -> list[str]:
    """Aims that were missed, in words."""
    found = []
    for row in rows:
        if row.aim_cpu_s is not None and row.cpu_s > row.aim_cpu_s:
            found.append(f"{row.run}: {row.cpu_s:g} CPU s, aim {row.aim_cpu_s:g}")
        if row.aim_peak_mib is not None and row.peak_mib > row.aim_peak_mib:
            found.append(f"{row.run}: {row.peak_mib:g} MiB, aim {row.aim_peak_mib:g}")
    return found


def _told(row: Row) -> str:
    def number(value: float | None, digits: int = 0) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    cells = (
        number(row.requests),
        number(row.prompt_tokens / 1e6, 1),
        number(row.steps),
        number(row.wall_s, 1),
        number(row.cpu_s, 1),
        number(row.aim_cpu_s, 1),
        number(row.us_a_request),
        number(row.half_mib),
        number(row.end_mib),
        number(row.peak_mib),
        number(row.aim_peak_mib),
        number(row.violations),
    )
    return f"{row.run:<19}" + "".join(f"{cell:>10}" for cell in cells)


HEADS: Final = (
    *("requests", "M tokens", "steps", "wall s", "CPU s", "aim", "µs/req"),
    *("MiB half", "MiB end", "MiB peak", "aim", "violations"),
)


def main() -> int:
    """Print the table as it grows; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=None, help="the first so many Mooncake requests (default: all)")
    parser.add_argument("--short", type=int, default=SHORT, help="so many short requests (default 1000000; 0: none)")
    parser.add_argument("--json", type=Path, default=None, help="write all figures to this file too")
    args = parser.parse_args()
    print(f"{machine()}, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    print(f"{'run':<19}" + "".join(f"{head:>10}" for head in HEADS), flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for row in mooncake_rows(args.limit, Path(folder)):
            rows.append(row)
            print(_told(row), flush=True)
        for row in short_rows(args.short, Path(folder)) if args.short else ():
            rows.append(row)
            print(_told(row), flush=True)
    exponent = growth(rows)
    if exponent is not None:
        print(f"CPU time grows with the number of requests to the power of {exponent:.2f} (1: linear)")
    missed = misses(rows)
    print(f"missed: {'; '.join(missed)}" if missed else "no aim is missed")
    if args.json is not None:
        told = {"machine": machine(), "rows": [asdict(row) for row in rows], "growth": exponent, "missed": missed}
        args.json.write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
