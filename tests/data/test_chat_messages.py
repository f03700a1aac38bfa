"""data=chat: every format of messages is rendered as it is meant, or told, or refused; nothing is dropped silently."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from lowvram.data.chat import LossOn
from lowvram.data.source import Data
from tests.data.test_chat import MARKED, ONE, PLAIN, TWO, opened, predicted, refusal, said
from tests.wordy import save_chat_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_offline")

TRIMMED = PLAIN.replace("m['content']", "m['content'] | trim")  # as Llama 3's, it takes any value for a text
WORDS = ["the", "fox", "is", "quick", "a", "lazy", "dog", "sleeps"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_chat_tokenizer(tmp_path / "chatty", TRIMMED)


def same(data: Data, other: Data) -> bool:
    samples = [data.train.sample(index, 0) for index in range(len(data.train))]
    others = [other.train.sample(index, 0) for index in range(len(other.train))]
    return [[list(map(int, part)) for part in each] for each in samples] == [
        [list(map(int, part)) for part in each] for each in others
    ]


def text(draw: random.Random) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(1, 4)))


def test_a_content_of_parts_is_their_texts(folder: Path) -> None:
    draw = random.Random(20261127)
    for _ in range(3):
        plain = [[said("user", text(draw)), said("assistant", text(draw))] for _ in range(6)]
        parts: list[Any] = [
            [{**message, "content": in_parts(message["content"], draw)} for message in row] for row in plain
        ]
        for keys in ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}):
            rows = [{"messages": [{keys[key]: value for key, value in each.items()} for each in row]} for row in parts]
            assert same(opened(rows, folder), opened([{"messages": row} for row in plain], folder))


def in_parts(words: str, draw: random.Random) -> Any:
    """The same text in one part, in two, or as it is."""
    cut = draw.randrange(len(words) + 1)
    parts = [{"type": "text", "text": part} for part in (words[:cut], words[cut:])]
    return draw.choice([words, parts, [{"type": "text", "text": words}]])


def test_a_content_that_is_no_text_is_refused(folder: Path) -> None:
    image = {"type": "image_url", "image_url": "x"}
    contents = [5, 7.5, True, {"text": "a"}, [image], [{"type": "text", "text": "a"}, image], [5], [[{"type": "text"}]]]
    for number, content in enumerate(contents):
        message: Any = said(("user", "assistant")[number % 2], content)  # pyright: ignore[reportArgumentType]
        where = r"in row 0 has a content (that is no text but|with a part that is no text)"
        assert_refused([{"messages": [said("user", "a"), message]}] * 4, folder, where)


def assert_refused(rows: list[dict[str, Any]], folder: Path, pattern: str, **fields: Any) -> None:
    sentence = refusal(rows, folder, **fields)
    assert re.search(pattern, sentence), sentence


def test_answers_of_weight_0_are_not_learnt(tmp_path: Path) -> None:
    row = [ONE[0], {**ONE[1], "weight": 0}, TWO[2], {**TWO[3], "weight": 1}]
    marked = MARKED.replace("{% if loop.last %}thinking {% endif %}", "")
    for name, template in {"plain": PLAIN, "trimmed": TRIMMED, "marked": marked}.items():
        folder = save_chat_tokenizer(tmp_path / name, template)
        assert predicted(opened([{"messages": row}] * 4, folder).train, folder)[0] == "sleeps <end>"
        first = [
            {**message, "weight": 1 - message.get("weight", 1)} if "weight" in message else message for message in row
        ]
        assert predicted(opened([{"messages": first}] * 4, folder).train, folder)[0] == "is quick <end>"
        pair = [{"prompt": row[:3], "completion": row[3:]}] * 4
        assert predicted(opened(pair, folder).train, folder)[0] == "sleeps <end>"
        sentence = "has an answer of the weight 0, which isn't learnt, and data.loss_on=everything learns all"
        assert sentence in refusal([{"messages": row}] * 4, folder, loss_on=LossOn.everything)
        for weight in (0.5, 2, -1, "0"):
            other = [{"messages": [ONE[0], {**ONE[1], "weight": weight}]}] * 4
            assert f"has a message of the weight {weight!r}: 1 has it learnt" in refusal(other, folder)


def test_marks_that_do_not_tell_answers_apart_are_refused_with_a_weight_of_0(tmp_path: Path) -> None:
    twice = MARKED.replace(
        "<end>{% endgeneration %}", "{% endgeneration %} the {% generation %}<end>{% endgeneration %}"
    )
    folder = save_chat_tokenizer(tmp_path / "twice", twice)
    row = [ONE[0], {**ONE[1], "weight": 0}, *TWO[2:]]
    assert "doesn't mark each answer's words at one place" in refusal([{"messages": row}] * 4, folder)


def test_roles_are_known_or_refused(folder: Path) -> None:
    for model in ("assistant", "gpt", "model", "chatgpt"):
        row = [ONE[0], said(model, "is quick"), *TWO[2:]]
        assert predicted(opened([{"messages": row}] * 4, folder).train, folder)[0] == "is quick <end> sleeps <end>"
    for role, likely in {"bot": "assistant", "User": "user", "function_call": "assistant", "GPT": "assistant"}.items():
        rows = [{"messages": [*TWO, said(role, "the fox")]}] * 4
        assert_refused(
            rows, folder, rf"in row 0 has a message of the role '{role}'; .* data\.roles={{{role}: {likely}}}"
        )
        kept = opened(rows, folder, roles={role: role})
        assert predicted(kept.train, folder)[0] == "is quick <end> sleeps <end>"
        learnt = opened(rows, folder, roles={role: "assistant"})
        assert predicted(learnt.train, folder)[0] == "is quick <end> sleeps <end> the fox <end>"
    assert_refused([{"messages": [*ONE, said("a b", "x")]}] * 4, folder, r"data\.roles={'a b': assistant}")


def test_what_is_left_out_is_told(folder: Path, tmp_path: Path) -> None:
    rows = [{"messages": ONE, "system": "the lazy dog", "id": number, "tools": ["fox"]} for number in range(4)]
    assert "; columns that aren't read: id, system, tools" in opened(rows, folder).description
    pairs = [{"prompt": "the fox ", "completion": "is quick", "history": "the dog"}] * 4
    assert "; columns that aren't read: history" in opened(pairs, folder).description
    rows = [{"messages": ONE}] * 2 + [{"messages": [ONE[0], {**ONE[1], "name": "fox", "train": False}]}] * 2
    for _ in range(2):  # the second time from the cache
        assert opened(rows, folder).description.endswith("; the chat template leaves out: name, train")
    without = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'tool' %}")
    deaf = save_chat_tokenizer(tmp_path / "deaf", without)
    rows = [{"messages": [*ONE, said("tool", "the dog"), ONE[1]]}] * 4
    assert opened(rows, deaf).description.endswith("; the chat template leaves out: what messages of tool say")
    assert "left out" not in opened([{"messages": TWO}] * 4, folder).description
    assert "leaves out" not in opened([{"messages": TWO}] * 4, folder).description
