"""Columns of data sets that the library `datasets` keeps in memory-mapped Arrow files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lowvram.compat.datasets import fingerprint
from lowvram.config.errors import Shortage
from lowvram.data.local import quiet_progress

ROWS = 256  # tokenised at once
OURS = "lowvram"  # a folder in datasets' cache


def mapped_texts(column: Any) -> Iterator[np.ndarray]:
    """The texts of an Arrow string column, (num_bytes,) uint8 each: views of the mapped file, no copies."""
    for chunk in column.chunks:
        _, offsets, letters = chunk.buffers()
        if letters is None:  # all texts of the chunk are empty
            continue
        ends = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        for start, stop in pairwise(ends.tolist()):
            yield np.frombuffer(letters, np.uint8)[start:stop]


def mapped_lists(column: Any) -> Iterator[np.ndarray]:
    """The lists of an Arrow column, (length,) each: views of the mapped file, no copies."""
    for chunk in column.chunks:
        values = chunk.values.to_numpy()
        for start, stop in pairwise(chunk.offsets.to_numpy().tolist()):
            yield values[start:stop]


def mapped_value(array: Any) -> Any | None:
    """The bytes of the only value of an Arrow array of bytes or texts, as an Arrow buffer: a part of the mapped file,
    where one of Arrow's scalars would be a copy. None for null."""
    if array.null_count:
        return None
    _, offsets, contents = array.buffers()
    offset_type = np.int64 if str(array.type).startswith("large_") else np.int32
    start, stop = np.frombuffer(offsets, offset_type)[array.offset : array.offset + 2].tolist()
    return None if contents is None else contents.slice(start, stop - start)


def list_lengths(column: Any) -> np.ndarray:
    """The length of each list of an Arrow column, (num_lists,) int64."""
    import pyarrow.compute as compute

    return compute.list_value_length(column).to_numpy().astype(np.int64)  # pyright: ignore[reportAttributeAccessIssue]


def distinct_texts(column: Any) -> list[str]:
    """The texts in an Arrow column of lists of texts, each once."""
    import pyarrow.compute as compute

    return compute.list_flatten(column).unique().to_pylist()  # pyright: ignore[reportAttributeAccessIssue]


def flat_lists(column: Any) -> Iterator[np.ndarray]:
    """The lists of an Arrow column, one after another, in (length,) pieces of any size: views of the mapped file."""
    for chunk in column.chunks:
        offsets = chunk.offsets
        yield chunk.values.to_numpy()[offsets[0].as_py() : offsets[-1].as_py()]


def tokenised(dataset: Any, column: str, tokenise: Callable[[list[str]], list[np.ndarray]], key: str) -> Any:
    """The tokens of each text of a column, as an Arrow column of lists; null counts as an empty text. `datasets`
    caches them on disk by the data's fingerprint, the column and the `key`."""

    def make(rows: Any) -> dict[str, Any]:
        return {"tokens": tokenise([text or "" for text in rows[column]])}

    mapped = mapped_rows(dataset, make, {"tokens": "int32"}, repr((column, key)))
    return mapped.data.column("tokens")


def mapped_rows(
    dataset: Any, make: Callable[..., dict[str, Any]], types: Mapping[str, str], key: str, with_indices: bool = False
) -> Any:
    """The lists that `make` makes of some rows of a data set at a time, as a data set of their own. They are cached on
    disk by the data's fingerprint, their files and the `key`.

    Args:
        types: of the lists' values, by the lists' names.
        with_indices: whether `make` also gets the numbers of the rows.
    """
    from datasets import Features, List, Value

    cache_key = hashed((fingerprint(dataset), key, [version_of(file["filename"]) for file in dataset.cache_files]))
    place = cache_file(dataset, cache_key)
    try:
        with quiet_progress():
            return dataset.map(
                make,
                batched=True,
                with_indices=with_indices,
                batch_size=ROWS,
                remove_columns=dataset.column_names,
                features=Features({name: List(Value(value_type)) for name, value_type in types.items()}),
                new_fingerprint=cache_key,
                cache_file_name=place,
            )
    except OSError as error:
        where = "name a folder that can be written in HF_DATASETS_CACHE, or make room in it"
        raise Shortage(f"tokens can't be kept on disk ({error}): {where}") from None


def cache_file(dataset: Any, cache_key: str) -> str | None:
    """Where what is made of a data set is kept: in datasets' cache, whereas `datasets` would write it beside the data,
    into a folder of the user's. None for data in memory: nothing is kept of them."""
    import datasets.config
    from datasets import is_caching_enabled

    if not (dataset.cache_files and is_caching_enabled()):
        return None
    return str(Path(datasets.config.HF_DATASETS_CACHE) / OURS / f"{cache_key}.arrow")


def version_of(file: str) -> tuple[int, int]:
    """What changes when a file is written anew: its bytes and its time."""
    status = Path(file).stat()
    return status.st_size, status.st_mtime_ns


def hashed(key: Any) -> str:
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
