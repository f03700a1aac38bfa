"""data=text: the user's text files, read through the library `datasets`."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, final

import numpy as np
from omegaconf import MISSING

from lowvram.config.errors import BadInput, require
from lowvram.data.documents import Documents, Unit, as_documents
from lowvram.data.local import check_no_hop, escaped, existing_path, is_hidden, load_local
from lowvram.data.masking import MASKED_SHARE, masked_source
from lowvram.data.padding import tokenizer_and_rules
from lowvram.data.source import (
    Data,
    FollowedModel,
    ResolvedTextSource,
    Source,
    TextSource,
    require_count,
    resolved_size,
)
from lowvram.data.spec import Modality, TextRules
from lowvram.data.tokenizer import Tokenizer
from lowvram.data.windows import TokenStream, windowed

HELD_OUT_SHARE = 10  # one token in 10, at the end of each file
CHUNK_BYTES = 1 << 20  # read at once
MAX_FILE_BYTES = 2**31 - 1  # Arrow's limit for one text


@final
@dataclass(frozen=True)
class Text(TextSource):
    """The next token of a UTF-8 file, or of all files of a folder. The last tenth of each file is held out or, with
    samples=documents, every tenth file.

    Raises:
        BadInput: a value out of range; a path that is missing or empty, too short for one sample, or that
            holds a file that can't be read or is not UTF-8. The file is named. Or there is no such tokenizer.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.TOKENS, Modality.MASKED_TOKENS)

    path: str = MISSING
    pattern: str = "**/*"
    samples: Unit = Unit.windows
    tokenizer: str = "auto"
    sequence_length: int | None = None
    masked_share: float = MASKED_SHARE
    eval_samples: int = 256

    def __post_init__(self) -> None:
        require_count("data.sequence_length", self.sequence_length)
        require(0 < self.masked_share < 1, "data.masked_share", self.masked_share, "more than 0 and less than 1")
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")

    def check_paths(self) -> None:
        """Asked before any process starts, so it takes no torch."""
        existing_path(self.path)

    def resolve(self, model: FollowedModel) -> Source:
        length = self.sequence_length or model.natural_shape()[0]
        resolved = replace(self, sequence_length=length)
        return masked_source(resolved, model) or ResolvedTextSource(resolved, model.text_rules)

    def read(self, rules: TextRules, seed: int) -> Data:
        return self.tokens(*tokenizer_and_rules(self.tokenizer, rules), seed)

    def tokens(self, tokenizer: Tokenizer, rules: TextRules, seed: int) -> Data:
        """The files as samples of tokens."""
        length = resolved_size("data.sequence_length", self.sequence_length)
        files = text_files(self.path, self.pattern)
        for file in files:
            check_text(self.path, file)
        dataset = load_local("text", {"train": escaped(files)}, sample_by="document")["train"]
        texts = tokenizer.documents(dataset, "text")
        origin = f"text of {self.path}, files: {len(files)}"
        if self.samples is Unit.documents:
            return self.documents(texts, tokenizer, rules, origin)
        cuts = [len(text) - len(text) // HELD_OUT_SHARE for text in texts]
        train = TokenStream([text[:cut] for text, cut in zip(texts, cuts, strict=True)])
        held_out = TokenStream([text[cut:] for text, cut in zip(texts, cuts, strict=True)])
        allowed = (
            f"longer: a tenth of each file is held out, {len(held_out)} {tokenizer.unit} in all,"
            f" and one sample takes {length + 1} (data.sequence_length={length})"
        )
        require(len(held_out) > length, "data.path", self.path, allowed)
        return windowed(train, held_out, tokenizer, length, self.eval_samples, seed, origin)

    def documents(self, texts: list[np.ndarray], tokenizer: Tokenizer, rules: TextRules, origin: str) -> Data:
        """A sample holds tokens of one file only."""
        length = resolved_size("data.sequence_length", self.sequence_length)
        last = min(HELD_OUT_SHARE, len(texts)) - 1
        held_out = [text for number, text in enumerate(texts) if number % HELD_OUT_SHARE == last]
        train = [text for number, text in enumerate(texts) if number % HELD_OUT_SHARE != last]
        trained_on, evaluated = (
            as_document_samples(split, tokenizer, length, rules.padding, limit)
            for split, limit in ((train, None), (held_out, self.eval_samples))
        )
        allowed = f"at least two files with text: every {HELD_OUT_SHARE}th is held out, of fewer the last"
        require(min(len(trained_on), len(evaluated)) > 0, "data.path", self.path, allowed)
        return as_documents(trained_on, evaluated, tokenizer, origin)


def as_document_samples(
    texts: list[np.ndarray], tokenizer: Tokenizer, length: int, pad_id: int, limit: int | None
) -> Documents:
    """Samples of texts without marks: the tokenizer's beginning and end marks are added."""
    opening, end = tokenizer.opening, tokenizer.separator
    lengths = np.array([len(opening) + len(text) + len(end) for text in texts], np.int64)
    return Documents(lambda number: [opening, texts[number], end], lengths, length, pad_id, limit)


def text_files(path: str, pattern: str) -> list[Path]:
    """The file itself, or the folder's files that match the pattern, sorted, without hidden ones."""
    root = existing_path(path)
    if not root.is_dir():
        return [root]
    try:
        matches = list(root.glob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise BadInput("data.pattern", pattern, f"a pattern inside data.path, such as **/*.txt ({error})") from None
    files = sorted(file for file in matches if not file.is_dir() and not is_hidden(file, root))
    require(bool(files), "data.path", path, f"a folder with files that match data.pattern={pattern}")
    return files


def check_text(path: str, file: Path) -> None:
    """Raises BadInput, naming the file, unless it can be read from end to end as UTF-8."""
    require(
        not file.exists() or file.is_file(),
        "data.path",
        path,
        f"made of plain files: {file} is something else",
    )
    check_no_hop("data.path", path, file)
    hint = "mend it, take it out, or choose others with data.pattern"
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                decoder.decode(chunk)
                num_bytes += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise BadInput("data.path", path, f"text in UTF-8: {file} is not ({error.reason}): {hint}") from None
    except OSError as error:
        raise BadInput("data.path", path, f"readable: {file} can't be read ({error.strerror}): {hint}") from None
    allowed = f"made of files of at most {MAX_FILE_BYTES} bytes: split {file}"
    require(num_bytes <= MAX_FILE_BYTES, "data.path", path, allowed)
