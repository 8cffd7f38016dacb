"""The repository keeps its shape: small files, short functions, layers, a core that imports little, no leftovers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "telemetry", "invariants", "dashboard")
SOURCES = sorted(path for name in (*PACKAGES, "bench") for path in (ROOT / name).rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_are_sources() -> None:
    # Guards every test below against passing over nothing.
    assert len(SOURCES) > 30
    for package in PACKAGES:
        assert (ROOT / package / "__init__.py").exists()


def test_files_stay_below_400_lines() -> None:
    lengths = {_name(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in lengths.items() if lines >= MAX_FILE_LINES} == {}


def _functions() -> Iterator[tuple[str, int]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{_name(path)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def test_functions_stay_within_70_lines() -> None:
    assert {name: lines for name, lines in _functions() if lines > MAX_FUNCTION_LINES} == {}


def test_every_file_says_what_it_is() -> None:
    silent = [
        _name(path)
        for path in SOURCES
        if path.read_text("utf-8").strip() and ast.get_docstring(ast.parse(path.read_text("utf-8"))) is None
    ]
    assert silent == []


def test_import_contracts_hold() -> None:
    command = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([command, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = re.search(r"(\d+) kept, 0 broken", done.stdout)
    assert kept is not None
    assert int(kept[1]) >= 5


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("engine", ("torch", "fastapi", "prometheus_client", "opentelemetry")),
        ("engine.scheduler.plan", ("torch", "fastapi", "asyncio")),
        # The command line answers --help, and explain reads a journal, without waiting for torch.
        ("telemetry.settings", ("torch", "fastapi", "streamlit")),
        ("telemetry.cli", ("torch", "fastapi", "streamlit")),
    ],
)
def test_importing_stays_light(module: str, absent: tuple[str, ...]) -> None:
    program = f"import sys, {module}; sys.exit(' '.join(m for m in {absent!r} if m in sys.modules) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_for_later_in_the_code() -> None:
    words = re.compile("TO" + "DO|FIX" + "ME|X" + "XX")
    found = [
        f"{_name(path)}:{number}"
        for path in (*SOURCES, *(ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


def test_the_repository_stands_alone() -> None:
    """No path of the machine it was written on, and nothing above its own root."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    # An unpacked archive has no list: its sources have to do.
    files = [ROOT / name for name in listed.stdout.split("\0") if name] if listed.returncode == 0 else SOURCES
    machine = re.compile(r"(?<![\w.])/(?:home|root|Users)/\w|\.\./" + "shared")
    found = []
    for path in files:
        if path.suffix in {".py", ".md", ".toml", ".json", ".yaml", ".yml", ""} and path.is_file():
            text = path.read_text("utf-8", "replace")
            if machine.search(text):
                found.append(_name(path))
    assert found == []
