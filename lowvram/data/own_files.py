"""Which files a data set is made of: a folder's README may name others than the folder's own, or an address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lowvram.config.errors import BadInput, require
from lowvram.config.texts import first_line

CARDS = ("README.md", ".huggingface.yaml")  # of a folder, where `datasets` reads which files belong to it
ARCHIVES = ("zip", "tar", "gzip", "bz2", "xz", "zstd", "lz4")  # zip://a.csv::b.zip is a.csv in b.zip
OWN = "a folder that consists of its own files"


def check_card(name: str, folder: Path) -> None:
    """Raises BadInput, which names `data.name` (it is `name`), if the README of a folder names files elsewhere. Asked
    before `datasets` looks for them: that alone may reach for an address."""
    for card in CARDS:
        for text in named_files(card_data(name, folder / card)):
            allowed = f"{OWN}: its {card} names {text!r}; take that out, or give data.name what it names"
            require(not leads_out(folder, text), "data.name", name, allowed)


def check_files(name: str, folder: Path, data_files: Any) -> None:
    """Raises BadInput, which names `data.name` (it is `name`), if files by splits, as `datasets` found them, aren't in
    the folder."""
    for file in (str(file) for files in (data_files or {}).values() for file in files):
        is_own = not (leads_out(folder, file) and leads_out(folder.resolve(), file))
        require(is_own, "data.name", name, f"{OWN}: it names {file!r}")


def check_remote_files(name: str, data_files: Any) -> None:
    """Raises BadInput, which names `data.name` (it is `name`), if a data set of the hub names files of this machine."""
    for file in (str(file) for files in (data_files or {}).values() for file in files):
        allowed = f"a data set that consists of files of the hub: it names {file!r}, a file of this machine"
        require("://" in file.rpartition("::")[2], "data.name", name, allowed)


def leads_out(folder: Path, text: str) -> bool:
    """Whether a path, or one of an archive's parts, is an address or a place that isn't below the folder."""
    *parts, place = text.split("::")
    is_address = bool(urlparse(place).scheme) or any(part.partition("://")[0] not in ARCHIVES for part in parts)
    return is_address or not Path(os.path.normpath(folder.absolute() / place)).is_relative_to(
        os.path.normpath(folder.absolute())
    )


def card_data(name: str, card: Path) -> Any:
    """What a README says at its top, as YAML; None if it says nothing."""
    import yaml
    from huggingface_hub import metadata_load

    if not card.is_file():
        return None
    try:
        return metadata_load(card) if card.suffix == ".md" else yaml.safe_load(card.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        reason = first_line(error)
        raise BadInput(
            "data.name", name, f"a folder with a readable {card.name} ({reason}): mend it, or take it out"
        ) from None


def named_files(card: Any) -> Iterator[str]:
    """The files and folders that a card names, for each of its configurations."""
    configs = card.get("configs") if isinstance(card, dict) else None
    for config in configs if isinstance(configs, list) else ():
        if isinstance(config, dict):
            yield from texts_in(config.get("data_files"))
            yield from texts_in(config.get("data_dir"))


def texts_in(value: Any) -> Iterator[str]:
    """The texts in lists and in dictionaries, but for names of splits."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for key, each in value.items() if key != "split" for text in texts_in(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in texts_in(each))
