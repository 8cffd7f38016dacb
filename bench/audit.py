"""`make audit`: the installed packages against licences, declarations and known vulnerabilities. Owns: that report.

What needs no network always runs, in CI too (tests/architecture/test_dependencies.py). Known vulnerabilities are asked
of a service by pip-audit; where none answers, this says so, and says that nothing was looked up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.dependencies import LICENCES, declared, imported, installed, licences, pip_check

_TIMEOUT_S: Final = 300


def offline() -> list[str]:
    """Faults that can be seen without a network, in words."""
    found = [f"pip check: {line}" for line in pip_check()]
    for name, distribution in sorted(installed().items()):
        other = licences(distribution) - LICENCES
        if other:
            found.append(f"{name}: licence {', '.join(sorted(other)) or 'none'} is not on the list")
    known = declared()
    found += [
        f"{name}: imported by {min(files)}, declared nowhere" for name, files in imported().items() if name not in known
    ]
    return found


def online() -> tuple[int, int, list[str]]:
    """Packages that a service knew, packages in all, and their vulnerabilities in words."""
    words = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return 0, 0, []
    known = [package for package in packages if "skip_reason" not in package]
    found = [
        f"{package['name']} {package['version']}: {fault['id']}, mended in {', '.join(fault['fix_versions']) or 'none'}"
        for package in known
        for fault in package["vulns"]
    ]
    return len(known), len(packages), found


def main() -> int:
    """Returns 1 when something was found. Not having been able to ask is said, and is no fault."""
    console = Console()
    faults = offline()
    table = Table("package", "version", "licence", title="what a server and its dashboard bring along")
    for name, distribution in sorted(installed().items()):
        table.add_row(name, distribution.version, ", ".join(sorted(licences(distribution))))
    console.print(table)
    known, total, vulnerable = online()
    faults += vulnerable
    for fault in faults:
        print(f"  {fault}")
    if known:
        asked = f"{known} of {total} packages looked up, {len(vulnerable)} vulnerabilities"
    else:
        asked = "no vulnerability service answers from here: nothing was looked up"
    local = len(faults) - len(vulnerable)
    print(f"audit: {len(installed())} packages, {local} faults in licences and declarations; {asked}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
