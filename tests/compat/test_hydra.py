"""Private names of Hydra."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from tests.compat.sentences import needed


@needed("hydra._internal.utils.get_args_parser", by="the command line")
def test_the_parser_knows_hydras_flags() -> None:
    from lowvram.compat.hydra import args_parser

    known, unknown = args_parser().parse_known_intermixed_args(["a=1", "-m", "b=2", "--cfg", "job", "--batch"])
    assert (known.overrides, known.multirun, known.cfg, unknown) == (["a=1", "b=2"], True, "job", ["--batch"])
    flags = ("run", "info", "shell_completion", "resolve", "help", "hydra_help")
    assert not any(getattr(known, flag) for flag in flags)


@needed("hydra._internal.core_plugins.basic_launcher.BasicLauncher", by="hydra/launcher=joblib")
def test_own_launcher_is_the_one_that_hydra_takes_by_itself() -> None:
    from lowvram.compat.hydra import own_launcher

    Plugins.instance()  # which registers their configurations
    node = ConfigStore.instance().load("hydra/launcher/basic.yaml").node
    assert node["_target_"] == own_launcher()
