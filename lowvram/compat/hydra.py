"""Private names of Hydra. Imports no torch."""

from __future__ import annotations

import argparse

from hydra._internal.core_plugins import basic_launcher
from hydra._internal.utils import get_args_parser


def args_parser() -> argparse.ArgumentParser:
    """The argparse parser of all of Hydra's own flags.

    hydra._internal.utils.get_args_parser, since 1.0: `hydra.main` parses and, on an error, prints argparse's message
    and exits. Replaced by a public name, if Hydra makes one.
    """
    return get_args_parser()


def own_launcher() -> str:
    """The `_target_` of the launcher that runs jobs one after another in the program's process.

    hydra._internal.core_plugins.basic_launcher.BasicLauncher, since 1.0. Replaced by a public name, if Hydra makes one.
    """
    return f"{basic_launcher.__name__}.{basic_launcher.BasicLauncher.__qualname__}"
