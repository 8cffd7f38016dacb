"""FlashInfer is imported where its attention or its small operators are constructed, and torch.cuda is used behind a
seam; nowhere else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "telemetry", "invariants", "dashboard")
ATTENTION = "engine/attention/flashinfer.py"
OPERATORS = "engine/models/flashinfer_ops.py"
SEAM = "engine/attention/device.py"


def flashinfer_imports(tree: ast.AST, where: str = "") -> Iterator[str]:
    """Name of the innermost function (or "") around each import of flashinfer."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else where
            yield from flashinfer_imports(node, inner)
            continue
        yield from (where for name in names if name.partition(".")[0] == "flashinfer")


def uses_torch_cuda(tree: ast.AST) -> bool:
    """`torch.cuda`, however it is come by. Annotations and texts are no use."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                return True
        elif isinstance(node, ast.Import):
            if any(alias.name.startswith("torch.cuda") for alias in node.names):
                return True
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.startswith("torch.cuda") or (module == "torch" and any(a.name == "cuda" for a in node.names)):
                return True
    return False


@cache
def trees(*folders: str) -> list[tuple[str, ast.Module]]:
    """Name and tree of every file; of those that name neither, which are most, an empty tree."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            is_concerned = "flashinfer" in text or "cuda" in text
            found.append((str(path.relative_to(ROOT)), ast.parse(text if is_concerned else "")))
    return found


def test_flashinfer_is_imported_in_the_constructors_of_attention_and_operators_only() -> None:
    found = {name: places for name, tree in trees(*PACKAGES) if (places := list(flashinfer_imports(tree)))}
    assert found == {ATTENTION: ["__init__"], OPERATORS: ["__init__"]}


def test_benches_import_flashinfer_in_functions_of_gpu_check_only() -> None:
    found = {name: places for name, tree in trees("bench") if (places := list(flashinfer_imports(tree)))}
    assert [name for name in found if not name.startswith("bench/gpu_check/")] == []
    assert not any("" in places for places in found.values()), "imported when the module is"


def test_torch_cuda_is_used_behind_the_seam_only() -> None:
    assert {name for name, tree in trees(*PACKAGES) if uses_torch_cuda(tree)} == {SEAM}
    beside = {name for name, tree in trees("bench") if uses_torch_cuda(tree)}
    assert {name for name in beside if not name.startswith("bench/gpu_check/")} == set()


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("import flashinfer", [""]),
        ("import flashinfer.sampling as s", [""]),
        ("from flashinfer.page import append", [""]),
        ("class A:\n def __init__(self):\n  if self:\n   import flashinfer", ["__init__"]),
        ("from engine.attention.flashinfer import FlashInferBackend\nimport flashinfers", []),
        ("from .flashinfer import x", []),
    ],
)
def test_the_first_rule_sees(text: str, places: list[str]) -> None:
    assert list(flashinfer_imports(ast.parse(text))) == places


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch.cuda.is_available()", True),
        ("import torch.cuda", True),
        ("from torch import cuda", True),
        ("from torch.cuda import Event", True),
        ("torch.version.cuda", False),
        ("torch.device('cuda')", False),
    ],
)
def test_the_second_rule_sees(text: str, found: bool) -> None:
    assert uses_torch_cuda(ast.parse(text)) is found


def test_importing_what_uses_it_imports_no_flashinfer() -> None:
    modules = "engine.attention.flashinfer, engine.models.flashinfer_ops"
    program = f"import sys, {modules}; sys.exit('flashinfer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=120).returncode == 0
