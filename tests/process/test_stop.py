"""A signal interrupts, wherever the process is."""

from __future__ import annotations

import subprocess
import sys

from tests.calls import ROOT

PROGRAM = """
import os, signal, time
from lowvram.endings import Interrupted
from lowvram.process.child import Stop

class Slow:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # here Python runs the handler, and drops what it raises

Stop().listen()
try:
    Slow()
    time.sleep(5)
    print("went on")
except Interrupted:
    print("interrupted")
"""


def test_an_interrupt_in_a_destructor_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "interrupted\n"
    assert done.stderr == ""
