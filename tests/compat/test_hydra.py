"""Private names of Hydra."""

from __future__ import annotations

from hydra import compose, initialize
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.compat.sentences import needed


@needed("hydra._internal.core_plugins.basic_sweeper.BasicSweeper", by="-m")
def test_overrides_are_taken_apart_into_points() -> None:
    from lowvram.compat.hydra import BasicSweeper

    overrides = OverridesParser.create().parse_overrides(["a=1,2", "b=3,4", "c=5"])
    batches = BasicSweeper.split_arguments(overrides, 3)
    assert [[" ".join(point) for point in batch] for batch in batches] == [
        ["a=1 b=3 c=5", "a=1 b=4 c=5", "a=2 b=3 c=5"],
        ["a=2 b=4 c=5"],
    ]


@needed("hydra._internal.utils.get_args_parser", by="the command line")
def test_the_parser_knows_hydras_flags() -> None:
    from lowvram.compat.hydra import args_parser

    known, unknown = args_parser().parse_known_intermixed_args(["a=1", "-m", "b=2", "--cfg", "job", "--batch"])
    assert (known.overrides, known.multirun, known.cfg, unknown) == (["a=1", "b=2"], True, "job", ["--batch"])
    flags = ("run", "info", "shell_completion", "resolve", "help", "hydra_help")
    assert not any(getattr(known, flag) for flag in flags)


@needed("hydra._internal.core_plugins.basic_sweeper.BasicSweeper._parse_config", by="hydra.sweeper.params")
def test_configured_overrides_are_as_typed() -> None:
    from lowvram.compat.hydra import BasicSweeper, configured_overrides

    assert configured_overrides(BasicSweeper(None, {"seed": "1,2", "lr": "3"})) == ["seed=1,2", "lr=3"]
    assert configured_overrides(BasicSweeper(None)) == []


@needed("hydra._internal.core_plugins.basic_launcher.BasicLauncher", by="hydra/launcher=joblib")
def test_own_launcher_is_the_one_that_hydra_takes_by_itself() -> None:
    from lowvram.compat.hydra import own_launcher

    with initialize(version_base=None, config_path=None):
        config = compose(overrides=["hydra.job.name=test"], return_hydra_config=True)
    assert config.hydra.launcher["_target_"] == own_launcher()
