"""Turns text into tokens: one per byte, or by a tokenizer of transformers."""

from __future__ import annotations

import hashlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np

from lowvram.compat.hf_offline import hf_offline
from lowvram.config.errors import BadInput, require
from lowvram.config.texts import first_line
from lowvram.core.quiet import quiet
from lowvram.data.columns import mapped_lists, mapped_texts, tokenised
from lowvram.data.local import looks_local
from lowvram.data.spec import TextRules

FILES = (  # a folder with a tokenizer has at least one of them
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
PIECE_LETTERS = 1 << 14  # long texts are cut at line ends after so many, to keep Python's lists of token ids short
PIECES = 256  # tokenised at once
ALLOWED = "bytes, auto (the model's own) or a folder with a tokenizer of transformers"
Span = tuple[int, int]  # letters of a text, from the first up to before the second


class Tokenizer(ABC):
    """Tokens are integers, in (num_tokens,) arrays."""

    unit: str  # what a token is called
    vocab_size: int
    key: str  # cache key: identifies everything that the tokens depend on
    separator: np.ndarray  # tokens that end a text: end of sequence, or a new line
    opening: np.ndarray  # tokens that a text by itself begins with: beginning of sequence, or nothing
    marks: tuple[np.ndarray, np.ndarray]  # special tokens before and after a text, as `encode_with_marks` adds them
    mask_id: int | None  # the token that takes the place of a hidden one; None: there is none
    special_ids: tuple[int, ...]  # tokens that are no text
    pad_ids: tuple[int, ...]  # those that can pad, the best first

    def is_text(self, token: int) -> bool:
        """Whether texts may hold the token."""
        return token < self.vocab_size and token not in self.special_ids

    @abstractmethod
    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The tokens of each text, without any marks."""

    @abstractmethod
    def encode_with_marks(self, texts: list[str], length: int) -> list[np.ndarray]:
        """The tokens of each text with the tokenizer's special tokens, truncated to at most `length`."""

    @abstractmethod
    def encode_targets(self, texts: list[str], length: int) -> list[np.ndarray]:
        """The same for texts that an encoder-decoder writes, which some tokenizers mark otherwise."""

    @abstractmethod
    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a text without any marks, and whether each begins in one of the spans: (num_tokens,) bool."""

    @abstractmethod
    def documents(self, dataset: Any, column: str) -> list[np.ndarray]:
        """The tokens of each text of a column of a `datasets.Dataset`, without marks: views of a mapped file."""


@final
class Bytes(Tokenizer):
    """Every byte of UTF-8 is a token."""

    unit = "bytes"
    vocab_size = 256
    key = "bytes"
    separator = np.frombuffer(b"\n", np.uint8)
    opening = np.zeros(0, np.uint8)
    marks = opening, opening
    mask_id = 0  # which hardly any text has
    special_ids = (0,)
    pad_ids = ()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_with_marks(self, texts: list[str], length: int) -> list[np.ndarray]:
        return [tokens[:length] for tokens in self.encode(texts)]

    def encode_targets(self, texts: list[str], length: int) -> list[np.ndarray]:
        return self.encode_with_marks(texts, length)

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        starts = np.cumsum([0, *(len(letter.encode()) for letter in text)])
        is_inside = np.zeros(int(starts[-1]), bool)
        for start, stop in spans:
            is_inside[starts[start] : starts[stop]] = True
        return self.encode([text])[0], is_inside

    def documents(self, dataset: Any, column: str) -> list[np.ndarray]:
        return list(mapped_texts(dataset.data.column(column)))


@final
class Pretrained(Tokenizer):
    """A tokenizer of transformers. It may have more tokens than the model knows, as long as no text holds them."""

    unit = "tokens"

    def __init__(self, inner: Any, most: int | None = None) -> None:
        """Args:
        most: tokens that the model knows; None: all.
        """
        self.inner = inner
        size = max(inner.get_vocab().values(), default=-1) + 1
        self.vocab_size, self.has_more = min(size, most or size), size > (most or size)
        self.key = hash_of_files(inner.save_pretrained)  # before the first call: calls change what it saves
        if self.has_more:  # tokens in the cache of `datasets` are known to the model
            self.key += f" below {most}"
        end = inner.eos_token_id  # without one a new line separates texts, if the vocabulary has it
        self.separator = self.encode(["\n"])[0] if end is None else np.array([end], np.int32)
        marks = inner("", verbose=False)["input_ids"]
        self.opening = np.array(marks[:1] if marks and marks[0] == inner.bos_token_id else [], np.int32)
        self.marks, self.mask_id = marks_around(inner), inner.mask_token_id
        for tokens in (self.separator, self.opening, *self.marks):
            self.known(tokens)
        self.special_ids = tuple(inner.all_special_ids)
        last = {inner.bos_token_id: 1, inner.unk_token_id: 2}  # texts may begin with, or hold, these
        others = sorted(self.special_ids, key=lambda token: last.get(token, 0))
        self.pad_ids = tuple(each for each in (inner.pad_token_id, end, *others) if each is not None)

    def known(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens of a text. Raises BadInput if the model doesn't know one of them."""
        if self.has_more and len(tokens) and tokens.max() >= self.vocab_size:
            token = int(tokens.max())
            allowed = (
                f"one whose tokens the model knows: a text holds its token {token}"
                f" ({self.inner.convert_ids_to_tokens(token)}), and the model has embeddings for {self.vocab_size}:"
                " resize them (resize_token_embeddings) or remove the token, or choose the model's own with"
                " data.tokenizer=auto, or bytes"
            )
            raise BadInput("data.tokenizer", self.inner.name_or_path, allowed)
        return tokens

    def is_text(self, token: int) -> bool:
        added = self.inner.added_tokens_decoder.get(token)
        return super().is_text(token) and not (added is not None and added.special)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.concatenate([np.zeros(0, np.int32), *self.pieces(text)]) for text in texts]

    def pieces(self, text: str) -> Iterator[np.ndarray]:
        """The tokens of a text, piece by piece."""
        lines = cut_at_lines(text)
        while batch := list(islice(lines, PIECES)):
            for ids in self.inner(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                yield self.known(np.array(ids, np.int32))

    def encode_with_marks(self, texts: list[str], length: int) -> list[np.ndarray]:
        ids = self.inner(texts, truncation=True, max_length=length, verbose=False)["input_ids"]
        return [self.known(np.array(tokens, np.int32)) for tokens in ids]

    def encode_targets(self, texts: list[str], length: int) -> list[np.ndarray]:
        ids = self.inner(text_target=texts, truncation=True, max_length=length, verbose=False)["input_ids"]
        return [self.known(np.array(tokens, np.int32)) for tokens in ids]

    def encode_spans(self, text: str, spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Raises BadInput for a tokenizer of pure Python, which doesn't say where in the text its tokens are."""
        allowed = (
            f"bytes or a fast tokenizer, which says where in a text its tokens are: {type(self.inner).__name__} isn't"
        )
        require(self.inner.is_fast, "data.tokenizer", self.inner.name_or_path, allowed)
        found = self.inner(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        begins = np.array([begin for begin, _ in found["offset_mapping"]], np.int64)
        is_inside = np.zeros(len(begins), bool)
        for start, stop in spans:
            is_inside |= (begins >= start) & (begins < stop)
        return self.known(np.array(found["input_ids"], np.int32)), is_inside

    def documents(self, dataset: Any, column: str) -> list[np.ndarray]:
        return list(mapped_lists(tokenised(dataset, column, self.encode, f"documents {self.key}")))


def marks_around(inner: Any) -> tuple[np.ndarray, np.ndarray]:
    """The special tokens that a tokenizer puts before and after a text."""
    bare, whole = (inner("a", add_special_tokens=special, verbose=False)["input_ids"] for special in (False, True))
    start = next(start for start in range(len(whole) + 1) if whole[start : start + len(bare)] == bare)
    return np.array(whole[:start], np.int32), np.array(whole[start + len(bare) :], np.int32)


def hash_of_files(save: Callable[[str], Any]) -> str:
    """Hash of all files that `save` writes to a folder."""
    digest = hashlib.blake2b(digest_size=16)
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        for path in sorted(Path(folder).iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def cut_at_lines(text: str) -> Iterator[str]:
    """Pieces of a text; all but the last end with a new line."""
    start = 0
    while start < len(text):
        stop = text.find("\n", start + PIECE_LETTERS) + 1 or len(text)
        yield text[start:stop]
        start = stop


def choose_tokenizer(choice: str, rules: TextRules) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, for a model with such rules.

    Raises:
        BadInput: the tokenizer doesn't exist, or can't be read.
    """
    make = BY_NAME.get(choice)
    return pretrained(choice, choice, None, rules.vocab_size) if make is None else make(rules)


def model_tokenizer(rules: TextRules) -> Tokenizer:
    """The tokenizer of the model's folder; where there is none, bytes.

    Raises:
        BadInput: there is none, and the model's weights were trained with one.
    """
    name = rules.tokenizer
    if name is None:
        return Bytes()
    if is_folder(name) and not has_tokenizer(name):
        allowed = f"bytes, or the folder of the tokenizer with which the weights in {name} were trained: it has none"
        require(not rules.is_trained, "data.tokenizer", "auto", allowed)
        print(f"data.tokenizer=auto: there is no tokenizer in {name}, so every byte is a token")
        return Bytes()
    return pretrained("auto", name, rules.revision, rules.vocab_size)


BY_NAME: dict[str, Callable[[TextRules], Tokenizer]] = {"auto": model_tokenizer, "bytes": lambda rules: Bytes()}


def pretrained(choice: str, name: str, revision: str | None, most: int | None = None) -> Tokenizer:
    """The tokenizer in the folder `name` or, if there is no such folder, of that model on the hub. Code that comes with
    it is never run.

    Args:
        most: tokens that the model knows; None: all.
    """
    if is_folder(name):
        require(has_tokenizer(name), "data.tokenizer", choice, f"{ALLOWED}: {name} has none of {', '.join(FILES)}")
    elif looks_local(name):
        raise BadInput("data.tokenizer", choice, f"{ALLOWED}: there is no folder {name}")
    where = str(Path(name).expanduser()) if is_folder(name) else name
    try:
        with hf_offline():
            return Pretrained(library().from_pretrained(where, revision=revision, trust_remote_code=False), most)
    except BadInput:
        raise
    except Exception as error:  # each kind of tokenizer has its own for a broken file
        what = f"{name} can't be read ({first_line(error)})"
        raise BadInput("data.tokenizer", choice, f"{ALLOWED}: {what}") from None


def library() -> Any:
    """transformers.AutoTokenizer. Raises BadInput if transformers isn't installed."""
    try:
        with quiet():
            import transformers
    except ModuleNotFoundError as missing:
        needed = f"bytes, or {missing.name} installed: pip install 'lowvram[hf]'"
        raise BadInput("data.tokenizer", "auto", needed) from None
    transformers.logging.set_verbosity_error()
    return transformers.AutoTokenizer


def is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir()


def has_tokenizer(name: str) -> bool:
    return any((Path(name).expanduser() / file).is_file() for file in FILES)
