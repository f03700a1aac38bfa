"""Columns of texts, as tokens: in a stream, each with its end, or each by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from lowvram.config.errors import BadInput, require
from lowvram.data.classes import require_column
from lowvram.data.columns import list_lengths, tokenised
from lowvram.data.documents import Documents
from lowvram.data.tokenizer import Tokenizer


def text_column(dataset: Any, name: str | None, label: str | None) -> str:
    """The column of texts: the one that is named, or `text`, or the only one."""
    texts = [each for each, feature in dataset.features.items() if is_text(feature) and each != label]
    found = name or ("text" if "text" in texts else texts[0] if len(texts) == 1 else None)
    if found is None:
        raise BadInput("data.text", None, f"one of the columns: {', '.join(dataset.column_names)}")
    require_column("data.text", found, dataset)
    require(is_text(dataset.features[found]), "data.text", found, f"a column of texts; it is {dataset.features[found]}")
    return found


def is_text(feature: Any) -> bool:
    from datasets import Value

    return feature in (Value("string"), Value("large_string"))


def stream_of(dataset: Any, text: str | None, tokenizer: Tokenizer) -> Any:
    """The tokens of each row and what parts it from the next, as an Arrow column of lists."""

    def tokenise(texts: list[str]) -> list[np.ndarray]:
        return [np.concatenate([each, tokenizer.separator]) for each in tokenizer.in_stream(texts)]

    return tokenised(dataset, text_column(dataset, text, None), tokenise, f"stream {tokenizer.key}")


def documents_of(column: Any, tokenizer: Tokenizer, length: int, pad_id: int, limit: int | None) -> Documents:
    """Samples of texts that have the mark of their end."""
    opening, lengths = tokenizer.opening, list_lengths(column) + len(tokenizer.opening)
    return Documents(lambda row: [opening, column[row].values.to_numpy()], lengths, length, pad_id, limit)


def alone(dataset: Any, text: str | None, label: str | None, tokenizer: Tokenizer, length: int) -> Any:
    """The tokens of each row by itself, as an Arrow column of lists."""
    tokenise, key = partial(tokenizer.alone, length=length), f"alone {length} {tokenizer.key}"
    return tokenised(dataset, text_column(dataset, text, label), tokenise, key)
