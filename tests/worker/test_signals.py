"""A signal interrupts, wherever the process is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.calls import ROOT

PROGRAM = """
import os, signal, time
from lowvram.worker.errors import Interrupted
from lowvram.worker.main import ChildStop

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # here Python runs the handler, and drops what it raises

ChildStop().listen()
try:
    Slow()
    time.sleep(5)
    print("went on")
except Interrupted:
    print("interrupted")
"""


@pytest.mark.slow
def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\n"
    assert done.stderr == ""


DROPPING = """
import os, signal, time
from lowvram.worker import main
from lowvram.worker.errors import Interrupted

main.DROPPED_S = 0.2
stop = main.ChildStop()
stop.listen()
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
except BaseException:  # as code of a library, or of a model's constructor
    pass
try:
    time.sleep(5)
    print("went on")
except Interrupted:
    stop.settle()
    time.sleep(0.5)
    print("interrupted")
"""


@pytest.mark.slow
def test_an_interrupt_that_other_code_drops_is_raised_again() -> None:
    """Else a set-up would go on until a second signal. Once the point has ended there is none."""
    done = subprocess.run([sys.executable, "-c", DROPPING], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\n"


CAPPED = """
import resource
from lowvram.worker.main import ChildStop

class Starved:
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error

ChildStop().listen()
Starved(RuntimeError("can't start new thread"))
resource.setrlimit(resource.RLIMIT_DATA, (2**40, resource.RLIM_INFINITY))
Starved(ValueError("a bug"))
Starved(RuntimeError("can't start new thread"))
"""


@pytest.mark.slow
def test_a_destructor_without_memory_is_reported_but_under_a_cap() -> None:
    """There the point itself says that it was out of memory."""
    done = subprocess.run([sys.executable, "-c", CAPPED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if line.endswith(("bug", "thread"))] == [
        "RuntimeError: can't start new thread",
        "ValueError: a bug",
    ]
