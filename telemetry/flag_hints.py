"""Flags that may have been meant. Owns: the guess for a flag that a command does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def flags_of(model: type[BaseModel], head: str = "--") -> Iterator[str]:
    """Every flag of a command, as it is written: `--scheduler.chunked-prefill-size`."""
    for name, field in model.model_fields.items():
        flag = head + (field.alias or name).replace("_", "-")
        yield flag
        if field.annotation is bool:
            yield flag.replace("--", "--no-", 1)
        for part in _models_in(field.annotation):
            yield from flags_of(part, flag + ".")


def guesses(root: type[BaseModel], words: Sequence[str]) -> list[str]:
    """One line for each flag among `words` that their command lacks, and that is close to one it has."""
    field = root.model_fields.get(words[0]) if words else None
    known = {flag for model in _models_in(field.annotation) for flag in flags_of(model)} if field else set()
    lines = []
    for word in words[1:]:
        if word == "--":
            break
        flag = word.partition("=")[0].replace("_", "-")
        if not flag.startswith("--") or flag in known:
            continue
        # Who forgets the section means the flag of that name; the others are misspelt.
        within = sorted(one for one in known if one.endswith("." + flag.removeprefix("--")))
        near = within or difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
        if near:
            lines.append(f"{word.partition('=')[0]}: no such flag; did you mean {' or '.join(near[:3])}?")
    return lines


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models of an annotation: `Config`, `Config | None`, `Annotated[Config, …]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
