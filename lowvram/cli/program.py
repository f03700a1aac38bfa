"""How the user has called this program: `python train.py`, `scripts/train` or `lowvram`. Printed commands start
the same way. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from omegaconf import OmegaConf

from lowvram.compat.hydra import complete_program

TYPED = "LOWVRAM_PROGRAM"  # in the environment: how scripts/train was called
COMMAND = "lowvram"  # the installed command
COMPLETION = ("-sc", "--shell-completion")

_words = [COMMAND]


def note_program() -> None:
    """Have `sys.orig_argv`, from which printed commands are made, begin with what was typed: not with the interpreter
    that scripts/train or the installed command has started."""
    typed, script = os.environ.pop(TYPED, None), sys.argv[0]
    if typed is None and Path(script).name == COMMAND:
        found = shutil.which(COMMAND)
        typed = COMMAND if found is not None and Path(found).samefile(script) else script
    if typed is not None:
        sys.orig_argv = [typed, *sys.argv[1:]]
        if not set(sys.argv).isdisjoint(COMPLETION):
            complete_program(typed)
    OmegaConf.register_new_resolver("program", program, replace=True)  # for --help
    _words[:] = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]


def program() -> str:
    """The beginning of a command, for messages."""
    return shlex.join(_words)
