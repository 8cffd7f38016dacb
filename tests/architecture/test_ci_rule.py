"""CI skips nothing but GPU tests: the rule in tests/conftest.py does what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


def run(folder: Path, body: str, *, strict: bool) -> subprocess.CompletedProcess[str]:
    """pytest over one test file beside a copy of our conftest."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_probe.py").write_text(f"import pytest\n\n\ndef test_runs():\n    pass\n\n\n{body}\n")
    environment = {name: value for name, value in os.environ.items() if name != "TESTS_MAY_NOT_SKIP"}
    if strict:
        environment["TESTS_MAY_NOT_SKIP"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder, timeout=120
    )


NO_CHROMIUM = "@pytest.mark.skip(reason='apt-get install chromium')\ndef test_skips():\n    pass"
NO_GPU = "@pytest.mark.skip(reason='no GPU here')\ndef test_skips():\n    pass"
INSIDE = "def test_skips():\n    pytest.skip('apt-get install chromium')"
MODULE = "pytest.skip('apt-get install chromium', allow_module_level=True)"


@pytest.mark.parametrize("body", [NO_CHROMIUM, INSIDE, MODULE])
def test_a_skip_fails_a_strict_run_and_is_named(tmp_path: Path, body: str) -> None:
    done = run(tmp_path, body, strict=True)
    assert done.returncode == 1, done.stdout
    assert "TESTS_MAY_NOT_SKIP is set" in done.stdout
    assert "apt-get install chromium" in done.stdout
    assert "1 skipped" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("body", [NO_CHROMIUM, INSIDE])
def test_on_a_persons_machine_a_skip_is_a_skip(tmp_path: Path, body: str) -> None:
    done = run(tmp_path, body, strict=False)
    assert done.returncode == 0, done.stdout


def test_a_missing_gpu_is_no_fault(tmp_path: Path) -> None:
    done = run(tmp_path, NO_GPU, strict=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    assert run(tmp_path, "def test_fails():\n    assert False", strict=True).returncode == 1
