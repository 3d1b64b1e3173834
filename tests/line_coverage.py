"""Which lines of pirl the suite runs: a plugin for pytest (`-p line_coverage`) that costs little, as it sees a line once.

Lines that run only in processes that tests start (commands, environments, hosts) count as missed.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from slipcover import FileMatcher, ImportManager, Slipcover, merge_coverage

SOURCE = Path(__file__).resolve().parent.parent / "src" / "pirl"


class LineCoverage:
    """Watches modules from when they are imported; under xdist every worker does, and the first process adds up."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._watched = Slipcover(source=[str(SOURCE)])
        self._of_workers: list[dict[str, Any]] = []
        self._rooms: dict[str, tuple[int, int]] = {}
        ImportManager(self._watched, FileMatcher(sources=[SOURCE])).__enter__()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers.append(json.loads(node.workeroutput["line_coverage"]))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        found = self._watched.get_coverage()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["line_coverage"] = json.dumps(found)
            return
        for part in self._of_workers:
            merge_coverage(found, part)
        for name, file in sorted(found["files"].items()):
            room = Path(name).resolve().relative_to(SOURCE).parts[0].removesuffix(".py")
            ran, missed = len(file["executed_lines"]), len(file["missing_lines"])
            before = self._rooms.get(room, (0, 0))
            self._rooms[room] = (before[0] + ran, before[1] + ran + missed)
        if not exitstatus and self._percent() < self._least:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("lines that ran")
        for room, (ran, lines) in self._rooms.items():
            terminalreporter.write_line(f"{room:12}{100 * ran / lines:6.1f} % of {lines}")
        wanted = f"; at least {self._least:g} % are wanted" if self._percent() < self._least else ""
        terminalreporter.write_line(f"{'all':12}{self._percent():6.1f} %{wanted}")

    def _percent(self) -> float:
        ran, lines = (sum(column) for column in zip(*self._rooms.values(), strict=True))
        return 100 * ran / lines


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--least-lines", type=float, default=0.0, help="fail unless so many percent of all lines ran")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LineCoverage(config.getoption("--least-lines")), "line coverage")
