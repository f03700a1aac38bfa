"""A warm process that makes trials: `KIND NUMBER SEED [SCENARIO...]` in a line of stdin, a line of JSON for each."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.faults import composed_once, configurations, flips, hostile, kills, mounts, ranks, warm, writes
from tests.faults.lab import Lab, cpu_s
from tests.faults.shim import page_here
from tests.faults.telling import Draw, Told

KINDS: dict[str, Callable[[Lab, Draw], Told]] = {
    module.__name__.rpartition(".")[2]: module.trial
    for module in (kills, writes, flips, configurations, ranks, hostile)
}


def made(lab: Lab, kind: str, number: str, seed: str, *only: str) -> dict[str, object]:
    """One trial."""
    cpu, began = cpu_s(), time.monotonic()
    try:
        told = KINDS[kind](lab, Draw(kind, int(number), int(seed), tuple(name.replace("_", " ") for name in only)))
    except Exception:
        told = Told("the suite itself failed", [traceback.format_exc()])
    used = {"cpu_s": round(cpu_s() - cpu, 3), "wall_s": round(time.monotonic() - began, 3)}
    return {"kind": kind, "number": int(number), "about": told.about, "problems": told.problems, **used}


def main() -> None:
    base = Path(sys.argv[1])
    page = page_here()
    warm.become_subreaper()
    warm.warm_up()
    lab = Lab(base, base.parent.parent, page, mounts.become_private())
    composed_once.remember(lab.shared / "composed")
    with os.fdopen(os.dup(1), "w", buffering=1) as answers, contextlib.suppress(KeyboardInterrupt):
        print("ready", file=answers)
        for line in sys.stdin:
            print(json.dumps(made(lab, *line.split())), file=answers)
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
