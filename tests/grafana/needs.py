"""What these tests need from Debian. Owns: the marks that skip a test by the name of the package it lacks."""

from __future__ import annotations

import shutil

import pytest

from grafana.servers import PACKAGES


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips where one of `programs` is not installed; CI installs them (.ci/run)."""
    missing = sorted({PACKAGES[program] for program in programs if shutil.which(program) is None})
    return pytest.mark.skipif(bool(missing), reason=f"needs Debian's {' and '.join(missing)}: apt-get install")
