"""The tiers of the suite: `scripts/test fast`, `scripts/test`, `scripts/test all`. Each includes the one before.

Tests marked `slow` run only in `all`. Tests that start processes are marked `medium`, as others are in their files, and
don't run in `fast`. Of tests marked `sampled`, whose cases are alike, `all` runs every case and the other tiers a few.
`scripts/test` is to take only minutes: its summary names unmarked tests that take more than `LIMIT_S` (`MEDIUM_LIMIT_S`
if medium). One that takes many times as long, as on no machine it should, fails.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from zlib import crc32

import pytest

from lowvram.launch.process_tree import children

ROOT = Path(__file__).parent
# CPU time, not wall-clock time, so that other processes can't fail a test, on a processor as fast as one that takes
# REFERENCE_S for `reference_s`: those of shared machines are at times half as fast. Starting a process takes seconds.
LIMIT_S, MEDIUM_LIMIT_S = 5.0, 10.0
FAILS_AT = 4  # times that: a busy machine has shown twice its usual CPU time for starts of processes
TAKEN = "cpu_s_beyond_tier"  # the property of a test's report
REFERENCE_S = 0.08
STARTERS = {"call", "start", "train"}  # fixtures that start processes
# Files of processes and their rows, whose tests are marked here.
MEDIUM = ["launch/test_faults", "worker/test_flops", "worker/test_ranks"]
SAMPLED = {"cli/test_resume": 2, "launch/test_faults": 3, "worker/test_flops": 6}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def first_of(cases: Sequence[Any], num: int = 1) -> list[Any]:
    """The first `num` cases unmarked, and the others marked slow. A case of several values is a tuple."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [*cases[:num], *(pytest.param(*each, marks=pytest.mark.slow) for each in values[num:])]


def sample(items: Sequence[pytest.Function]) -> None:
    """Mark the cases slow that `sampled` leaves out.

    `sampled(n)` leaves each n-th case, in their order. `sampled` leaves each value of each parameter in one case at
    least: of 4 options on 3 models 4 cases or a few more. Its cases are taken in an order that mixes the values.
    """
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None and step_of(item) is not None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        step = step_of(cases[0])
        left_out = values_left_out(cases) if step == 0 else [case for i, case in enumerate(cases) if i % (step or 1)]
        for case in left_out:
            case.add_marker("slow")


def step_of(item: pytest.Function) -> int | None:
    """The n of `sampled(n)`, 0 of `sampled`; None without the mark."""
    mark = item.get_closest_marker("sampled")
    if mark is not None:
        return mark.args[0] if mark.args else 0
    return {ROOT / f"{name}.py": number for name, number in SAMPLED.items()}.get(item.path)


def values_left_out(cases: Sequence[pytest.Function]) -> list[pytest.Function]:
    """Cases all of whose values are in cases before them, in an order that mixes the values."""
    seen, left_out = set[tuple[str, object]](), list[pytest.Function]()
    for case in sorted(cases, key=lambda case: crc32(case.name.encode())):
        values = {(name, value_id(value)) for name, value in case.callspec.params.items()}
        if values <= seen:
            left_out.append(case)
        seen |= values
    return left_out


def value_id(value: object) -> object:
    """What is the same for the same value of a parameter, which may have no hash."""
    return (type(value), value) if _has_hash(value) else id(value)


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:  # a tuple of dicts, a frozen dataclass that holds a list
        return False
    return True


def check_cpu_s(item: pytest.Function, taken_s: float) -> None:
    """Have the summary name a test that took more CPU time than its mark allows, or fail it."""
    marks = {mark.name for mark in item.iter_markers()}
    limit_s = MEDIUM_LIMIT_S if "medium" in marks else LIMIT_S
    if taken_s <= limit_s or marks & {"slow", "gpu", "emulated"}:
        return
    limit_s *= slowness()
    if taken_s > limit_s * FAILS_AT:
        pytest.fail(f"took {taken_s:.1f} s of processors: mark it slow, or make it smaller (tests/tiers.py)", False)
    if taken_s > limit_s:
        item.user_properties.append((TAKEN, taken_s))


def tell_long_tests(reporter: pytest.TerminalReporter) -> None:
    """Print the tests that took more CPU time than their tiers allow."""
    every = [report for reports in reporter.stats.values() for report in reports]
    reports = [report for report in every if isinstance(report, pytest.TestReport)]
    found = {(report.nodeid, value) for report in reports for name, value in report.user_properties if name == TAKEN}
    for name, taken_s in sorted(found, key=lambda each: -float(str(each[1]))):
        reporter.write_line(f"{taken_s:.1f} s of processors: {name}: mark it slow, or make it smaller (tests/tiers.py)")


def slowness() -> float:
    """How many times as long as on the processor of the limits this one takes now; at least 1."""
    return max(1.0, median(reference_s() for _ in range(5)) / REFERENCE_S)


def reference_s() -> float:
    """The CPU time of some work that is always the same."""
    began = time.process_time()
    sum(number * number % 7 for number in range(1_000_000))
    return time.process_time() - began


def cpu_s() -> float:
    """The CPU time of this process so far, including all its descendants, alive or not."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(_cpu_s_of, _below(os.getpid())))


def _below(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _below(child)


def _cpu_s_of(pid: int) -> float:
    """The CPU time of a process that is alive, and of children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS_PER_S
