"""The bench of the checker's cost runs and prints what it promises; no figure is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_bench_prints_one_line_per_configuration() -> None:
    command = [sys.executable, str(ROOT / "bench" / "checker_cost.py")]
    arguments = ["--running", "2", "3", "--page-size", "16", "--steps", "12", "--json"]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True, text=True, check=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["running"] for line in lines] == [2, 3]
    assert all(line["decode_step_us_mean"] > 0 and line["audit_us"] > 0 for line in lines)
