"""Folders of others name code that isn't run unasked; a run of the user's own goes on without a question."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import HydraException

from lowvram.cli.initial import with_transformed
from lowvram.cli.resume import with_resumed
from lowvram.config.code_names import code_in
from lowvram.config.errors import BadInput
from lowvram.config.words import typed_value
from lowvram.results import row as rows
from lowvram.runs.hydra_notes import as_yaml, own_words_of
from lowvram.runs.own_runs import signed, user_key
from tests.calls import TINY, Outcome

# Words that name code, and the name.
NAMING = {
    "data.target=subprocess.getoutput": "subprocess.getoutput",
    "+data.target=subprocess.getoutput": "subprocess.getoutput",
    "++model.target='os.system'": "os.system",
    "task.target=a.b": "a.b",
    "optimizer.target=a.b": "a.b",
    "callbacks=[a.B,c.D]": "a.B, c.D",
    "eval.metrics=[a.b]": "a.b",
    "eval={metrics:[a.b]}": "a.b",
    "eval=${data.args}": "${data.args}",
    "model._target_=os.system": "os.system",
    "model.args={inner:{_target_:os.system}}": "os.system",
    "model.target=${oc.env:HOME}": "${oc.env:HOME}",
    "model.target=a.b,c.d": "a.b,c.d",
    "hydra.callbacks.x={_target_:a.B}": "{_target_:a.B}",
    "hydra/launcher=basic": "basic",
    "+hydra.job.env_set={LD_PRELOAD:x}": "{LD_PRELOAD:x}",
    "experiment=../../../tmp/evil": "../../../tmp/evil",
    "model=/tmp/evil": "/tmp/evil",
}
PLAIN = ("seed=3", "model=gpt2", "experiment=lean", "experiment=mine/small", "callbacks=null", "eval.metrics=[]")
PLAIN += ("~callbacks", "model.name=../x", "data.path='/a b'", "data.text=target", "logger.tags=[model.target]")


def made(folder: Path, words: list[str], code: dict[str, list[str]] | None = None) -> Path:
    """The folder of a run with a snapshot; signed if `code` is given."""
    (folder / "snapshots").mkdir(parents=True, exist_ok=True)
    (folder / "snapshots" / "step_00000001.0123456789abcdef.pt").write_bytes(b"")
    (folder / ".hydra").mkdir(exist_ok=True)
    text = as_yaml(words)
    (folder / ".hydra" / "overrides.yaml").write_text(text if code is None else signed(words, code) + text)
    return folder


def resumed(words: list[str]) -> list[str]:
    return with_resumed(words, typed_value(words, "resume") or "")


@pytest.fixture(autouse=True)
def own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_what_names_code() -> None:
    assert {
        word: [*code_in([word]).values()] == [value.split(", ")] for word, value in NAMING.items()
    } == dict.fromkeys(NAMING, True)
    assert not code_in(PLAIN)


def test_code_of_a_folder_is_not_run_unasked(tmp_path: Path) -> None:
    """The sentence names it, and says what to type; that helps."""
    for number, (word, name) in enumerate(NAMING.items()):
        folder = made(tmp_path / str(number), ["train.steps=3", word])
        with pytest.raises(BadInput, match="names code to run") as refused:
            resumed([f"resume={folder}"])
        assert name in str(refused.value)
        for typed in (f"trust={folder}", f"trust={folder}/../{number}"):
            assert word in resumed([f"resume={folder}", typed])
        with pytest.raises(BadInput, match="names code to run"):
            resumed([f"resume={folder}", f"trust={tmp_path}"])
        if (key := word.partition("=")[0].lstrip("+")) in ("callbacks", "data.target"):
            assert word not in resumed([f"resume={folder}", f"{key}=mine.Own"])
    made(tmp_path / "plain", [*PLAIN])
    assert resumed([f"resume={tmp_path}/plain"])[: len(PLAIN)] == [*PLAIN]


def test_a_signed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with other words, nor for another user; and a key that others can read signs nothing."""
    words = ["train.steps=3", "model.target=mine.Net"]
    folder = made(tmp_path / "run", words, {"callbacks": ["mine.OfAPreset"]})
    key = tmp_path / "state" / "lowvram" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert resumed([f"resume={folder}"])[:2] == words
    assert own_words_of(folder)[1] == {"callbacks": ["mine.OfAPreset"], "model.target": ["mine.Net"]}
    notes = folder / ".hydra" / "overrides.yaml"
    whole = notes.read_bytes()
    chosen = random.Random(20261127)
    for at in chosen.sample(range(whole.index(b"# code"), len(whole)), 40):
        notes.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            kept = resumed([f"resume={folder}"])[:2]
        except (BadInput, HydraException):
            continue
        assert kept == words or not code_in(kept)
    notes.write_bytes(whole)
    key.chmod(0o640)
    with pytest.raises(BadInput, match=r"model.target: mine.Net"):
        resumed([f"resume={folder}"])
    assert signed(words, {}) == ""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(BadInput, match=r"model.target: mine.Net"):
        resumed([f"resume={folder}"])


def test_no_key_without_a_place_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert user_key(is_new_allowed=True) is None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "lowvram").mkdir()
    os.mkfifo(tmp_path / "lowvram" / "key")
    assert user_key(is_new_allowed=True) is None


def test_words_of_a_folder_are_overrides(tmp_path: Path) -> None:
    """No flags of Hydra, such as the one that reads a pickle; no aliases, and nothing nested."""
    laughs = "".join(f"- &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 'lol'}]\n" for n in range(12))
    deep = "[" * 5000
    for text in (
        "- --experimental-rerun=x\n",
        "- -m\n",
        "- ''\n",
        "a: b\n",
        "- [x]\n",
        "- &a x=1\n- *a\n",
        laughs,
        deep,
    ):
        folder = made(tmp_path / "run", [])
        (folder / ".hydra" / "overrides.yaml").write_text(text)
        with pytest.raises(BadInput, match=r"which says what was typed, can be read"):
            resumed([f"resume={folder}"])


def test_data_of_a_pruned_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row names the data, which may be code of others."""
    monkeypatch.setattr("lowvram.cli.initial.sizes_in", lambda *_: [])
    config = {"seed": 0, "train": {"batch_size": 8}, "task": {}, "loader": {}, "accum": {}}
    config["data"] = {"target": "subprocess.getoutput", "args": {"cmd": "id"}}
    row = rows.merge(
        rows.empty_row(), {"config": config, "choices": dict.fromkeys(("task", "loader", "accum"), "auto")}
    )
    row["choices"]["data"] = "external"
    folder = made(tmp_path / "run", [])
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"data": {}, "model": {}}))
    monkeypatch.setattr(rows, "read", lambda _: row)
    words = ["mode=prune", f"prune.run={folder}"]
    with pytest.raises(BadInput, match=r"prune\.run=.*names code to run \(data\.target: subprocess\.getoutput\)"):
        with_transformed(words)
    assert len(with_transformed([*words, f"trust={folder}"])) > len(words)
    assert "data.target=x.y" in with_transformed([*words, "data.target=x.y"])
    made(folder, ["seed=1"], {"data.target": ["subprocess.getoutput"]})  # named in a preset, but signed
    assert len(with_transformed(words)) > len(words)


def test_a_run_with_code_goes_on_here_alone(
    call: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\nclass Told:\n    pass\n", encoding="utf-8"
    )
    words = (*TINY, "train.steps=3", "snapshot.every_steps=1", "callbacks=[told.Told]", "hydra.run.dir=run")
    assert call(*words, "name=term@1").code == 75
    (tmp_path / "imported").unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.delitem(__import__("sys").modules, "told")
    sentence = call("resume=run", "name=null").sentence
    assert "names code to run (callbacks: told.Told)" in sentence
    assert "or trust=" in sentence
    assert not (tmp_path / "imported").exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    stopped = call("resume=run", "name=term@1")
    assert stopped.code == 75, stopped.said()
    resumed = call(*stopped.command("continue with"), "name=null")
    assert resumed.code == 0, resumed.said()
