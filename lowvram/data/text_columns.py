"""Columns of texts as tokens: joined into a stream, or each text by itself."""

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
    """The column of texts: `name` if given, else `text`, else the only column of texts."""
    texts = [key for key, feature in dataset.features.items() if is_text(feature) and key != label]
    column = name or ("text" if "text" in texts else texts[0] if len(texts) == 1 else None)
    if column is None:
        raise BadInput("data.text", None, f"one of the columns: {', '.join(dataset.column_names)}")
    require_column("data.text", column, dataset)
    feature = dataset.features[column]
    require(is_text(feature), "data.text", column, f"a column of texts; it is {feature}")
    return column


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
