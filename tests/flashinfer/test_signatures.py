"""The stored signatures are of a version that the extra allows, and say what this engine relies on."""

from __future__ import annotations

import inspect

import pytest
from packaging.requirements import Requirement

from bench.dependencies import project
from tests.flashinfer.signatures import changes, names, signature, stored


def test_the_stored_version_is_the_oldest_that_the_extra_allows() -> None:
    (line,) = (line for line in project()["optional-dependencies"]["gpu"] if line.startswith("flashinfer-python"))
    specifier = Requirement(line).specifier
    assert stored()["version"] in specifier
    assert stored()["version"] in {part.version for part in specifier if part.operator == ">="}


def test_every_call_is_stored() -> None:
    assert list(stored()["calls"]) == names()
    assert {"BatchDecodeWithPagedKVCacheWrapper.plan", "rmsnorm"} < set(names())


@pytest.mark.parametrize("call", [name for name in stored()["calls"] if not name.endswith(("__init__", ".run"))])
def test_an_unknown_or_missing_argument_does_not_bind(call: str) -> None:
    plan = signature(stored()["calls"][call])
    needed = [p.name for p in plan.parameters.values() if p.default is inspect.Parameter.empty]
    plan.bind(**dict.fromkeys(needed))
    with pytest.raises(TypeError):
        plan.bind(**dict.fromkeys(needed[:-1]))
    with pytest.raises(TypeError):
        plan.bind(**dict.fromkeys([*needed, "made_up"]))


def test_changes_tell_what_breaks_a_call_and_nothing_else() -> None:
    old = [["q", "POSITIONAL_OR_KEYWORD", None], ["out", "KEYWORD_ONLY", "None"]]
    assert changes(old, [*old, ["more", "KEYWORD_ONLY", "None"]]) == []
    assert changes(old, old[:1]) == ["out is gone"]
    assert changes(old, [*old, ["more", "KEYWORD_ONLY", None]]) == ["more has no default"]
    assert changes(old, [old[0], ["out", "KEYWORD_ONLY", "1"]]) == ["out was KEYWORD_ONLY None, is KEYWORD_ONLY 1"]
    assert changes(old, [old[1], old[0]]) == ["the order of q is another"]
