"""Private names of Hydra."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin

from tests.compat.sentences import needed


@needed("hydra._internal.utils.get_args_parser", by="the command line")
def test_the_parser_knows_hydras_flags() -> None:
    from lowvram.compat.hydra import args_parser

    known, unknown = args_parser().parse_known_intermixed_args(["a=1", "-m", "b=2", "--cfg", "job", "--batch"])
    assert (known.overrides, known.multirun, known.cfg, unknown) == (["a=1", "b=2"], True, "job", ["--batch"])
    flags = ("run", "info", "shell_completion", "resolve", "help", "hydra_help")
    assert not any(getattr(known, flag) for flag in flags)


@needed("hydra.plugins.completion_plugin.CompletionPlugin._get_exec", by="tab completion of scripts/train")
def test_a_script_in_a_folder_is_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lowvram.compat.hydra import complete_program

    plugins: list[Any] = list(Plugins.instance().discover(CompletionPlugin))
    for plugin in plugins:
        monkeypatch.setattr(plugin, "_get_exec", plugin._get_exec)
    complete_program("scripts/train")
    (bash,) = [plugin for plugin in plugins if plugin.__name__ == "BashCompletion"]
    bash(None).install()
    assert capsys.readouterr().out.endswith(" -F hydra_bash_completion scripts/train\n")


@needed("hydra._internal.core_plugins.basic_launcher.BasicLauncher", by="hydra/launcher=joblib")
def test_own_launcher_is_the_one_that_hydra_takes_by_itself() -> None:
    from lowvram.compat.hydra import own_launcher

    Plugins.instance()  # which registers their configurations
    node = ConfigStore.instance().load("hydra/launcher/basic.yaml").node
    assert node["_target_"] == own_launcher()
