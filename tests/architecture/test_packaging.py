"""The wheel holds exactly the four packages and their data, and clashes with nothing it is installed beside."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"engine", "telemetry", "invariants", "dashboard"}

hatchling_wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed: make install")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The wheel that this tree builds, without an isolated environment and so without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    builder = hatchling_wheel.WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(folder), versions=["standard"])
    return zipfile.Path(path)


def test_top_level_names_are_exactly_the_four(wheel: zipfile.Path) -> None:
    names = {entry.name for entry in wheel.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == PACKAGES


def test_data_and_licence_travel(wheel: zipfile.Path) -> None:
    for name in (
        "telemetry/demo/data/azure_conv_2023.csv.gz",
        "telemetry/demo/data/shakespeare.txt.gz",
        "telemetry/demo/data/README.md",
        "engine/py.typed",
        "engine/native/kernels/common.h",
        "engine/native/kernels/pool.c",
    ):
        assert wheel.joinpath(name).exists(), name
    (info,) = (entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
    assert "admitscope = telemetry.cli:main" in info.joinpath("entry_points.txt").read_text("utf-8")
    assert info.joinpath("licenses/LICENSE").exists()
    assert info.joinpath("licenses/NOTICE").exists()


def test_no_other_installed_distribution_provides_our_names() -> None:
    providers = importlib.metadata.packages_distributions()
    clashes = {name: set(providers.get(name, [])) - {"admitscope"} for name in PACKAGES}
    assert {name: others for name, others in clashes.items() if others} == {}


def test_the_torch_range_admits_the_cpu_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (torch,) = (entry for entry in project["optional-dependencies"]["torch"] if entry.startswith("torch"))
    assert torch == "torch>=2.11,<2.14"
    core = " ".join(project["dependencies"])
    assert not re.search(r"\b(torch|fastapi|streamlit|transformers)\b", core)


def test_no_registry_host_is_named_anywhere() -> None:
    # Where packages come from is the machine's business: pip's own configuration.
    files = (ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run", ROOT / ".pre-commit-config.yaml")
    for file in files:
        assert not re.search(r"index-url|pypi\.org|pytorch\.org|https?://", file.read_text("utf-8")), file.name


def test_pre_commit_uses_local_hooks_only() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert re.findall(r"- repo: (.*)", text) == ["local"]


def test_ci_runs_the_readme_command() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    script = ROOT / ".ci" / "run"
    assert "make test" in readme
    assert "make demo" in readme
    assert script.read_text("utf-8").rstrip().endswith("make test")
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", script], check=False, timeout=60).returncode == 0


def test_python_optimised_mode_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-O", "-m", "telemetry.cli", "--help"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "python -O" in done.stderr
