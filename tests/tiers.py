"""The tiers of the suite: `scripts/test fast`, `scripts/test`, `scripts/test all`. Each includes the one before.

Tests marked `slow` run only in `all`. Tests that start processes, and those of the files below, are marked `medium` and
don't run in `fast`. An unmarked test that takes more than `LIMIT_S` (`MEDIUM_LIMIT_S` if medium) fails, so that
`scripts/test` takes only minutes.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lowvram.launch.process_tree import children

ROOT = Path(__file__).parent
# CPU time, not wall-clock time, so that other processes can't fail a test, on a processor as fast as one that takes
# REFERENCE_S for `reference_s`: those of shared machines are at times half as fast. Starting a process takes seconds.
LIMIT_S, MEDIUM_LIMIT_S = 5.0, 10.0
REFERENCE_S = 0.08
STARTERS = {"call", "start", "train"}  # fixtures that start processes
MEDIUM = [
    "test_examples",
    "test_laws",
    "test_laws_foreign",
    "test_laws_of_pairs",
    "test_presets",
    "knobs/test_adapter",
    "knobs/test_adapter_over_time",
    "knobs/test_ckpt",
    "knobs/test_compile",
    "knobs/test_offload",
    "knobs/test_optimizer",
    "knobs/test_sharding",
    "knobs/test_stepping_together",
    "knobs/test_tile",
    "knobs/test_tile_blocks",
    "launch/test_faults",
    "loops/test_adapters",
    "loops/test_several_ranks",
    "loops/test_train",
    "loops/profiling/test_compile_time",
    "planning/test_choice",
    "planning/test_scaling",
    "planning/test_worker",
    "planning/time/test_calibration",
    "planning/time/test_roofline",
    "planning/trace/test_tracer",
    "results/loggers/test_wandb",
    "results/loggers/test_wandb_sweep",
    "search/test_worker",
    "worker/test_flops",
    "worker/test_ranks",
    "zoo/test_zoo",
]
# Of tests with many cases that are alike: in these files `scripts/test` runs each n-th case, and `all` the others.
SAMPLED = {
    "test_laws_of_pairs": 3,
    "test_laws_foreign": 2,
    "cli/test_resume": 2,
    "config/test_secret": 3,
    "knobs/test_adapter_over_time": 2,
    "compress/test_sparsity": 2,
    "compress/test_sparsity_zeros": 2,
    "knobs/test_stepping_together": 3,
    "knobs/test_tile": 2,
    "knobs/test_tile_blocks": 2,
    "launch/test_faults": 2,
    "compress/distillation/test_features": 2,
    "models/test_hf_depths": 2,
    "models/test_hf_families": 3,
    "models/test_hf_widths": 2,
    "models/test_local_attention": 2,
    "planning/test_choice": 2,
    "planning/trace/test_tracer": 2,
    "worker/test_flops": 3,
}
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def first_of(cases: Sequence[Any], num: int = 1) -> list[Any]:
    """The first `num` cases unmarked, and the others marked slow. A case of several values is a tuple."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [*cases[:num], *(pytest.param(*each, marks=pytest.mark.slow) for each in values[num:])]


def sample(items: Sequence[pytest.Function]) -> None:
    """Mark the cases slow that `SAMPLED` leaves out, counted in their order."""
    every = {ROOT / f"{name}.py": number for name, number in SAMPLED.items()}
    counts = Counter[Any]()
    for item in items:
        number = every.get(item.path)
        if number and hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            test = (item.path, item.originalname)
            if counts[test] % number:
                item.add_marker("slow")
            counts[test] += 1


def check_cpu_s(item: pytest.Function, taken_s: float) -> None:
    """Fail a test that took more CPU time than its mark allows."""
    marks = {mark.name for mark in item.iter_markers()}
    limit_s = MEDIUM_LIMIT_S if "medium" in marks else LIMIT_S
    if taken_s > limit_s and not marks & {"slow", "gpu", "emulated"} and taken_s > limit_s * slowness():
        pytest.fail(f"took {taken_s:.1f} s of processors: mark it slow, or make it smaller (tests/tiers.py)", False)


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
