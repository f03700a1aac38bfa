"""Reads the training and the held-out split of a data set, on the hub or in local files, through `datasets`."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import MISSING

from lowvram.compat.hf_offline import hf_offline
from lowvram.config.errors import BadInput, require
from lowvram.config.texts import first_line
from lowvram.data.csv_files import AS_THEY_STAND, csv_options
from lowvram.data.csv_quotes import check_quotes, quoting_of
from lowvram.data.local import HOP, check_no_hop, escaped, is_hidden, looks_local, quiet_progress
from lowvram.data.own_files import check_card, check_files, check_remote_files
from lowvram.data.source import TextSource

BUILDERS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
EVAL_SPLITS = ("validation", "valid", "val", "dev", "eval", "test")  # the first that exists counts
HELD_OUT_SHARE = 10  # one row in 10, the last ones, where no split is held out
SAVED = ("dataset_dict.json", "state.json")  # one of them is in a folder that `save_to_disk` made
LOCAL = f"a file ({', '.join(BUILDERS)}) or a folder of such files"
ELSEWHERE = (
    f"{LOCAL}, or the name of a data set on the hub that can be reached and read from here; `hf download NAME"
    " --repo-type dataset --local-dir FOLDER` on another machine makes such a folder"
)


@dataclass(frozen=True)
class SplitSource:
    """Where a data set is: the user's settings `data.<field>`."""

    name: str
    revision: str | None
    config: str | None
    train_split: str
    eval_split: str | None
    buffer_samples: int | None  # read from a stream; None: not streamed, all samples are read

    @property
    def path(self) -> Path:
        return Path(self.name).expanduser()

    @property
    def is_local(self) -> bool:
        return self.path.exists()


@dataclass(frozen=True)
class SplitTextSource(TextSource, ABC):
    """A source whose samples are rows of a data set."""

    name: str = MISSING
    revision: str | None = None
    config: str | None = None
    train_split: str = "train"
    eval_split: str | None = None

    def check_paths(self) -> None:
        """Asked before any process starts, so it takes no torch."""
        check_name(self.name)

    @property
    def place(self) -> SplitSource:
        return SplitSource(self.name, self.revision, self.config, self.train_split, self.eval_split, None)


def read_splits(place: SplitSource, eval_samples: int) -> tuple[Any, Any | None]:
    """Two `datasets.Dataset`: to train on, and held out; None if there is no held-out split.

    Raises:
        BadInput: the data set or split doesn't exist, or can't be read.
    """
    splits = loaded(place)
    train = split_of(splits, "data.train_split", place.train_split)
    chosen = place.eval_split or next((name for name in EVAL_SPLITS if name in splits), None)
    held_out = None if chosen is None else split_of(splits, "data.eval_split", chosen)
    if place.buffer_samples is None:
        return train, held_out
    return first_rows(train, place.buffer_samples), held_out and first_rows(held_out, eval_samples)


def held_out_rows(train: Any, held_out: Any | None) -> tuple[Any, Any]:
    """The two splits; where none is held out, the last tenth of the rows, at least one, is taken off the first."""
    if held_out is not None:
        return train, held_out
    num_train = num_before_tenth(len(train))
    return train.select(range(num_train)), train.select(range(num_train, len(train)))


def num_before_tenth(num_rows: int) -> int:
    """How many rows are before the last tenth, which is at least one row."""
    return num_rows - max(1, num_rows // HELD_OUT_SHARE)


def evenly_spaced(rows: np.ndarray, limit: int) -> np.ndarray:
    """At most `limit` of the rows, evenly spaced, so that every class has its share."""
    count = min(limit, len(rows))
    return rows[np.arange(count) * len(rows) // count]


def split_of(splits: Any, key: str, name: str) -> Any:
    require(name in splits, key, name, f"one of the splits: {', '.join(splits)}")
    return splits[name]


def first_rows(stream: Any, num_rows: int) -> Any:
    """The first rows of a `datasets.IterableDataset`, in memory."""
    from datasets import Dataset

    # The features are unknown if only the rows of a file name its columns.
    undecoded = stream if stream.features is None else stream.decode(False)
    return Dataset.from_list(list(islice(undecoded, num_rows)), features=stream.features)


def loaded(place: SplitSource) -> Any:
    """All splits by their names."""
    from datasets.exceptions import DatasetsError

    check_name(place.name)
    try:
        with quiet_progress():
            return load_local_set(place) if place.is_local else load_from_hub(place)
    except BadInput:
        raise
    except (DatasetsError, OSError, ValueError) as error:
        reason = first_line(error.__cause__ or error)
        raise BadInput("data.name", place.name, f"{LOCAL if place.is_local else ELSEWHERE} ({reason})") from None


def check_name(name: str) -> None:
    """Raises BadInput for a path at which nothing is, or which `datasets` would cut."""
    path = Path(name).expanduser()
    if looks_local(name) and not path.exists():
        raise BadInput("data.name", name, f"{ELSEWHERE}; nothing is there")
    if path.exists():
        check_no_hop("data.name", name, path)


def load_from_hub(place: SplitSource) -> Any:
    from datasets import load_dataset, load_dataset_builder

    with hf_offline():
        builder = load_dataset_builder(place.name, place.config, revision=place.revision)
        check_remote_files(place.name, builder.config.data_files)
        if builder.name == "csv" and not is_streamed(place):
            check_downloaded(place.name, builder.config)
        options: dict[str, Any] = AS_THEY_STAND if builder.name == "csv" else {}
        return load_dataset(place.name, place.config, revision=place.revision, streaming=is_streamed(place), **options)


def check_downloaded(name: str, config: Any) -> None:
    """Raises BadInput if a quotation mark of a csv file on the hub, which is kept for `datasets`, joins rows."""
    from datasets import DownloadManager

    places = [str(file) for files in (config.data_files or {}).values() for file in files]
    quoting = quoting_of(config)
    if quoting is None:
        return
    try:
        files = DownloadManager().download([place for place in places if place.startswith("hf://")])
    except OSError:  # the hub can't be reached: `datasets` has the rows of an earlier run, or says why not
        return
    for file in files:
        check_quotes(name, Path(file), quoting, None)


def load_local_set(place: SplitSource) -> Any:
    """All splits of local files by their names, read without a network."""
    from datasets import Dataset, DatasetDict, load_dataset, load_dataset_builder, load_from_disk

    path, streaming = place.path, is_streamed(place)
    if path.is_file():
        builder = BUILDERS.get(path.suffix.lower())
        if builder is None:
            raise BadInput(
                "data.name", place.name, f"{LOCAL}: {path.suffix or 'a file without an ending'} can't be read"
            )
        options = csv_options(place.name, [path], place.buffer_samples) if builder == "csv" else {}
        return load_dataset(builder, data_files={place.train_split: escaped([path])}, streaming=streaming, **options)
    if any((path / name).is_file() for name in SAVED):
        saved = load_from_disk(str(path.absolute()))
        splits = DatasetDict({place.train_split: saved}) if isinstance(saved, Dataset) else saved
        files = {name: [file["filename"] for file in split.cache_files] for name, split in splits.items()}
        check_files(place.name, path, files)
        return {name: split.to_iterable_dataset() for name, split in splits.items()} if streaming else splits
    plain = not set(str(path.absolute())) & set("[]*?")
    require(
        plain, "data.name", place.name, "a folder whose path has none of [ ] * ?, which `datasets` takes for patterns"
    )
    for file in (file for file in path.rglob(f"*{HOP}*") if not is_hidden(file, path)):
        check_no_hop("data.name", place.name, file)
    check_card(place.name, path)
    builder = load_dataset_builder(str(path.absolute()), place.config)
    check_files(place.name, path, builder.config.data_files)
    options = options_of_folder(place, builder) if builder.name == "csv" else {}
    return load_dataset(str(path.absolute()), place.config, streaming=streaming, **options)


def options_of_folder(place: SplitSource, builder: Any) -> dict[str, Any]:
    """What datasets' csv reader has to be told of a folder's files. What its README says of columns holds."""
    config = builder.config
    files = [Path(file) for files in config.data_files.values() for file in files]
    if config.sep == "," and config.names is None and config.features is None:
        return csv_options(place.name, files, place.buffer_samples)
    if quoting := quoting_of(config):
        for file in files:
            check_quotes(place.name, file, quoting, place.buffer_samples)
    return AS_THEY_STAND


def is_streamed(place: SplitSource) -> bool:
    return place.buffer_samples is not None
