"""The columns `data.text` and `data.label` of a data set: texts as tokens, and classes numbered from 0."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lowvram.config.errors import BadInput, require
from lowvram.data.columns import list_lengths, tokenised
from lowvram.data.documents import Documents
from lowvram.data.tokenizer import Tokenizer

AS_TIMES = (
    ", as a json column is read whose texts are all dates: save the rows as csv or parquet, where they stay texts"
)
OF_KINDS = ', as a json column is read whose values are of several kinds, such as 1 and "a": make all of them texts'
SHOWN = 5  # labels that a message names
NUMBER = r"^[-+]?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?$"


def require_column(key: str, name: str, dataset: Any) -> None:
    require(name in dataset.column_names, key, name, f"one of the columns: {', '.join(dataset.column_names)}")


def class_names(dataset: Any, label: str) -> list[Any]:
    """The classes of a column: a ClassLabel's in its own order, others sorted.

    Raises:
        BadInput: there is no such column, or it holds no classes.
    """
    from datasets import ClassLabel, Value

    require_column("data.label", label, dataset)
    feature = dataset.features[label]
    if isinstance(feature, ClassLabel):
        return feature.names
    is_plain = isinstance(feature, Value) and not is_time(feature)
    require(is_plain, "data.label", label, f"a column of classes; it is {kind_of(feature)}")
    values = [whole(value) for value in dataset.data.column(label).unique().to_pylist()]
    unfit = [value for value in values if not is_class(value)]
    allowed = "a column of classes: text or whole numbers, in each row"
    require(not unfit, "data.label", label, f"{allowed}; it has {shown(unfit)}")
    require(len(values) >= 2, "data.label", label, f"a column of at least 2 classes; it has only {shown(values)}")
    return sorted(values, key=in_order(values))


def is_class(value: Any) -> bool:
    """Whether a value is a text that isn't empty, or a whole number of 64 bits."""
    return -(2**63) <= value < 2**63 if isinstance(value, int) else isinstance(value, str) and value != ""


def whole(value: Any) -> Any:
    """A float that is a whole number as an integer; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def in_order(values: list[Any]) -> Callable[[Any], Any] | None:
    """What classes are sorted by: their values, if all are numbers, also where they are texts, as in csv files."""
    try:
        numbers = {value: float(value) for value in values}
    except ValueError:
        return None
    return lambda value: (numbers[value], value)


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
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
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


def text_column(dataset: Any, name: str | None, label: str | None) -> str:
    """The column of texts: `name` if given, else `text`, else the only column of texts that aren't all numbers."""
    texts = [key for key, feature in dataset.features.items() if is_text(feature) and key != label]
    if name is None and len(texts) > 1:
        texts = [key for key in texts if not is_numeric(dataset, key)]
    column = name or ("text" if "text" in texts else texts[0] if len(texts) == 1 else None)
    if column is None:
        times = [f"; {key} is {kind_of(feature)}" for key, feature in dataset.features.items() if is_time(feature)]
        raise BadInput("data.text", None, f"one of the columns: {', '.join(dataset.column_names)}{''.join(times[:1])}")
    require_column("data.text", column, dataset)
    feature = dataset.features[column]
    require(is_text(feature), "data.text", column, f"a column of texts; it is {kind_of(feature)}")
    return column


def kind_of(feature: Any) -> str:
    """What a column that isn't one of texts is, and what to do about it."""
    return f"{feature}{AS_TIMES if is_time(feature) else OF_KINDS if type(feature).__name__ == 'Json' else ''}"


def is_time(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("timestamp", "date", "time"))


def is_numeric(dataset: Any, column: str) -> bool:
    """Whether all texts of a column are numbers, as in a csv file's column of numbers."""
    import pyarrow.compute as compute

    texts = dataset.data.column(column)
    are_numbers = compute.match_substring_regex(texts, NUMBER)  # pyright: ignore[reportAttributeAccessIssue]
    return bool(compute.all(are_numbers).as_py())  # pyright: ignore[reportAttributeAccessIssue]


def is_text(feature: Any) -> bool:
    from datasets import Value

    return feature in (Value("string"), Value("large_string"))


def stream_tokens(dataset: Any, text: str | None, tokenizer: Tokenizer) -> Any:
    """The tokens of each row and the separator that follows, as an Arrow column of lists."""

    def tokenise(texts: list[str]) -> list[np.ndarray]:
        return [np.concatenate([tokens, tokenizer.separator]) for tokens in tokenizer.encode(texts)]

    return tokenised(dataset, text_column(dataset, text, None), tokenise, f"stream {tokenizer.key}")


def column_documents(column: Any, tokenizer: Tokenizer, length: int, pad_id: int, limit: int | None) -> Documents:
    """Samples of texts whose end marks are in the column; the tokenizer's beginning mark is added."""
    opening, lengths = tokenizer.opening, list_lengths(column) + len(tokenizer.opening)
    return Documents(lambda row: [opening, column[row].values.to_numpy()], lengths, length, pad_id, limit)


def marked_tokens(dataset: Any, text: str | None, label: str | None, tokenizer: Tokenizer, length: int) -> Any:
    """The tokens of each row with the tokenizer's marks, at most `length`, as an Arrow column of lists."""
    tokenise, key = partial(tokenizer.encode_with_marks, length=length), f"alone {length} {tokenizer.key}"
    return tokenised(dataset, text_column(dataset, text, label), tokenise, key)
