"""Pages of docs/studies. Owns: the section of each that a run wrote, between markers; the words around it are by hand.

A section is `<!-- figures -->`, the lines, `<!-- end -->`. Nothing else of a page is touched. Beside a page lie its
figures as JSON and its plots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "docs" / "studies"
START: Final = "<!-- figures -->"
END: Final = "<!-- end -->"


def with_figures(text: str, lines: Sequence[str]) -> str:
    """`text` with its section as a run wrote it. Raises LookupError where the page has not exactly one."""
    before, found, rest = text.partition(START + "\n")
    _, closed, after = rest.partition(END)
    if not found or not closed or START in after:
        raise LookupError(f"a page of a study has exactly one section {START} … {END}")
    return "\n".join([before + START, *lines, END]) + after


def figures_of(text: str) -> list[str]:
    """The lines of a page's section."""
    return text.partition(START + "\n")[2].partition("\n" + END)[0].splitlines()


def write(name: str, result: Mapping[str, Any], lines: Sequence[str], plots: Mapping[str, str]) -> None:
    """The section of `name`.md, and beside it NAME.json and NAME-PLOT.svg."""
    page = FOLDER / f"{name}.md"
    page.write_text(with_figures(page.read_text("utf-8"), lines), "utf-8")
    (FOLDER / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    for plot, document in plots.items():
        (FOLDER / f"{name}-{plot}.svg").write_text(document, "utf-8")
