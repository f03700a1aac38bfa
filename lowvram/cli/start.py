"""The start of the program, before anything slow is imported: signals, and output (streams.py)."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from lowvram.config.exit_codes import EXIT_INTERRUPTED, EXIT_REFUSED
from lowvram.config.version import __version__
from lowvram.launch.streams import STDERR, protect_streams


def main() -> None:
    """`python train.py …` and `lowvram …`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as after nohup
            signal.signal(number, end_at_once)  # until cli/main.py installs its own handlers
    protect_streams()
    if "--version" in sys.argv[1:]:
        print(f"lowvram {__version__}")
        return
    try:
        from lowvram.cli.main import main as command_line  # a third of a second
    except (ImportError, PermissionError) as error:
        name = error.filename if isinstance(error, PermissionError) else error.path or error.name
        why = "are all packages installed, and readable to this user?"
        print(f"{name or 'a package'}: can't be imported ({error}): {why}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    command_line()


def end_at_once(number: int, frame: Any) -> None:
    """Exit: no run has begun, so there is nothing to save."""
    os.write(STDERR, b"interrupted before anything began\n")
    os._exit(EXIT_INTERRUPTED)
