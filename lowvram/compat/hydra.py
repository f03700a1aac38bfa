"""Private names of Hydra. Imports no torch."""

from __future__ import annotations

import argparse

from hydra._internal.core_plugins import basic_launcher, basic_sweeper
from hydra._internal.utils import get_args_parser

BasicSweeper = basic_sweeper.BasicSweeper
"""Hydra's own sweeper: what it makes of `a=1,2 b=3,4` is what its users know.

hydra._internal.core_plugins.basic_sweeper.BasicSweeper, since 1.0, `split_arguments` too: the public Sweeper knows no
overrides. Replaced by a public function that lists the points of overrides, if Hydra makes one.
"""


def args_parser() -> argparse.ArgumentParser:
    """The parser of Hydra's own flags, which knows them all.

    hydra._internal.utils.get_args_parser, since 1.0: `hydra.main` parses in one go and prints what argparse says.
    Replaced by a public name, if Hydra makes one.
    """
    return get_args_parser()


def configured_overrides(sweeper: basic_sweeper.BasicSweeper) -> list[str]:
    """The overrides in hydra.sweeper.params, as they would be typed.

    BasicSweeper._parse_config, since 1.2. Replaced by nothing, once `split_arguments` takes them into account.
    """
    return sweeper._parse_config()


def own_launcher() -> str:
    """What `_target_` says of the launcher that runs jobs one after another in the program's process.

    hydra._internal.core_plugins.basic_launcher.BasicLauncher, since 1.0. Replaced by a public name, if Hydra makes one.
    """
    return f"{basic_launcher.__name__}.{basic_launcher.BasicLauncher.__qualname__}"
