"""Secrets: what is one, and that nothing that a run leaves has them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lowvram.config import secret
from lowvram.config.errors import BadInput
from lowvram.config.secret import REFUSED, learn, text_without_secrets, without_secrets, words_without_secrets
from lowvram.loops.export.folder import load
from lowvram.results.row import empty_row, merge, write
from tests.calls import TINY, Outcome, read_row
from tests.confided import Model

pytestmark = pytest.mark.sampled(3)

Call = Callable[..., Outcome]
SECRET_KEYS = [
    "key", "api_key", "apiKey", "apikey", "WANDB_API_KEY", "hf_token", "hf-token", "accessToken", "password",
    "client_secret", "token_file", "credentials", "db_passwd", "db_pwd", "Authorization", "secret_value",
    "dbpassword", "PGPASSWORD", "SSHPASS", "userpass", "mytoken", "accountkey", "rootpw", "jwt", "session_cookie",
]  # fmt: skip
EVERYDAY_KEYS = [
    "num_tokens", "max_tokens", "tokenizer", "tokens_per_s", "token_ids", "pad_token", "eos_token_id", "keyboard",
    "keep", "sort_key", "num_key_value_heads", "sequence_length", "pwd", "authors", "monkey", "", "compass", "bypass",
    "hotkey", "padtoken", "secretary",
]  # fmt: skip
SECRET_TEXTS = {
    "https://me:hunter2@host/x": "https://me:<refused>@host/x",
    "redis://:hunt@er2@host": "redis://:<refused>@host",
    "https://hunter2@github.com/x": "https://<refused>@github.com/x",
    "https://s3.host/file?X-Amz-Signature=hunter2&x=1": "https://s3.host/file?X-Amz-Signature=<refused>&x=1",
    "Bearer hunter2": "Bearer <refused>",
    "{'Authorization': 'Bearer hunter2'}": "{'Authorization': <refused>}",
    "Authorization: Basic aHVudGVyMjpodW50ZXIy": "Authorization: <refused> <refused>",
    f"it is hf_{'aB3' * 8}.": "it is <refused>.",
    f"sk-proj-{'aB3' * 8}": REFUSED,
    f"ghp_{'aB3' * 12}": REFUSED,
    f"github_pat_{'aB3' * 12}": REFUSED,
    "AKIAABCDEFGHIJKLMNOP": REFUSED,
    f"local-{'0a' * 20}": REFUSED,
    "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0": REFUSED,
    "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----\nand": "<refused>\nand",
    "login failed: password=hunter2, try again": "login failed: password=<refused>, try again",
    "{'api_key': 'hunter 2', 'width': 3}": "{'api_key': <refused>, 'width': 3}",
    'api_key: "hunter 2" and': "api_key: <refused> and",
}
EVERYDAY_TEXTS = [
    "plan.device=/etc/passwd: must be one of cpu, rtx3060",
    "an unknown key: batch", "wrong password: try again", "must be key=value", "num_tokens=5, max_tokens: 6", "s3://bucket@1/x",
    "task-ababababababababababab", "the bearer of news", "key=64 and token=null", "Basic functionality is missing",
    "password=${oc.env:X}", "https://host/a@b", "a3" * 20, "https://me:${oc.env:PASS}@host",
]  # fmt: skip
WORDS = {
    "+data.api_key=hunter2=x": "+data.api_key=<refused>",
    "model.args={api_key: hunter 2, n: 3, deep: {token: 'hunter, 2'}}": "model.args={api_key: <refused>, n: 3, deep: "
    "{token: <refused>}}",
    "a.args={list: [{credentials: {user: me, pass: hunter2}}, 5]}": "a.args={list: [{credentials: <refused>}, 5]}",
    "api_key=${oc.env:X,hunter2}": "api_key=<refused>",
    "api_key=${oc.env:X}": "api_key=${oc.env:X}",
    "data.args={api_key: ${oc.env:X}, key: 5}": "data.args={api_key: ${oc.env:X}, key: 5}",
    "data.token=x": "data.token=<refused>",
    "data.num_tokens=5": "data.num_tokens=5",
    "train.py": "train.py",
    "key": "key",
}


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    secret.forget()
    yield
    secret.forget()


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_secrets_are_refused_wherever_they_are(tmp_path: Path, key: str) -> None:
    assert words_without_secrets([f"a={{b: 1, {key}: hunter2}}"]) == [f"a={{b: 1, {key}: <refused>}}"]
    config = {"data": {key: "hunter2", "list": [{key: ["hunter2", 5]}], "deep": {key: {"a": "hunter2"}}}}
    write(tmp_path, merge(empty_row(), {"config": config}))
    assert "hunter2" not in (tmp_path / "result.json").read_text()
    assert without_secrets(config)["data"]["list"] == [{key: REFUSED}]
    assert config["data"][key] == "hunter2"


@pytest.mark.parametrize("key", EVERYDAY_KEYS)
def test_everyday_words_are_no_secrets(key: str) -> None:
    assert without_secrets({key: "x"}) == {key: "x"}
    assert words_without_secrets([f"data.{key}=x"]) == [f"data.{key}=x"]


def test_in_yaml_a_secret_ends_where_the_next_key_begins() -> None:
    text = "solve:\n  key: null\n  unit: 1\napi_key: abc def\n  and more\nprecision: fp32\ntokens:\n- one\nlast: 1\n"
    found = text_without_secrets(text, is_config=True)
    assert found.startswith(f"solve:\n  key: null\n  unit: 1\napi_key: {REFUSED}\nprecision: fp32\n")
    assert (
        text_without_secrets("a: {password: |\n  one\n  two\n  }\n", is_config=True) == f"a: {{password: {REFUSED}}}\n"
    )
    text = "say {api_key: hunter2\nhunter3}"  # in brackets a line ends no value
    assert text_without_secrets(text, is_config=True) == f"say {{api_key: {REFUSED}}}"


def test_the_key_that_is_solved_is_no_secret() -> None:
    assert words_without_secrets(["solve.key=data.sequence_length"]) == ["solve.key=data.sequence_length"]
    assert without_secrets({"solve": {"key": "train.batch_size"}}) == {"solve": {"key": "train.batch_size"}}
    assert words_without_secrets(["solve.key=hunter.two"]) == [f"solve.key={REFUSED}"]


def test_what_tells_nobody_anything_stays() -> None:
    values = {"token": None, "use_key": True, "key": 64, "password": "", "api_key": "${oc.env:X}"}
    assert without_secrets(values) == values


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_text_goes_without_what_looks_like_a_secret(text: str) -> None:
    assert text_without_secrets(text) == SECRET_TEXTS[text]
    assert text_without_secrets(SECRET_TEXTS[text]) == SECRET_TEXTS[text]


@pytest.mark.parametrize("text", EVERYDAY_TEXTS)
def test_everyday_texts_stay(text: str) -> None:
    assert text_without_secrets(text) == text


@pytest.mark.parametrize("word", WORDS)
def test_words_of_a_command_line(word: str) -> None:
    assert words_without_secrets([word]) == [WORDS[word]]


def test_what_was_met_under_a_key_is_known_in_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "in the environment")
    odd = "it's 'so'\n"
    learn({"model": {"args": {"api_key": odd, "key": "caption", "url": "https://me:hunter2@host"}}})
    assert text_without_secrets("x hunter2 y") == "x <refused> y"
    assert text_without_secrets(f"ValueError: {odd!r}") in ("ValueError: '<refused>'", 'ValueError: "<refused>"')
    assert text_without_secrets("it is in the environment") == "it is <refused>"
    assert text_without_secrets("the caption") == "the caption"  # a word like others


def test_a_refused_value_is_named_without_what_it_was() -> None:
    said = str(BadInput("model.args", {"api_key": "hunter2", "n": 3}, "else"))
    assert said == "model.args={'api_key': '<refused>', 'n': 3}: must be else"
    assert str(BadInput("logger.api_key", "hunter2", "else")) == "logger.api_key='<refused>': must be else"


@pytest.mark.parametrize("text", ["x", "a:", "key=", "key='", "://", "eyJ", "Bearer ", "token=(", '"', "A B=", "\\'"])
def test_long_texts_take_linear_time(text: str) -> None:
    started = time.process_time()
    text_without_secrets(text * (2**17 // len(text)))
    assert time.process_time() - started < 1


CONFIDED = {"password": "Pl4nted-environment"}
PLANTED = "Pl4nted"  # all secrets of a run begin so


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of a run with secrets in as many places as there are."""
    monkeypatch.setenv("X", "Pl4nted-environment")
    monkeypatch.setenv("WANDB_API_KEY", f"{PLANTED}{'0a' * 17}")
    args = (
        "token: 'Pl4nted token', address: 'https://me:Pl4nted-word@host', "
        "headers: {list: [1, [{authorization: Pl4nted-nested}]]}"
    )
    return [
        *(word for word in TINY if word.startswith(("train.", "measure."))),
        "task=external",
        "task.target=tests.confided.Task",
        "data=external",
        "data.target=tests.confided.data",
        f"data.args={{{args}}}",
        "model=external",
        "model.target=tests.confided.Model",
        "+model.args.api_key=Pl4nted-api_key",
        "+model.args.bearer='Bearer Pl4nted-bearer'",
        "+model.args.from_environment={password: '${oc.env:X}'}",
        "train.steps=4",
        "snapshot.every_steps=1",
        "logger=wandb",
    ]


def leaks(outcome: Outcome) -> dict[str, bytes]:
    """Where a secret is to be found, and what stands around it."""
    texts = {str(file): file.read_bytes() for file in outcome.cwd.rglob("*") if file.is_file()}
    texts |= {"stdout": outcome.out.encode(), "stderr": outcome.err.encode()}
    pattern = re.compile(rb".{,60}%b.{,60}" % PLANTED.encode())
    return {name: match[0] for name, text in texts.items() if (match := pattern.search(text))}


def test_nothing_that_a_run_leaves_has_a_secret(call: Call, words: list[str]) -> None:
    outcome = call(*words)
    assert outcome.row["status"] == "ok", outcome.said()
    assert "read with <refused>" in outcome.out
    assert "native: <refused>" in (outcome.folder / "native.log").read_text()
    assert json.loads((outcome.folder / "model" / "config.json").read_text())["model"]["args"]["api_key"] == REFUSED
    assert leaks(outcome) == {}
    names = {"api_key": "Pl4nted-", "bearer": "Bearer Pl4nted-bearer", "from_environment": CONFIDED}
    with pytest.raises(BadInput, match=r"^model\.args=.*: load\(folder, model=functools.partial\(Model, api_key=…"):
        load(outcome.folder / "model", trust={"tests.confided.Model"})
    assert isinstance(load(outcome.folder / "model", model=partial(Model, **names)), Model)


@pytest.mark.slow
def test_nothing_that_a_sweep_leaves_has_a_secret(call: Call, words: list[str]) -> None:
    """Neither the message of the user's own model."""
    outcome = call("-m", *words, "+model.args.fails=true", "++model.args.api_key=Pl4nted-1,Pl4nted-2")
    rows = [read_row(folder) for folder in outcome.folders]
    assert [row["reason"] for row in rows] == ["RuntimeError: the service doesn't know '<refused>'"] * 2, outcome.said()
    assert leaks(outcome) == {}


def test_a_refused_command_does_not_say_a_secret(call: Call, words: list[str]) -> None:
    for more in ("+model.args.other=5", "+logger.api_key=Pl4nted", "model.args.api_key=Pl4nted:, b"):
        refused = call(*words, more)
        assert refused.code == 3
        assert "<refused>" in refused.err
        assert leaks(refused) == {}


def test_a_run_goes_on_with_secrets_that_are_typed_again(call: Call, words: list[str]) -> None:
    """What it takes from the environment it finds there again."""
    begun = call(*words, "name=term@2")
    assert begun.code == 75, begun.said()
    first = call("resume=last", "name=null").sentence
    assert first.startswith("data.args='<refused>': must be typed again beside resume=")
    again = [word for word in words if PLANTED in word]
    assert len(again) == 3
    ended = call("resume=last", "name=null", *again)
    assert ended.row["status"] == "ok", ended.said()
    assert "other values" not in ended.out
    assert leaks(ended) == {}
