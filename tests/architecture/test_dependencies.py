"""Dependencies are declared, used, bounded, whole, and under licences that allow what this project's own allows."""

from __future__ import annotations

import importlib.metadata
from email.message import Message

import pytest

from bench.dependencies import LICENCES, RUNTIME_EXTRAS, declared, imported, installed, licences, pip_check, project

#: Declared for what they do, not for what they offer to import.
NOT_IMPORTED = {"duckdb"}


def test_every_import_is_declared() -> None:
    known = declared()
    assert {name: files for name, files in imported().items() if name not in known} == {}


def test_every_declared_package_is_imported() -> None:
    unused = set(declared()) - set(imported()) - NOT_IMPORTED
    assert unused == set()


def test_nothing_is_without_a_lower_bound_and_torch_has_both() -> None:
    for name, requirement in declared().items():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {">=", "==", "~="}, f"{name} takes any old version"
        assert "==" not in operators, f"{name} is pinned, and would be when that version is withdrawn"
        assert requirement.url is None, f"{name} does not come from the index"
    assert {specifier.operator for specifier in declared()["torch"].specifier} == {">=", "<"}


def test_installed_packages_fit_each_other() -> None:
    assert pip_check() == []


def test_licences_of_everything_that_runs_are_on_the_list() -> None:
    found = installed()
    assert len(found) > 40
    assert set(declared(RUNTIME_EXTRAS)) <= set(found)
    assert {name: other for name, d in found.items() if (other := licences(d) - LICENCES)} == {}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"License-Expression": "MIT AND (Apache-2.0 OR GPL-3.0-only)"}, {"MIT", "Apache-2.0", "GPL-3.0-only"}),
        ({"Classifier": "License :: OSI Approved :: BSD License", "License": "whatever"}, {"BSD"}),
        ({"Classifier": "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"}, None),
        ({"License": "MPL-2.0 AND MIT"}, {"MPL-2.0", "MIT"}),
        ({"License": "Proprietary"}, {"Proprietary"}),
        ({}, {""}),
    ],
)
def test_licences_are_read_from_every_place_they_are_written(
    headers: dict[str, str], expected: set[str] | None
) -> None:
    class Fake(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            message = Message()
            for name, value in headers.items():
                message[name] = value
            return str(message) if filename == "METADATA" else None

        def locate_file(self, path: object) -> object:
            raise NotImplementedError  # the standard library asks for the method; nobody calls it here

    found = licences(Fake())
    assert (found == expected) if expected is not None else (found - LICENCES)


def test_the_gpu_extra_is_bounded_above() -> None:
    for line in project()["optional-dependencies"]["gpu"]:
        assert "<" in line
