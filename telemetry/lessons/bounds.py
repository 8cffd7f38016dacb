"""Bounds of a lesson file before it is parsed. Owns: what keeps a small file from taking all memory.

The parser of the standard library keeps every leading part of a dotted key, so that memory grows with the square of its
parts, and it calls itself for each bracket. What is counted here may be more than the parser would see (dots and
brackets in a text of several lines count too): the bounds leave room for that.
"""

from __future__ import annotations

import re
from typing import Final

#: Characters of a line, dots of a key, opening brackets at one time, and digits of a number.
MAX_LINE: Final = 2_000
MAX_DOTS: Final = 8
#: Of dots where a text of several lines may end in the middle of a line: what is quoted cannot be told there.
_MAX_DOTS_ANYWHERE: Final = 64
MAX_DEPTH: Final = 8
MAX_DIGITS: Final = 40
#: Lines that are not blank: at most as many keys and tables.
MAX_LINES: Final = 4_000

#: Texts on one line, as TOML quotes them, and comments.
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|#.*')
_NUMBER: Final = re.compile(r"[0-9A-Za-z_]*[0-9][0-9A-Za-z_]*")
#: Two names or more with dots between them; quoted ones are empty texts by then.
_DOTTED: Final = re.compile(r"[\w\-\"]+(?:[ \t]*\.[ \t]*[\w\-\"]+)+")


def bound_toml(text: str) -> None:
    """Raise ValueError, naming line, what, value and limit, for a text that a parser should not be given."""
    lines = text.split("\n")
    filled = sum(bool(line.strip()) for line in lines)
    _within(None, "lines that are not blank", filled, MAX_LINES)
    depth = 0
    for number, line in enumerate(lines, 1):
        _within(number, "characters", len(line), MAX_LINE)
        bare = _QUOTED.sub('""', line)
        for name in _DOTTED.findall(bare):
            _within(number, "dots in a key", name.count("."), MAX_DOTS)
        for name in _DOTTED.findall(line):
            _within(number, "dots in a row of words", name.count("."), _MAX_DOTS_ANYWHERE)
        for found in _NUMBER.findall(bare):
            _within(number, "digits of a number, or letters of a name with digits,", len(found), MAX_DIGITS)
        for letter in bare:
            if letter in "[{":
                depth += 1
                _within(number, "open brackets", depth, MAX_DEPTH)
            elif letter in "]}":
                depth = max(depth - 1, 0)


def _within(number: int | None, what: str, found: int, most: int) -> None:
    if found > most:
        where = "" if number is None else f"line {number}: "
        raise ValueError(f"{where}{found} {what}; {most} are possible")
