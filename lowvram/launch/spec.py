"""`spec.json`: all that determines one run of a point, without secrets. Imports no torch.

Whoever starts a run writes it into the folder; `python -m lowvram.worker FOLDER` runs what it says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lowvram.config.secret import REFUSED, without_secrets
from lowvram.config.version import __version__
from lowvram.results import row as rows
from lowvram.results.files.durable import write_text
from lowvram.results.files.regular import LONG_BYTES, read_regular
from lowvram.results.files.sealed import opened, sealed
from lowvram.results.row import Row

FILE_NAME = "spec.json"
Hidden = list[tuple[list[str], Any]]  # the values that the file doesn't hold, by their keys


class NoSpec(ValueError):
    """A file that is no specification; the message says why."""


@final
@dataclass(frozen=True)
class PointSpec:
    """One run of a point.

    Attributes:
        config: what was composed, with secrets.
        choices: the option of each group.
        about: what the row says of the point besides: id, name, plan, provenance, earlier attempts.
        run: the id that its snapshots carry.
        sweep: the name of its sweep.
        fidelity: for a run of a comparison; see `fidelity/worker.py`.
    """

    folder: Path
    config: dict[str, Any]
    choices: dict[str, str]
    about: Mapping[str, Any]
    is_resumed: bool = False
    run: str | None = None
    sweep: str | None = None
    fidelity: Mapping[str, Any] | None = None

    def first_row(self) -> Row:
        """The row before anything has run."""
        known = {**self.about, "choices": self.choices, "config": self.config}
        return rows.merge(rows.empty_row(), without_secrets(known))

    def write(self) -> None:
        """Write the file as a whole."""
        fields = {name: value for name, value in asdict(self).items() if name != "folder"}
        text = json.dumps({"lowvram": __version__, **without_secrets(fields)}, indent=1)
        write_text(self.folder / FILE_NAME, sealed(text, "\n "))

    def hidden(self) -> Hidden:
        """What the file doesn't hold of the configuration."""
        return list(differing(self.config, without_secrets(self.config)))

    @classmethod
    def read(cls, folder: Path, hidden: Iterable[tuple[list[str], Any]] = ()) -> PointSpec:
        """The specification in a folder.

        Args:
            hidden: as `hidden` of the one that was written returns them.

        Raises:
            OSError: it can't be read.
            NoSpec: it is damaged, or needs a value that is kept nowhere.
        """
        try:
            fields = json.loads(opened(read_regular(folder / FILE_NAME, LONG_BYTES).decode()))
            del fields["lowvram"]
            for keys, value in hidden:
                place = fields["config"]
                for key in keys[:-1]:
                    place = place[key]
                place[keys[-1]] = value
            spec = cls(folder, **fields)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise NoSpec(f"{folder / FILE_NAME} is no specification of a run: {error}") from None
        if missing := next((keys for keys, _ in differing(spec.config, without_refused(spec.config))), None):
            key = ".".join(missing)
            raise NoSpec(f"{key}: its value is a secret, which {FILE_NAME} doesn't hold: start the run with train.py")
        return spec


def differing(values: Any, others: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """The values that differ between two mappings of the same form, by their keys."""
    if isinstance(values, Mapping) and isinstance(others, Mapping):
        for key, value in values.items():
            yield from differing(value, others[key], (*keys, key))
    elif values is not others and values != others:  # a NaN differs from itself
        yield [*keys], values


def without_refused(values: Any) -> Any:
    """The same, with null in place of each text that holds a secret's mark."""
    if isinstance(values, Mapping):
        return {key: without_refused(value) for key, value in values.items()}
    return None if REFUSED in str(values) else values
