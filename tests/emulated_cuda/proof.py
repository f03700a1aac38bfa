"""A plugin of pytest that says at the end what a run has proved (scripts/emulated_gpu).

Tests say by `record_property` how many seeds, points or pairs of options they have run.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

PROPERTIES = {  # by the beginning of the tests' path, what they prove; the first match counts
    "tests/emulated_cuda/test_races.py": "late streams: offload, steppings and loaders train as on the CPU",
    "tests/emulated_cuda/test_pairs.py": "pairs of options train as the plain loop on the CPU, with ranks too",
    "tests/emulated_cuda/test_options.py": "each option learns the same in an ordinary child process",
    "tests/emulated_cuda/test_modes.py": "train, resume, export, plan, search, vram, memory, fidelity, gpu_check",
    "tests/emulated_cuda/test_ranks.py": "ranks that share out data, layers, tokens or stages train as one process",
    "tests/emulated_cuda/test_plans_of_ranks.py": "each of several cards takes what is planned",
    "tests/emulated_cuda/test_compiled.py": "compiled points run to their end",
    "tests/emulated_cuda/": "the device is what it says",
    "tests/scripts/test_record.py": "the simulated allocator does what the real one does, to the byte",
    "tests/": "tests marked gpu",
}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    proved: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.when == "call" or outcome == "error":
                counts = proved.setdefault(what_proves(report.nodeid), Counter())
                counts["passed" if outcome == "passed" else "FAILED"] += 1
                for name, number in report.user_properties if outcome == "passed" else []:
                    counts[name] += number
    terminalreporter.section("proved on the emulated device")
    for what in dict.fromkeys(PROPERTIES.values()):
        if what in proved:
            figures = ", ".join(f"{number:,} {name}" for name, number in proved[what].items())
            terminalreporter.write_line(f"{what}: {figures}")


def what_proves(nodeid: str) -> str:
    return next(what for path, what in PROPERTIES.items() if nodeid.startswith(path))
