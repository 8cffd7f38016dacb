"""CI skips nothing but GPU tests: the rule in tests/conftest.py does what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"


SKIPS = {
    "marked": "@pytest.mark.skip(reason='apt-get install chromium')\ndef test_skips():\n    pass",
    "inside": "def test_skips():\n    pytest.skip('apt-get install fonts')",
    "module": "pytest.skip('apt-get install prometheus', allow_module_level=True)",
}
NO_GPU = {"gpu": "@pytest.mark.skip(reason='no GPU here')\ndef test_skips():\n    pass"}


def run(folder: Path, files: dict[str, str], *, strict: bool, workers: int = 0) -> subprocess.CompletedProcess[str]:
    """pytest over small test files beside a copy of our conftest."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "test_runs.py").write_text("def test_runs():\n    pass\n")
    for name, body in files.items():
        (folder / f"test_{name}.py").write_text(f"import pytest\n\n{body}\n")
    environment = {name: value for name, value in os.environ.items() if name != "TESTS_MAY_NOT_SKIP"}
    if strict:
        environment["TESTS_MAY_NOT_SKIP"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    command += ["-n", str(workers), "--dist", "loadgroup"] if workers else []
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder, timeout=120
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_skips_fail_a_strict_run_and_are_named(tmp_path: Path, workers: int) -> None:
    done = run(tmp_path, SKIPS, strict=True, workers=workers)
    assert done.returncode == 1, done.stdout
    refused = done.stdout.split("TESTS_MAY_NOT_SKIP is set")[1]
    for package in ("chromium", "fonts", "prometheus"):
        assert f"apt-get install {package}" in refused
    assert "1 passed, 3 skipped" in done.stdout.splitlines()[-1]


def test_on_a_persons_machine_a_skip_is_a_skip(tmp_path: Path) -> None:
    done = run(tmp_path, SKIPS, strict=False)
    assert done.returncode == 0, done.stdout
    assert "TESTS_MAY_NOT_SKIP" not in done.stdout


def test_a_missing_gpu_is_no_fault(tmp_path: Path) -> None:
    done = run(tmp_path, NO_GPU, strict=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout.splitlines()[-1]
