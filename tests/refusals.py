"""What is said of mistakes in what was typed, asked of the functions that find them: no program starts."""

from __future__ import annotations

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from lowvram.cli.errors import sentence, sorted_words, with_presets
from lowvram.config.compose import MISTAKES, chosen, plain
from lowvram.config.defaults import CONF
from lowvram.config.identity import register_resolvers
from lowvram.config.parent_settings import PARENT_SECTIONS
from lowvram.config.settings import check_root, checked_sections
from lowvram.planning.devices import load_device
from lowvram.worker.asks import check


def refusal(*words: str) -> str:
    """The sentence about the first mistake: in a word, in what Hydra composes, or in a value."""
    register_resolvers()
    try:
        overrides = sorted_words(with_presets(words))
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", overrides, return_hydra_config=True)
            choices = config.hydra.runtime.choices
        check_root(config)
        checked_sections(config, PARENT_SECTIONS)
        values = plain(config)
        chosen(choices)
        if config.plan.device != "auto":
            load_device(config.plan.device)
        check(lambda *_, **__: True, [values])
    except MISTAKES as error:
        return sentence(error)
    finally:
        GlobalHydra.instance().clear()
    raise AssertionError(f"{words} are not refused")
