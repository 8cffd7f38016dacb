"""The name of this program. Owns: how a printed command has to begin so that a reader can paste it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

NAME: Final = "admitscope"


def program() -> str:
    """`admitscope` where the shell finds this very program by that name; otherwise its path, quoted for the shell."""
    script = Path(sys.argv[0])
    if script.name != NAME:
        return NAME  # started as a module: there is no script to name
    found = shutil.which(NAME)
    if found is not None and Path(found).resolve() == script.resolve():
        return NAME
    absolute = script.absolute()
    here = Path.cwd()
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))
