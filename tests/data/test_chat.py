"""data=chat: what is predicted of a conversation, and which conversations are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

from lowvram.config.errors import BadInput
from lowvram.core.rig import IGNORE, Part
from lowvram.data.bucketed import Bucketed
from lowvram.data.chat import Chat, LossOn
from lowvram.data.loader import collate
from lowvram.data.packed import Packed
from lowvram.data.source import Data, Samples, resolve_source
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.tasks import Auto
from tests.laboratory import TRANSFORMER
from tests.wordy import save_chat_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_offline")

# As ChatML: each message is the same whatever follows. Of the others, one forgets answers once others follow, one marks
# the answers, and one refuses to be told what to do.
PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}> {% if loop.last %}thinking {% endif %}{{ m['content'] }} <end>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant> {% generation %}"
    "{% if loop.last %}thinking {% endif %}{{ m['content'] }} <end>{% endgeneration %}\n"
    "{% else %}<user> {{ m['content'] }} <end>\n{% endif %}{% endfor %}"
)
STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ONE = [said("user", "the fox"), said("assistant", "is quick")]
TWO = [*ONE, said("user", "the dog"), said("assistant", "sleeps")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_chat_tokenizer(tmp_path / "chatty", PLAIN)


def saved(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "chats.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def opened(rows: list[dict[str, Any]], folder: Path, **fields: Any) -> Data:
    source = Chat(saved(folder.parent, rows), **{"sequence_length": 32, "tokenizer": str(folder), **fields})
    return source.open(seed=0)


def predicted(samples: Samples, tokenizer: Path) -> list[str]:
    """The words of each sample that are targets."""
    from transformers import AutoTokenizer

    known = AutoTokenizer.from_pretrained(tokenizer)
    targets = (samples.sample(index, 0)[1] for index in range(len(samples)))
    return [known.decode(each[each != IGNORE]) for each in targets]


# What is predicted


@pytest.mark.parametrize(
    ("messages", "answers"),
    [
        (ONE, "is quick <end>"),
        (TWO, "is quick <end> sleeps <end>"),
        ([said("system", "the lazy dog"), *ONE], "is quick <end>"),
        ([*ONE, said("user", "the dog")], "is quick <end>"),
        (ONE[1:], "is quick <end>"),
    ],
    ids=["one answer", "two", "a system message", "a question at the end", "nothing before"],
)
def test_only_answers_and_their_end_marks_are_predicted(folder: Path, messages: list[Any], answers: str) -> None:
    data = opened([{"messages": messages}] * 4, folder)
    assert (len(data.train), len(data.eval)) == (3, 1)
    assert {*predicted(data.train, folder), *predicted(data.eval, folder)} == {answers}
    inputs, targets = data.train.sample(0, 0)
    assert data.spec == DataSpec(Modality.TOKENS, data.spec.num_classes, (32,))
    last = int((targets != IGNORE).nonzero()[-1])  # no input, but the last target
    is_target = targets[:last] != IGNORE
    assert torch.equal(inputs[1 : last + 1][is_target], targets[:last][is_target])


def test_a_sample_is_what_the_template_makes_of_its_messages(folder: Path) -> None:
    from transformers import AutoTokenizer

    data, known = opened([{"messages": TWO}] * 4, folder), AutoTokenizer.from_pretrained(folder)
    text = known.apply_chat_template(TWO, tokenize=False)
    wanted = known(text, add_special_tokens=False)["input_ids"][:-1]
    inputs, _ = data.train.sample(0, 0)
    assert inputs[: len(wanted)].tolist() == wanted


def test_all_of_it_can_be_predicted(folder: Path) -> None:
    data = opened([{"messages": ONE}] * 4, folder, loss_on=LossOn.everything)
    assert predicted(data.train, folder)[0] == "the fox <end> <assistant> is quick <end>"


def test_answers_that_a_template_marks_are_taken_as_marked(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "marked", MARKED)
    assert predicted(opened([{"messages": TWO}] * 4, folder).train, folder)[0] == "is quick <end> thinking sleeps <end>"


def test_prompts_and_completions_as_messages(folder: Path) -> None:
    rows = [{"prompt": [*TWO, said("user", "a dog")], "completion": [said("assistant", "jumps")]}] * 4
    assert set(predicted(opened(rows, folder).train, folder)) == {"jumps <end>"}


def test_prompts_and_completions_as_texts(folder: Path) -> None:
    rows = [{"prompt": "the fox ", "completion": "is quick"}] * 4
    assert set(predicted(opened(rows, folder).train, folder)) == {"is quick <end>"}
    data = opened([{"q": "the fox ", "a": "is quick"}] * 4, folder, tokenizer="bytes", prompt="q", completion="a")
    inputs, targets = data.train.sample(0, 0)
    assert bytes(targets[targets != IGNORE].tolist()) == b"is quick\n"
    assert bytes(inputs.tolist()).startswith(b"the fox is quick\0")


def test_letters_of_several_bytes() -> None:
    from lowvram.data.tokenizer import Bytes

    tokens, is_inside = Bytes().encode_spans("né ça", [(3, 5)])
    assert bytes(tokens[is_inside].tolist()).decode() == "ça"


def test_long_conversations_are_cut_and_those_without_an_answer_left_out(folder: Path) -> None:
    rows = [{"messages": ONE}, {"messages": [said("user", "the fox " * 9), *ONE]}, *[{"messages": TWO}] * 4]
    data = opened(rows, folder, sequence_length=10)
    assert predicted(data.train, folder) == ["is quick <end>"] * 4
    assert "1 left out" in data.description


def test_splits_of_their_own(folder: Path, tmp_path: Path) -> None:
    parts: Any = {
        "train": Dataset.from_list([{"messages": ONE}] * 5),
        "test": Dataset.from_list([{"messages": TWO}] * 3),
    }
    DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    data = Chat(str(tmp_path / "saved"), tokenizer=str(folder), sequence_length=32, eval_samples=2).open(0)
    assert predicted(data.train, folder) == ["is quick <end>"] * 5
    assert predicted(data.eval, folder) == ["is quick <end> sleeps <end>"] * 2


# Loaders


def test_loaders_keep_the_targets(folder: Path, token_model) -> None:
    data = opened([{"messages": messages} for messages in (ONE, TWO, ONE, TWO, ONE)], folder)
    keys = [(index, 0) for index in range(len(data.train))]
    plain = collate(data.train, keys)
    for loader in (Bucketed(multiple=1), Packed()):
        part = loader.collate(data.train, keys)
        assert sorted(words(part)) == sorted(words(plain))
        assert part.targets.numel() < plain.targets.numel()
    problem = Auto().pose(TRANSFORMER, data.spec)
    lengths = [data.train.length(*key) for key in keys]  # pyright: ignore[reportAttributeAccessIssue]
    assert problem.num_tokens(plain).item() == sum(lengths)


def words(part: Part) -> list[int]:
    return part.targets[part.targets != IGNORE].tolist()


# Refusals


def refusal(rows: list[dict[str, Any]], folder: Path, **fields: Any) -> str:
    with pytest.raises(BadInput) as told:
        opened(rows, folder, **fields)
    return str(told.value)


def test_a_template_that_changes_messages_is_refused_unless_nothing_follows(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "forgetful", FORGETFUL)
    assert "in row 0 the chat template changes a message when others follow it" in refusal(
        [{"messages": TWO}] * 4, folder
    )


def test_what_a_template_refuses_is_told_with_its_row(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "strict", STRICT)
    rows = [{"messages": ONE}] * 3 + [{"messages": [said("system", "x"), *ONE]}]
    assert "in row 3 the chat template refuses it (System role not supported)" in refusal(rows, folder)


def test_a_tokenizer_without_a_template_is_refused_for_messages(tmp_path: Path) -> None:
    folder = save_chat_tokenizer(tmp_path / "dumb", None)
    for fields in ({}, {"tokenizer": "bytes"}):
        assert "must be one with a chat template" in refusal([{"messages": ONE}] * 4, folder, **fields)


def test_other_keys_and_roles_are_mapped(folder: Path) -> None:
    """ShareGPT's, and any that are named."""

    def renamed(role: str, content: str, **roles: str) -> list[dict[str, str]]:
        return [{role: roles.get(each["role"], each["role"]), content: each["content"]} for each in TWO]

    wanted = predicted(opened([{"messages": TWO}] * 4, folder).train, folder)
    for sharegpt in (renamed("from", "value", user="human", assistant="gpt"), renamed("from", "value")):
        assert predicted(opened([{"conversations": sharegpt}] * 4, folder).train, folder) == wanted
        assert predicted(opened([{"messages": sharegpt}] * 4, folder).train, folder) == wanted
    rows = [{"messages": renamed("who", "said", assistant="Bot")}] * 4
    fields: dict[str, Any] = {"role": "who", "content": "said", "roles": {"Bot": "assistant"}}
    assert predicted(opened(rows, folder, **fields).train, folder) == wanted
    assert "in row 0 is no list of messages, each with a who and a text" in refusal(
        rows, folder, role="who", content="text"
    )
    with pytest.raises(BadInput, match=r"data\.content=null: must be given with data\.role"):
        Chat("x", role="who")


@pytest.mark.parametrize("messages", ["hi", [], [{"from": "user", "text": "hi"}], [{"role": "user", "text": "hi"}]])
def test_what_is_no_conversation_is_refused(folder: Path, messages: Any) -> None:
    rows = [{"messages": messages}] * 4
    assert "in row 0 is no list of messages, each with a role and a content" in refusal(rows, folder)


def test_columns_that_are_not_there_are_named(folder: Path) -> None:
    rows = [{"chat": ONE}] * 4
    assert "must be a data set with a column messages, or prompt and completion" in refusal(rows, folder)
    assert "data.messages='talk': must be one of the columns: chat" in refusal(rows, folder, messages="talk")
    assert predicted(opened(rows, folder, messages="chat").train, folder)[0] == "is quick <end>"
    with pytest.raises(BadInput, match=r"data\.completion=null: must be given with data\.prompt"):
        Chat("x", prompt="question")
    with pytest.raises(BadInput, match=r"data\.messages='chat': must be null"):
        Chat("x", prompt="question", completion="answer", messages="chat")


def test_columns_of_numbers_are_refused_by_their_name(folder: Path) -> None:
    said = refusal([{"prompt": "2+2=", "completion": 4}] * 4, folder, tokenizer="bytes")
    assert said.startswith("data.completion='completion': must be a column of texts or of lists of messages; it is Val")
    assert refusal([{"messages": 4}] * 4, folder).startswith("data.messages='messages': must be a column of texts or")


def test_data_without_any_answer_are_refused(folder: Path) -> None:
    assert "must be a data set with answers to learn" in refusal([{"messages": ONE[:1]}] * 4, folder)


def test_the_kind_of_model_is_checked(image_model, token_model, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"data='chat': must be a source of images"):
        resolve_source(Chat("x"), image_model())
    source: Any = resolve_source(Chat("x"), token_model(text_rules=TextRules(pad_id=3)))
    assert (source.source.sequence_length, source.rules.pad_id) == (32, 3)
