"""Writes `.hydra/` in a run's folder, in Hydra's own format: what was typed and composed. Imports no torch.

Hydra would write these files itself (`hydra.output_subdir`): before the run can be refused, not atomically, and with
every typed password. We write them without secrets once the run starts, each to a temporary file that is renamed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from lowvram.config.compose import container
from lowvram.config.errors import BadInput
from lowvram.config.secret import REFUSED, text_without_secrets, without_secrets, words_without_secrets
from lowvram.results.files.durable import write_text

FOLDER = ".hydra"
CONFIG, HYDRA, OVERRIDES = "config.yaml", "hydra.yaml", "overrides.yaml"
Notes = Mapping[str, str]  # texts by their files' names


def notes_of(config: DictConfig) -> Notes:
    """The files in `.hydra/` for the point that Hydra has composed."""
    hydra = copy.deepcopy(HydraConfig.get())
    values = hydras_part(hydra)
    return {
        CONFIG: as_yaml(without_secrets(container(config, resolve=False))),
        HYDRA: as_yaml({"hydra": values}),
        OVERRIDES: as_yaml(values["overrides"]["task"]),
    }


def sweep_note(config: DictConfig, typed: Sequence[str]) -> str:
    """`multirun.yaml` in a sweep's folder: what was typed, and the configuration of one of its points."""
    plain, about = container(config, resolve=False), hydras_part(config.hydra)
    about["overrides"]["task"] = words_without_secrets(typed)
    return as_yaml(without_secrets(plain) | {"hydra": about})


def hydras_part(hydra: Any) -> dict[str, Any]:
    """Hydra's own part of a configuration, which holds the words that were typed."""
    values = container(hydra, resolve=False)
    values["overrides"] = {kind: words_without_secrets(words) for kind, words in values["overrides"].items()}
    words = values["job"].get("override_dirname", "")
    values["job"]["override_dirname"] = text_without_secrets(words, is_config=True)
    return without_secrets(values)


def as_yaml(values: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(values))


def write_notes(folder: Path, notes: Notes) -> None:
    """Write each file atomically; last the overrides, which a resumed run starts from."""
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, text in notes.items():
        write_text(folder / FOLDER / name, text)


def read_notes(folder: Path) -> Notes:
    """The files as they are; those that can't be read are left out."""
    notes = dict[str, str]()
    for name in (CONFIG, HYDRA, OVERRIDES):
        with suppress(OSError, UnicodeDecodeError):
            notes[name] = (folder / FOLDER / name).read_text(encoding="utf-8")
    return notes


def words_of(folder: Path) -> list[str]:
    """What was typed for the run in `folder` (its swept values too).

    Raises:
        BadInput: the file with the words is missing or can't be read.
    """
    path = folder / FOLDER / OVERRIDES
    try:
        words = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise BadInput("resume", str(folder), f"the folder of a run: {path.name} is missing in its .hydra") from None
    except (OSError, UnicodeDecodeError, YAMLError, ValueError) as error:
        raise unreadable(folder, str(error).splitlines()[0]) from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise unreadable(folder, "it must be a list of overrides")
    return [str(word) for word in words]


def unreadable(folder: Path, why: str) -> BadInput:
    allowed = f"the folder of a run whose .hydra/{OVERRIDES}, which says what was typed, can be read: {why}"
    return BadInput("resume", str(folder), allowed)


def check_secrets(words: list[str], folder: Path) -> None:
    """Raises BadInput for a word whose value was a secret, which wasn't saved: it must be typed again."""
    for word in words:
        key, _, value = word.partition("=")
        if REFUSED in value:
            allowed = f"typed again beside resume={folder}: it held a secret, which is kept nowhere"
            raise BadInput(key.lstrip("+"), REFUSED, allowed)
