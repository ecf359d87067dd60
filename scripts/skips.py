"""A pytest plugin: the tests that were skipped must be exactly those listed in tests/skipped.txt, so that none is skipped unseen.

    python -m pytest -p scripts.skips

Used on whole runs only (`make test`). The list holds one node id a line, `#` begins a comment. Expected failures count as skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "tests" / "skipped.txt"


def expected() -> set[str]:
    lines = (line.split("#")[0].strip() for line in LIST.read_text().splitlines())
    return {line for line in lines if line}


class Skips:
    def __init__(self) -> None:
        self.seen: dict[str, str] = {}  # node id -> reason

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(report, "wasxfail", str(report.longrepr))
            self.seen[report.nodeid] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def differences(self) -> list[str]:
        listed = expected()
        extra = [f"skipped, but not in {LIST.name}: {node} ({self.seen[node]})" for node in sorted(self.seen.keys() - listed)]
        return extra + [f"in {LIST.name}, but not skipped: {node}" for node in sorted(listed - self.seen.keys())]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.differences() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        differences = self.differences()
        terminalreporter.section("skipped tests", red=bool(differences))
        for node, reason in sorted(self.seen.items()):
            terminalreporter.line(f"{node}: {reason}")
        terminalreporter.line(f"{len(self.seen)} skipped, {len(expected())} expected")
        for line in differences:
            terminalreporter.line(line, red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Skips(), "headrace-skips")
