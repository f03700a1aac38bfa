"""A plugin of pytest that prints why a test failed as soon as it has: a run that is cut off has told it."""

from __future__ import annotations

from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed:
        print(f"\n--- {report.nodeid} ({report.when})\n{report.longreprtext[-3000:]}", flush=True)
