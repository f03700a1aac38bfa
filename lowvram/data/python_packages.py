"""data=python_packages: pieces of source code of Python's library, to classify by package. Every machine has them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
import torch
from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.data.padding import padding_token
from lowvram.data.python_source import library_files
from lowvram.data.randomness import Stream, generator
from lowvram.data.source import (
    Data,
    FollowedModel,
    ResolvedTextSource,
    Source,
    Texts,
    TextSource,
    require_count,
    resolved_size,
)
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.data.tokenizer import Bytes
from lowvram.data.windows import TokenStream

# The larger ones of those that every Python since 3.11 has.
PACKAGES = (
    "asyncio",
    "email",
    "encodings",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
)
HELD_OUT_SHARE = 10  # one byte in 10, at the end of each file
SHORTEST_SHARE = 4  # the longest piece is 4 times as long as the shortest


@final
@dataclass(frozen=True)
class PythonPackages(TextSource):
    """Pieces of source code, each of one of ten packages. Their places and lengths are random, and new in every epoch.
    The last tenth of each file is held out.

    Raises:
        BadInput: a value out of range, or a Python without its source.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.LABELLED_TOKENS,)

    sequence_length: int | None = None
    num_samples: int = 50_000
    eval_samples: int = 256

    def __post_init__(self) -> None:
        require_count("data.sequence_length", self.sequence_length)
        require(self.num_samples >= 1, "data.num_samples", self.num_samples, "at least 1")
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def resolve(self, model: FollowedModel) -> Source:
        length = self.sequence_length or model.natural_shape()[0]
        return ResolvedTextSource(replace(self, sequence_length=length), model.text_rules)

    def read(self, rules: TextRules, seed: int) -> Data:
        length = resolved_size("data.sequence_length", self.sequence_length)
        rules = replace(rules, pad_id=padding_token(Bytes(), rules))
        train, held_out = package_texts()
        missing = [name for name, text in zip(PACKAGES, held_out, strict=True) if not len(text)]
        if missing:
            allowed = f"another source: this Python came without the source code of {', '.join(missing)}"
            raise BadInput("data", "python_packages", allowed)
        description = (
            f"source code of {len(PACKAGES)} packages of Python's library: which is a piece of up to {length} bytes"
            f" from? {self.num_samples} samples, {self.eval_samples} held out"
        )
        modality, names = Modality.LABELLED_TOKENS, tuple(PACKAGES)
        return Data(
            DataSpec(modality, len(names), (length,), Bytes.vocab_size, class_names=names, pad_id=rules.pad_id),
            train=Pieces(train, self.num_samples, length, rules, Stream.TRAIN, seed),
            eval=Pieces(held_out, self.eval_samples, length, rules, Stream.EVAL, seed),
            description=description,
        )


@final
class Pieces(Texts):
    """Sample i is from text i modulo their number, so classes are balanced."""

    def __init__(
        self, texts: list[TokenStream], num_samples: int, length: int, rules: TextRules, stream: Stream, seed: int
    ) -> None:
        self.texts, self.num_samples, self.padded_length, self.rules = texts, num_samples, length, rules
        self.stream, self.seed = stream, seed

    def __len__(self) -> int:
        return self.num_samples

    def length(self, index: int, epoch: int) -> int:
        num_bytes, _ = self.drawn(index, epoch)
        return num_bytes if self.rules.end_id is None else min(num_bytes + 1, self.padded_length)

    def sample(self, index: int, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        label = index % len(self.texts)
        num_bytes, rng = self.drawn(index, epoch)
        text = self.texts[label]
        piece = text.read(int(rng.integers(len(text) - num_bytes + 1)), num_bytes)
        return self.rules.padded(piece, self.padded_length), torch.tensor(label)

    def drawn(self, index: int, epoch: int) -> tuple[int, np.random.Generator]:
        """How many bytes a sample has, and the generator for its other random choices."""
        rng = generator(self.stream, self.seed, epoch, index)
        shortest = max(1, self.padded_length // SHORTEST_SHARE)
        return min(int(rng.integers(shortest, self.padded_length + 1)), len(self.texts[index % len(self.texts)])), rng


def package_texts() -> tuple[list[TokenStream], list[TokenStream]]:
    """The text of each package to train on, and the held-out text of each."""
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in PACKAGES}
    for name, path in library_files().items():
        package = name.partition("/")[0]
        if package in pieces:
            pieces[package].append(np.frombuffer(path.read_bytes(), np.uint8))
    cuts = [[(text, len(text) - len(text) // HELD_OUT_SHARE) for text in texts] for texts in pieces.values()]
    train = [TokenStream([text[:end] for text, end in texts]) for texts in cuts]
    return train, [TokenStream([text[end:] for text, end in texts]) for texts in cuts]
