"""data=pairs: two texts in each row, the second of which is predicted from the first: summaries, translations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import numpy as np
from omegaconf import MISSING
from torch import Tensor

from lowvram.config.errors import require
from lowvram.data.columns import tokenised
from lowvram.data.padding import tokenizer_and_rules
from lowvram.data.source import (
    Data,
    FollowedModel,
    ResolvedTextSource,
    Source,
    Texts,
    require_count,
    resolved_size,
)
from lowvram.data.spec import DECODER_IDS, DataSpec, Modality, TextRules, pairs_layout
from lowvram.data.splits import SplitTextSource, evenly_spaced, held_out_rows, read_splits
from lowvram.data.text_and_label import is_text, kind_of, require_column
from lowvram.data.tokenizer import Tokenizer


@final
@dataclass(frozen=True)
class Pairs(SplitTextSource):
    """Each row of a data set is a sample: the text in the column `target` is predicted from that in `text`.

    Raises:
        BadInput: a value out of range; no such data set, split or column.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.PAIRS,)

    text: str = MISSING
    target: str = MISSING
    prefix: str = ""
    tokenizer: str = "auto"
    sequence_length: int | None = None
    target_length: int | None = None
    eval_samples: int = 256

    def __post_init__(self) -> None:
        for name in ("sequence_length", "target_length"):
            require_count(f"data.{name}", getattr(self, name))
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def resolve(self, model: FollowedModel) -> Source:
        length = self.sequence_length or model.natural_shape()[0]
        lengths = {"sequence_length": length, "target_length": self.target_length or length}
        return ResolvedTextSource(replace(self, **lengths), model.text_rules)

    def read(self, rules: TextRules, seed: int) -> Data:
        length = resolved_size("data.sequence_length", self.sequence_length)
        target_length = resolved_size("data.target_length", self.target_length)
        splits = held_out_rows(*read_splits(self.place, self.eval_samples))
        tokenizer, rules = tokenizer_and_rules(self.tokenizer, rules)
        train, held_out = (
            PairedTexts(*self.tokens(split, tokenizer, length, target_length), length, target_length, rules, limit)
            for split, limit in zip(splits, (None, self.eval_samples), strict=True)
        )
        allowed = "a data set with rows to train on, and others that are held out"
        require(min(len(train), len(held_out)) > 0, "data.name", self.name, allowed)
        layout = pairs_layout(length, target_length)
        spec = DataSpec(Modality.PAIRS, tokenizer.vocab_size, (length,), layout=layout)
        description = (
            f"pairs of {self.name}: {self.target} of up to {target_length} {tokenizer.unit} from {self.text} of up to"
            f" {length}, {len(train)} to train on, {len(held_out)} held out"
        )
        return Data(spec, train, held_out, description)

    def tokens(self, dataset: Any, tokenizer: Tokenizer, length: int, target_length: int) -> tuple[Any, Any]:
        """The tokens of the two columns, as Arrow columns of lists. A part of a column of dictionaries, such as
        translation.de, is a column, too."""
        flat = dataset.flatten()
        for key, column in (("data.text", self.text), ("data.target", self.target)):
            require_column(key, column, flat)
            feature = flat.features[column]
            require(is_text(feature), key, column, f"a column of texts; it is {kind_of(feature)}")

        def prefixed(texts: list[str]) -> list[np.ndarray]:
            return tokenizer.encode_with_marks([self.prefix + text for text in texts], length)

        sources = tokenised(flat, self.text, prefixed, f"sources {length} {self.prefix!r} {tokenizer.key}")
        encode = partial(tokenizer.encode_targets, length=target_length)
        return sources, tokenised(flat, self.target, encode, f"targets {target_length} {tokenizer.key}")


@final
class PairedTexts(Texts):
    """Pairs of texts, whose tokens are two Arrow columns of lists."""

    def __init__(
        self,
        sources: Any,
        targets: Any,
        source_length: int,
        target_length: int,
        rules: TextRules,
        limit: int | None = None,
    ) -> None:
        """Args:
        limit: the most samples, evenly spread over all; None: all of them.
        """
        self.sources, self.targets, self.rules = sources, targets, rules
        self.source_length, self.target_length = source_length, target_length
        self.padded_length = source_length + target_length
        self.rows = evenly_spaced(np.arange(len(sources)), limit or len(sources))

    def __len__(self) -> int:
        return len(self.rows)

    def pair(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of both texts, each with its end."""
        row = int(self.rows[index])
        return self.ended(self.sources[row], self.source_length), self.ended(self.targets[row], self.target_length)

    def ended(self, tokens: Any, length: int) -> np.ndarray:
        """At most `length` tokens. A tokenizer's marks may follow the end, as the language does mBART's."""
        values = tokens.values.to_numpy()
        return values if self.rules.end_id in values else self.rules.ended(values, length)

    def length(self, index: int, epoch: int) -> int:
        return max(1, sum(map(len, self.pair(index))))

    def longest_of_each(self) -> list[int]:
        lengths = np.array([[len(text) for text in self.pair(index)] for index in range(len(self))])
        return lengths.argmax(0).tolist()

    def sample(self, index: int, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs {IDS, MASK, DECODER_IDS} and targets, (source_length,) and (target_length,) int64."""
        source, target = self.pair(index)
        decoder_ids, targets = self.rules.decoded(target, self.target_length)
        return {**self.rules.filled(source, self.source_length), DECODER_IDS: decoder_ids}, targets
