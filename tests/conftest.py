"""What every test gets. Owns: Hypothesis settings, who may run beside whom, and the rule of what CI may skip."""

from __future__ import annotations

import os

import hypothesis
import pytest

#: Reasons for a skip that a machine cannot be helped with.
ALLOWED_SKIPS = ("no GPU", "this processor has no")
STRICT_VARIABLE = "TESTS_MAY_NOT_SKIP"

#: Folders whose tests wait for processes of the real world, beside those marked `browser`.
LIVE_FOLDERS = ("grafana",)
#: Niceness of all other tests where there are several workers.
_YIELDING = 10

# No deadlines: a slow machine is not a failing test. Derandomized in CI, so that a red run can be repeated.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get(STRICT_VARIABLE) else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers (`--dist loadgroup`): a file stays together, since what its tests share is dear to make.

    All that opens a browser, or watches a real Prometheus by the clock, stands in one line: two of them at once would
    wait for each other's processor.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group("live" if _is_live(item) else str(item.path)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Beside a test that is watched by the clock, another worker takes only the processor that is left over."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0:  # others may give priority away, but not take it back
        os.setpriority(os.PRIO_PROCESS, 0, 0 if _is_live(item) else _YIELDING)


def _is_live(item: pytest.Item) -> bool:
    return item.get_closest_marker("browser") is not None or item.path.parent.name in LIVE_FOLDERS


def _refused_skips(config: pytest.Config) -> list[str]:
    """`where: reason` of every skip that strict mode does not allow."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not os.environ.get(STRICT_VARIABLE):
        return []
    lines = []
    for report in reporter.stats.get("skipped", ()):
        path, line, reason = report.longrepr
        if not any(words in reason for words in ALLOWED_SKIPS):
            lines.append(f"{report.nodeid or path}:{line}: {reason}")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A refused skip turns a green run red."""
    ends_green = session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}
    if ends_green and _refused_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say which skips were refused, above pytest's closing line."""
    refused = _refused_skips(config)
    if refused:
        terminalreporter.section(f"skipped, and {STRICT_VARIABLE} is set", red=True)
        for line in refused:
            terminalreporter.write_line(line)
