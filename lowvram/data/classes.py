"""Columns of classes: names or whole numbers in a data set, numbered from 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowvram.config.errors import BadInput, require

SHOWN = 5  # labels that a message names


def require_column(key: str, name: str, dataset: Any) -> None:
    require(name in dataset.column_names, key, name, f"one of the columns: {', '.join(dataset.column_names)}")


def class_names(dataset: Any, label: str) -> list[Any]:
    """The classes of a column: a ClassLabel's in its own order, others sorted.

    Raises:
        BadInput: there is no such column, or it holds no classes.
    """
    from datasets import ClassLabel

    require_column("data.label", label, dataset)
    feature = dataset.features[label]
    if isinstance(feature, ClassLabel):
        return feature.names
    values = dataset.data.column(label).unique().to_pylist()
    allowed = "a column of classes: text or whole numbers, in each row"
    is_fit = all(isinstance(value, str | int) for value in values)
    require(
        is_fit, "data.label", label, f"{allowed}; it has {shown([v for v in values if not isinstance(v, str | int)])}"
    )
    require(len(values) >= 2, "data.label", label, f"a column of at least 2 classes; it has only {shown(values)}")
    return sorted(values)


def class_numbers(dataset: Any, label: str, classes: list[Any], split: str) -> np.ndarray:
    """The class of each row, (num_rows,) int64.

    Raises:
        BadInput: a label is none of the classes.
    """
    import pyarrow
    import pyarrow.compute as compute
    from datasets import ClassLabel

    require_column("data.label", label, dataset)
    column = dataset.data.column(label)
    is_numbered = isinstance(dataset.features[label], ClassLabel)
    known = pyarrow.array(range(len(classes)) if is_numbered else classes)
    try:
        numbers = compute.index_in(column.cast(known.type), value_set=known)  # pyright: ignore[reportAttributeAccessIssue]
    except pyarrow.ArrowInvalid as error:
        raise BadInput("data.label", label, f"a column of the same type in all splits ({error})") from None
    if numbers.null_count:
        unknown = column.filter(numbers.is_null()).unique().to_pylist()
        allowed = (
            f"a column whose labels are all among the {len(classes)} classes to train on: {split} has {shown(unknown)}"
        )
        raise BadInput("data.label", label, allowed)
    return numbers.to_numpy().astype(np.int64)


def shown(labels: list[Any]) -> str:
    """The first labels, for a message."""
    return ", ".join(map(repr, labels[:SHOWN])) + (" …" if len(labels) > SHOWN else "")
