"""Conversations as tokens, through the chat template of a tokenizer, and which of them are the assistant's words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import final

import numpy as np

from lowvram.config.errors import BadInput
from lowvram.config.texts import first_line
from lowvram.data.chat_messages import ASSISTANT, CONTENT, ROLE, Message, is_learnt, unread_keys
from lowvram.data.source import Unfit
from lowvram.data.tokenizer import Pretrained, Span, Tokenizer

MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # in a template: the assistant's words are between such marks


@final
class ChatTemplate:
    """The chat template of a tokenizer. Those that mark the assistant's words are asked for them. With others these are
    found by rendering the messages before each answer, and those up to it: both must be the start of the whole text."""

    def __init__(self, tokenizer: Pretrained) -> None:
        self.tokenizer, self.inner = tokenizer, tokenizer.inner
        self.source: str = self.inner.get_chat_template()
        self.is_marked = MARKED.search(self.source) is not None

    def tokens(self, messages: Sequence[Message]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a conversation, (num_tokens,) int32, and whether each is the assistant's and learnt.

        Raises:
            Unfit: the template refuses the messages, or the answers can't be told from the rest.
        """
        try:
            if self.is_marked:
                found = self.inner.apply_chat_template(
                    messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                is_marked = learnt_marks(np.array(found["assistant_masks"], bool), messages)
                return self.tokenizer.known(np.array(found["input_ids"], np.int32)), is_marked
            text, answers = self.answers(messages)
        except (Unfit, BadInput):
            raise
        except Exception as error:  # of Jinja, or what a template raises itself
            raise Unfit(f"the chat template refuses it ({first_line(error)})") from None
        return self.tokenizer.encode_spans(text, answers)

    def answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the assistant's words are that are learnt, their end mark
        included."""
        text, spans = self.text(messages), list[Span]()
        for number, message in enumerate(messages):
            if is_learnt(message):
                before = self.text(messages[:number], is_answered=False) if number else ""
                answered = self.text(messages[: number + 1])
                if not (answered.startswith(before) and text.startswith(answered)):
                    raise Unfit(
                        "the chat template changes a message when others follow it, so the assistant's words can't be"
                        " found: put {% generation %} and {% endgeneration %} around them in the template, or leave"
                        " one answer in each conversation"
                    )
                spans.append((len(before), len(answered)))
        return text, spans

    def unread(self, messages: Sequence[Message]) -> frozenset[str]:
        """What the template leaves out of messages that it takes: further keys, and whole messages, by their roles."""
        text = self.text(messages)
        left_out = {message[ROLE] for message in messages if message[CONTENT].strip() not in text}
        return unread_keys(messages, self.source) | {f"what messages of {role} say" for role in left_out}

    def text(self, messages: Sequence[Message], is_answered: bool = True) -> str:
        """The messages as text; if not `is_answered`, with the words that the template puts before an answer."""
        return self.inner.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=not is_answered)


def learnt_marks(is_marked: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
    """Which of the tokens (num_tokens,) that a template marks as the assistant's are learnt. Raises Unfit where an
    answer isn't, and the marks don't tell which tokens are its own."""
    answers = [is_learnt(message) for message in messages if message[ROLE] == ASSISTANT]
    if all(answers):
        return is_marked
    starts = is_marked & ~np.concatenate([[False], is_marked[:-1]])
    if starts.sum() != len(answers):
        raise Unfit(
            "has an answer of the weight 0, and the chat template doesn't mark each answer's words at one place"
        )
    return is_marked & np.concatenate([[False], answers])[starts.cumsum()]


def chat_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The tokenizer's chat template; None if it has none."""
    if isinstance(tokenizer, Pretrained) and tokenizer.inner.chat_template is not None:
        return ChatTemplate(tokenizer)
    return None
