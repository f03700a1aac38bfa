"""What long sweeps cost: the time to the first row, and the work of a point at the beginning and at the end.

    scripts/python scripts/benchmarks/bench_sweeps.py                        # 2, 300, 2,000 points: 15 minutes
    scripts/python scripts/benchmarks/bench_sweeps.py plan=2000 measure=300  # these alone

Each sweep runs tiny points over its seeds. A point's work is CPU time of the program and all its processes, for a tenth
of the sweep on average: on a machine with other work, wall time would say more of that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from lowvram.config.identity import ROOT

TINY = ["model.num_layers=1", "model.width=32", "model.num_heads=2", "data=synthetic", "data.sequence_length=16"]
TINY += ["train.batch_size=4", "logger=none"]
QUICK = ["measure.reruns=0", "measure.fidelity=false", "measure.steps=1", "measure.warmup_steps=1"]
MODES = {"plan": ["mode=plan", "plan.device=rtx3060"], "measure": ["mode=measure", *QUICK]}
SWEEPS = ["measure=2", "measure=300", "plan=2", "plan=300", "plan=2000"]


class Moment(NamedTuple):
    """While a sweep runs."""

    num_rows: int
    wall_s: float  # since its start
    cpu_s: float


def watched(mode: str, num_points: int) -> list[Moment]:
    """Run one sweep, and look at it five times a second and at its end."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", *TINY, *MODES[mode], f"seed=range({num_points})", "hydra.sweep.dir=sweep"]
        began = time.monotonic()
        program = subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words], cwd=folder, stdout=subprocess.DEVNULL
        )
        moments: list[Moment] = []
        while program.poll() is None:
            num_rows = len(list(Path(folder).glob("sweep/*/result.json")))
            moments.append(Moment(num_rows, time.monotonic() - began, cpu_s(program.pid)))
            time.sleep(0.2)
    if program.returncode:
        raise SystemExit(f"{mode}: train.py ended with {program.returncode}")
    return moments


def cpu_s(process: int) -> float:
    """Of a process, its children that have ended, and the same of those that run; what ends meanwhile is left out."""
    try:
        ticks = sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") + sum(cpu_s(int(child)) for child in children)


def point_cpu_s(moments: list[Moment], first: int, last: int) -> float:
    """Of a point among those from `first` on and before `last`, on average."""
    begin, end = (next(one for one in moments if one.num_rows >= number) for number in (first, last))
    return (end.cpu_s - begin.cpu_s) / max(1, end.num_rows - begin.num_rows)


def main() -> None:
    titles = ["mode", "points", "first row after", "CPU to it", "CPU a point in the first tenth", "in the last", "end"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for word in sys.argv[1:] or SWEEPS:
        mode, _, number = word.partition("=")
        if mode not in MODES or not number.isdecimal():
            raise SystemExit(f"{word}: must be {' or '.join(MODES)} with a number of points, such as plan=2000")
        num_points = int(number)
        moments, tenth = watched(mode, num_points), max(1, num_points // 10)
        first = next(one for one in moments if one.num_rows)
        last_row = next(one for one in moments if one.num_rows == num_points)
        cells = [mode, f"{num_points:,}", f"{first.wall_s:.1f} s", f"{first.cpu_s:.1f} s"]
        cells += [f"{point_cpu_s(moments, first.num_rows, first.num_rows + tenth):.3f} s"]
        cells += [f"{point_cpu_s(moments, num_points - tenth, num_points):.3f} s"]
        cells += [f"{moments[-1].wall_s - last_row.wall_s:.1f} s"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
