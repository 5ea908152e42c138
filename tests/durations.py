"""Processor time of each test: every run records it and names those that cost too much for their tier.

Processor time, not the clock, so that a busy machine changes little: of all threads of this process, and of ended children.
Processors differ by a factor of two, and a random draw may be dear, so a test above its limit is named, and only one
far above it fails the run.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Generator

import pytest

import shell

LIMIT = 5.0
"""Seconds of a test that is not marked. Those above one second are marked ``slow``: the rest is for slower machines."""
FAILURE = 4
"""Times the limit: what no slower processor and no dear draw explains."""
EXEMPT = ("slow", "machine", "peers", "levanter", "engines", "servers")
RECORD = "actshard/durations"
"""Seconds by test, in pytest's cache: ``.pytest_cache/v/actshard/durations``."""


def processor_seconds() -> float:
    """User and system time of this process, of its ended children, and of commands."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + shell.spent_seconds()


class Durations:
    """A pytest plugin; with pytest-xdist, workers measure and the controller records."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._is_worker = hasattr(config, "workerinput")
        self._start = 0.0
        self._seconds: dict[str, float] = {}
        self._limited: set[str] = set()

    def pytest_runtest_logstart(self) -> None:
        self._start = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        end = processor_seconds()
        # Attributes of reports are sent to the controller.
        report.processor_seconds = end - self._start
        report.is_limited = not any(item.get_closest_marker(name) for name in EXEMPT)
        self._start = end
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The report of a worker that crashed comes from pytest-xdist and was not measured.
        seconds = getattr(report, "processor_seconds", 0.0)
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + seconds
        if getattr(report, "is_limited", False) and report.outcome == "passed":
            self._limited.add(report.nodeid)

    def _expensive(self) -> dict[str, float]:
        return {name: self._seconds[name] for name in sorted(self._limited) if self._seconds[name] > LIMIT}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._is_worker:
            return
        cache = getattr(self._config, "cache", None)  # absent with -p no:cacheprovider
        if cache is not None:
            recorded = cache.get(RECORD, {})
            recorded.update({name: round(seconds, 3) for name, seconds in self._seconds.items()})
            cache.set(RECORD, recorded)
        if (
            any(seconds > FAILURE * LIMIT for seconds in self._expensive().values())
            and session.exitstatus == pytest.ExitCode.OK
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._is_worker:
            return
        terminalreporter.write_line(
            f"{sum(self._seconds.values()):.0f} s of processor time; each test's is in .pytest_cache/v/{RECORD}"
        )
        for name, seconds in self._expensive().items():
            terminalreporter.write_line(
                f"{name}: expected at most {LIMIT:g} s of processor time, found {seconds:.1f}. Make it cheaper, "
                "or mark it: @pytest.mark.slow runs in make test-slow."
            )
