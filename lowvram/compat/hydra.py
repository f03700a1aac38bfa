"""Private names of Hydra. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

from hydra._internal.core_plugins import basic_launcher
from hydra._internal.utils import get_args_parser
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin


def args_parser() -> argparse.ArgumentParser:
    """The argparse parser of all of Hydra's own flags.

    hydra._internal.utils.get_args_parser, since 1.0: `hydra.main` parses and, on an error, prints argparse's message
    and exits. Replaced by a public name, if Hydra makes one.
    """
    return get_args_parser()


def complete_program(program: str) -> None:
    """Have `--shell-completion install=…` register a program by this name.

    `_get_exec` of the completion plugins, since 1.0: it knows `python` and the basename of an installed command, so it
    can't name a script in a folder. Replaced by a public way to name it, if Hydra makes one.
    """
    plugins: list[Any] = list(Plugins.instance().discover(CompletionPlugin))
    for plugin in plugins:
        plugin._get_exec = staticmethod(lambda: program)


def own_launcher() -> str:
    """The `_target_` of the launcher that runs jobs one after another in the program's process.

    hydra._internal.core_plugins.basic_launcher.BasicLauncher, since 1.0. Replaced by a public name, if Hydra makes one.
    """
    return f"{basic_launcher.__name__}.{basic_launcher.BasicLauncher.__qualname__}"
