"""data=chat: conversations, or prompts and their completions; only the answers are predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lowvram.config.errors import BadInput, require
from lowvram.core.rig import IGNORE
from lowvram.data.chat_messages import USUAL_KEYS, Message, checked, is_left_out
from lowvram.data.chat_template import ChatTemplate, chat_template
from lowvram.data.columns import distinct_texts, mapped_lists, mapped_rows
from lowvram.data.padding import tokenizer_and_rules
from lowvram.data.source import (
    Data,
    FollowedModel,
    ResolvedTextSource,
    Source,
    Texts,
    Unfit,
    require_count,
    resolved_size,
)
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.data.splits import SplitTextSource, evenly_spaced, held_out_rows, read_splits
from lowvram.data.text_and_label import is_text, kind_of
from lowvram.data.tokenizer import Tokenizer

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"  # the usual names of the columns, as in trl
CONVERSATIONS = "conversations"  # the same in ShareGPT's format
COLUMNS = (
    f"a column {MESSAGES}, or {PROMPT} and {COMPLETION}, or others by data.messages or data.prompt and data.completion"
)
TYPES = {"tokens": "int32", "counts": "int8", "unread": "string"}  # of the lists that are made of each row


class Tokens(NamedTuple):
    """The tokens of a row."""

    tokens: np.ndarray  # (num_tokens,) integers
    counts: np.ndarray  # whether each is predicted
    unread: frozenset[str] = frozenset()  # what the chat template leaves out


class LossOn(Enum):
    """Which tokens are predicted. Users type the names."""

    answers = "what the assistant says, or the completion, with its end mark"
    everything = "prompts, too"


@final
@dataclass(frozen=True)
class Chat(SplitTextSource):
    """Each row is a sample: a list of messages, made a text by the tokenizer's chat template, or a prompt with its
    completion, as texts or lists of messages.

    Raises:
        BadInput: a value out of range; no such data set, split or column; a tokenizer without a chat template; a
            conversation that the template refuses. The row is named.
    """

    modalities: ClassVar[tuple[Modality, ...]] = (Modality.TOKENS,)

    messages: str | None = None
    role: str | None = None
    content: str | None = None
    roles: dict[str, str] | None = None
    prompt: str | None = None
    completion: str | None = None
    loss_on: LossOn = LossOn.answers
    tokenizer: str = "auto"
    sequence_length: int | None = None
    eval_samples: int = 256

    def __post_init__(self) -> None:
        require_count("data.sequence_length", self.sequence_length)
        require(self.eval_samples >= 1, "data.eval_samples", self.eval_samples, "at least 1")
        is_pair = (self.prompt is None) == (self.completion is None)
        require(is_pair, "data.completion", self.completion, "given with data.prompt, and only then")
        is_both = (self.role is None) == (self.content is None)
        require(is_both, "data.content", self.content, "given with data.role, and only then")
        is_free = self.messages is None or self.prompt is None
        require(is_free, "data.messages", self.messages, "null where data.prompt is given")

    def resolve(self, model: FollowedModel) -> Source:
        length = self.sequence_length or model.natural_shape()[0]
        return ResolvedTextSource(replace(self, sequence_length=length), model.text_rules)

    def read(self, rules: TextRules, seed: int) -> Data:
        length = resolved_size("data.sequence_length", self.sequence_length)
        splits, (tokenizer, rules) = (
            read_splits(self.place, self.eval_samples),
            tokenizer_and_rules(self.tokenizer, rules),
        )
        made = [split and self.tokens(split, tokenizer) for split in splits]
        tokens = held_out_rows(*made)
        train, held_out = (
            Answers(split, length, rules.padding, limit)
            for split, limit in zip(tokens, (None, self.eval_samples), strict=True)
        )
        allowed = (
            f"a data set with answers to learn, and others that are held out, within data.sequence_length={length}"
        )
        require(min(len(train), len(held_out)) > 0, "data.name", self.name, allowed)
        left_out = f"; {train.num_left_out} left out, which have no answer in them" if train.num_left_out else ""
        description = (
            f"conversations of {self.name}: {len(train)} of up to {length} {tokenizer.unit}, {len(held_out)} held out;"
            f" the loss is on {self.loss_on.name}{left_out}{self.unread(splits, made)}"
        )
        return Data(DataSpec(Modality.TOKENS, tokenizer.vocab_size, (length,)), train, held_out, description)

    def tokens(self, dataset: Any, tokenizer: Tokenizer) -> Any:
        """The tokens of each row, and which of them are predicted, as a data set of lists."""
        columns = self.columns(dataset)
        row_tokens = self.reader(dataset, columns, tokenizer)

        def make(rows: Mapping[str, Sequence[Any]], numbers: Sequence[int]) -> dict[str, list[Any]]:
            found, is_all = list[Tokens](), self.loss_on is LossOn.everything
            for number, *values in zip(numbers, *(rows[column] for column in columns), strict=True):
                try:
                    found.append(row_tokens(*values))
                except Unfit as error:
                    allowed = f"a data set of conversations that can be used: in row {number} {error}"
                    raise BadInput("data.name", self.name, allowed) from None
            return {
                "tokens": [each.tokens for each in found],
                "counts": [np.int8(each.counts | is_all) for each in found],
                "unread": [sorted(each.unread) for each in found],
            }

        how = (self.role, self.content, sorted((self.roles or {}).items()))
        key = f"chat 3 {columns} {how} {self.loss_on.name} {tokenizer.key}"
        return mapped_rows(dataset, make, TYPES, key, with_indices=True)

    def columns(self, dataset: Any) -> tuple[str, ...]:
        """The columns that are read: that of the messages, or those of prompts and completions."""
        there = dataset.column_names
        named = {"messages": self.messages, "prompt": self.prompt, "completion": self.completion}
        for field, column in named.items():
            known = f"one of the columns: {', '.join(there)}"
            require(column is None or column in there, f"data.{field}", column, known)
        if self.messages is not None:
            return (self.messages,)
        if self.prompt is not None and self.completion is not None:
            return (self.prompt, self.completion)
        usual = next(
            (names for names in ((MESSAGES,), (CONVERSATIONS,), (PROMPT, COMPLETION)) if set(names) <= set(there)), None
        )
        if usual is None:
            raise BadInput("data.name", self.name, f"a data set with {COLUMNS}; it has {', '.join(there)}")
        return usual

    def reader(self, dataset: Any, columns: tuple[str, ...], tokenizer: Tokenizer) -> Callable[..., Tokens]:
        """A function of a row's values that returns its tokens. Raises BadInput if messages need a chat template, and
        the tokenizer has none, or for columns of anything else."""
        for field, column in zip(
            ("messages",) if len(columns) == 1 else ("prompt", "completion"), columns, strict=True
        ):
            check_column(f"data.{field}", column, dataset.features[column])
        if len(columns) == 2 and all(is_text(dataset.features[column]) for column in columns):
            return lambda prompt, completion: plain_tokens(tokenizer, prompt or "", completion or "")
        template = chat_template(tokenizer)
        if template is None:
            allowed = (
                "one with a chat template, which makes a text of messages: this has none. Set `chat_template` of the"
                " tokenizer and save it anew, or give texts as prompt and completion"
            )
            raise BadInput("data.tokenizer", self.tokenizer, allowed)
        if len(columns) == 1:
            return lambda messages: conversation(template, self.checked(messages))
        return lambda prompt, completion: completed(template, self.checked(prompt), self.checked(completion))

    def checked(self, messages: Any) -> list[Message]:
        """The messages of a row, each with a role and a text. Raises Unfit for anything else."""
        found = checked(messages, [(self.role, self.content)] if self.role else USUAL_KEYS, self.roles or {})
        if self.loss_on is LossOn.everything and any(map(is_left_out, found)):
            raise Unfit("has an answer of the weight 0, which isn't learnt, and data.loss_on=everything learns all")
        return found

    def unread(self, splits: Iterable[Any | None], made: Iterable[Any | None]) -> str:
        """A note for the log on what the data set has and isn't read."""
        columns = {name for split in splits if split for name in {*split.column_names} - {*self.columns(split)}}
        keys = {key for split in made if split for key in distinct_texts(split.data.column("unread"))}
        noted = f"; columns that aren't read: {', '.join(sorted(columns))}" if columns else ""
        return noted + (f"; the chat template leaves out: {', '.join(sorted(keys))}" if keys else "")


def check_column(key: str, column: str, feature: Any) -> None:
    """Raises BadInput for a column of numbers and the like."""
    from datasets import Value

    allowed = f"a column of texts or of lists of messages; it is {kind_of(feature)}"
    require(is_text(feature) or not isinstance(feature, Value), key, column, allowed)


def plain_tokens(tokenizer: Tokenizer, prompt: str, completion: str) -> Tokens:
    """The tokens of a prompt, a completion and an end mark; the last two are predicted."""
    tokens, counts = tokenizer.encode_spans(prompt + completion, [(len(prompt), len(prompt) + len(completion))])
    opening, end = tokenizer.opening, tokenizer.separator
    marked = np.concatenate([opening, tokens, end]).astype(np.int32)
    return Tokens(marked, np.concatenate([np.zeros(len(opening), bool), counts, np.ones(len(end), bool)]))


def conversation(template: ChatTemplate, messages: list[Message]) -> Tokens:
    """The tokens of a conversation of which all answers are predicted."""
    return Tokens(*template.tokens(messages), template.unread(messages))


def completed(template: ChatTemplate, prompt: list[Message], completion: list[Message]) -> Tokens:
    """The tokens of a conversation of which only the answers in `completion` are predicted."""
    tokens, counts, unread = conversation(template, [*prompt, *completion])
    num_before = sum(template.tokens(prompt)[1])
    counts[np.flatnonzero(counts)[:num_before]] = False  # answers in the prompt
    return Tokens(tokens, counts, unread)


@final
class Answers(Texts):
    """Each token of a text is an input, and only some of them are targets. A text ends after its last target; of more
    than `padded_length` tokens it is cut."""

    def __init__(self, rows: Any, padded_length: int, pad_id: int, limit: int | None = None) -> None:
        """Args:
        rows: a `datasets.Dataset` of lists: `tokens`, and `counts` (whether each is predicted).
        limit: the most samples, evenly spread over all; None: all of them.
        """
        self.tokens, self.counts = rows.data.column("tokens"), rows.data.column("counts")
        self.padded_length, self.pad_id = padded_length, pad_id
        ends = [last_place(counts[: padded_length + 1]) for counts in mapped_lists(self.counts)]
        fit = np.flatnonzero(ends)
        self.rows = evenly_spaced(fit, limit or len(fit))
        self.lengths = np.array(ends, np.int64)[self.rows]
        self.num_left_out = len(ends) - len(fit)

    def __len__(self) -> int:
        return len(self.rows)

    def length(self, index: int, epoch: int) -> int:
        return int(self.lengths[index])

    def longest(self, num_samples: int) -> int:
        again, left = divmod(num_samples, len(self))
        return int(again * self.lengths.sum() + np.sort(self.lengths)[::-1][:left].sum())

    def sample(self, index: int, epoch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (padded_length,) int64; targets that aren't predicted are IGNORE."""
        row, length = int(self.rows[index]), int(self.lengths[index])
        tokens = torch.from_numpy(self.tokens[row].values.to_numpy()[: length + 1].astype(np.int64))
        is_target = torch.from_numpy(self.counts[row].values.to_numpy()[1 : length + 1] != 0)
        inputs, targets = torch.full((self.padded_length,), self.pad_id), torch.full((self.padded_length,), IGNORE)
        inputs[:length], targets[:length] = tokens[:-1], tokens[1:].where(is_target, IGNORE)
        return inputs, targets


def last_place(counts: np.ndarray) -> int:
    """The place of the last token that is predicted from another; 0 if there is none."""
    places = np.flatnonzero(counts)
    return int(places[-1]) if len(places) else 0
