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

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from lowvram.config.code_names import Names, code_in, code_of
from lowvram.config.compose import container
from lowvram.config.errors import BadInput
from lowvram.config.secret import REFUSED, text_without_secrets, without_secrets, words_without_secrets
from lowvram.results.files.durable import write_text
from lowvram.results.files.regular import LONG_BYTES, SHORT_BYTES, read_regular
from lowvram.results.files.sealed import is_changed, with_comment
from lowvram.results.terminal import shown_path
from lowvram.runs.own_runs import own_code, signed

FOLDER = ".hydra"
CONFIG, HYDRA, OVERRIDES = "config.yaml", "hydra.yaml", "overrides.yaml"
Notes = Mapping[str, str]  # texts by their files' names
# The events of YAML's parser around the texts of a list. The texts come after the first three.
A_LIST = (
    *(yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.SequenceStartEvent),
    *(yaml.SequenceEndEvent, yaml.DocumentEndEvent, yaml.StreamEndEvent),
)
BEGIN = 3


def notes_of(config: DictConfig) -> Notes:
    """The files in `.hydra/` for the point that Hydra has composed."""
    hydra = copy.deepcopy(HydraConfig.get())
    values = hydras_part(hydra)
    words, code = values["overrides"]["task"], code_of(container(config, resolve=True))
    signature = signed(words, code) if code or code_in(words) else ""
    return {
        CONFIG: as_yaml(without_secrets(container(config, resolve=False))),
        HYDRA: as_yaml({"hydra": values}),
        OVERRIDES: with_comment(signature + as_yaml(words)),
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
            notes[name] = read_regular(folder / FOLDER / name, LONG_BYTES).decode()
    return notes


def words_of(folder: Path) -> list[str]:
    """What was typed for the run in `folder` (its swept values too).

    Raises:
        BadInput: the file with the words is missing or can't be read.
    """
    return words_in(text_of(folder), folder)


def own_words_of(folder: Path) -> tuple[list[str], Names | None]:
    """The words, and the code that this user's run named; None if the run isn't this user's.

    Raises:
        BadInput, HydraException: as `words_of`; or a word can't be read.
    """
    text = text_of(folder)
    words = words_in(text, folder)
    return words, own_code(text, words)


def change_in(folder: Path) -> str | None:
    """A line for the user if what was typed for a run isn't noted any more as the run noted it; else None."""
    path = folder / FOLDER / OVERRIDES
    if not is_changed(text_of(folder)):
        return None
    return f"note: {shown_path(path)} was changed since the run wrote it: going on with the words that it holds now"


def own_notes_in(run: Path) -> tuple[list[str], Names | None]:
    """What was typed for the run in a folder, nothing if that can't be read; and the code that this user's run named,
    None if it isn't this user's."""
    with suppress(BadInput, HydraException):
        return own_words_of(run)
    return [], None


def is_own(run: Path) -> bool:
    """Whether what was typed for the run in a folder names no code, or was signed by this user."""
    words, own = own_notes_in(run)
    return own is not None or not code_in(words)


def text_of(folder: Path) -> str:
    path = folder / FOLDER / OVERRIDES
    try:
        return read_regular(path, SHORT_BYTES).decode()
    except FileNotFoundError:
        raise BadInput("resume", str(folder), f"the folder of a run: {path.name} is missing in its .hydra") from None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(folder, getattr(error, "strerror", None) or str(error)) from None


def words_in(text: str, folder: Path) -> list[str]:
    """The texts of a YAML list. Nothing else is taken: an alias could stand for a text of any length, and a word that
    begins with `-` would be a flag of the program."""
    events, texts = list[type[Any]](), list[str]()
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if len(events) == BEGIN and isinstance(event, yaml.ScalarEvent):
                texts.append(event.value)
            elif len(events) < len(A_LIST) and type(event) is A_LIST[len(events)]:
                events.append(type(event))
            else:
                break
    except (yaml.YAMLError, ValueError) as error:
        raise unreadable(folder, str(error).splitlines()[0]) from None
    if len(events) < len(A_LIST) or any(word.startswith("-") or not word for word in texts):
        raise unreadable(folder, "it must be a list of overrides")
    return texts


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
