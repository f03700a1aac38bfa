"""Checks, before a model of a folder is built, that its sizes can be those of the weights beside it: a model of a
billion layers would be built for days. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lowvram.config.errors import BadInput
from lowvram.results.files.regular import LONG_BYTES, check_regular, open_regular

MOST_WITHOUT_WEIGHTS = 10_000  # layers: several may share their weights
COUNTS = ("layer", "layers", "blocks", "depth", "depths", "experts", "stages", "heads")  # ends of names


def check_files(folder: Path, key: str) -> None:
    """Raises BadInput if the folder holds something other than files and folders, which would never end to be read."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not path.is_dir():
            try:
                check_regular(path)
            except OSError as error:
                raise BadInput(key, str(folder), f"a folder whose {path.name} can be read: {error.strerror}") from None


def check_counts(described: Mapping[str, Any], folder: Path, key: str) -> None:
    """Raises BadInput if the configuration has more layers, blocks or the like than the folder has weights for.

    Args:
        described: the configuration of the model.
    """
    num_tensors = sum(map(num_tensors_in, folder.glob("*.safetensors")))
    most = max(MOST_WITHOUT_WEIGHTS, num_tensors)
    for name, count in counts_in(described):
        if count > most:
            allowed = f"a model's folder whose sizes fit its weights: {name} is {count:,} there, beside {num_tensors:,}"
            raise BadInput(key, str(folder), f"{allowed} tensors")


def counts_in(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """The whole numbers that say how many of something there are, by the names of their fields; lists are summed."""
    stack = [(value, name)]  # no recursion, however deeply it is nested
    while stack:
        item, name = stack.pop()
        if isinstance(item, Mapping):
            stack += [(inner, str(field)) for field, inner in item.items()]
        elif isinstance(item, list):
            numbers = [number for number in item if type(number) is int]
            stack += [(inner, name) for inner in item if type(inner) is not int] + [(sum(numbers), name)]
        elif type(item) is int and name.lower().endswith(COUNTS):
            yield name, item


def num_tensors_in(path: Path) -> int:
    """How many tensors a file of weights says that it holds; 0 if it can't be read, which who loads it will say."""
    try:
        with open_regular(path) as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes)) if num_bytes <= LONG_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return 0
    return len(header) if isinstance(header, dict) else 0
