"""Texts that a package says in the language of its reader. Owns: finding them in its source, for tests."""

from __future__ import annotations

import ast
import functools
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
#: Where the texts stand in a call of each; `tn` has the count first.
_TEXTS: Final = {"t": slice(0, 1), "mark": slice(0, 1), "tn": slice(1, 3)}


def said(package: str) -> Iterator[tuple[str, ast.expr]]:
    """(place, text as written) of every text in the modules of `package` that say one."""
    for file in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = {
            name.asname or name.name: name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == f"{package}.words"
            for name in node.names
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            place = _TEXTS.get(imported.get(node.func.id, ""))
            for text in node.args[place] if place is not None else ():
                yield f"{file.relative_to(ROOT)}:{node.lineno}", text


@functools.cache
def literals(package: str) -> dict[str, str]:
    """Text to the place where it is said first."""
    found: dict[str, str] = {}
    for place, text in said(package):
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            found.setdefault(text.value, place)
    return found


def built(package: str) -> list[str]:
    """Places of texts that are put together where they are said: no dictionary has those."""
    return [place for place, text in said(package) if isinstance(text, (ast.JoinedStr, ast.BinOp))]


def places_of(text: str) -> set[str]:
    """Names of the values in a text."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}
