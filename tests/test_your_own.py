"""Data, tokenizers and losses of one's own, from the command line to the row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from lowvram.config.errors import BadInput
from lowvram.data.spec import DataSpec, Modality
from lowvram.loops.export.folder import load
from lowvram.models.hf import HfConfig
from tests.calls import Outcome, read_row
from tests.hugging import tiny, with_weights
from tests.wordy import SENTENCES, save_chat_tokenizer, save_tokenizer

Call = Callable[..., Outcome]
QUICK = ("train.batch_size=4", "logger=none", "data.eval_samples=8")


def test_data_model_and_loss_of_ones_own(call: Call) -> None:
    data = ("data=external", "data.target=tests.yours.curve", "data.args={num_samples:32}")
    loss = ("task=external", "task.target=tests.yours.Regression", "task.args={factor:0.5}")
    run = call(
        "model=external", "model.target=tests.yours.line", *data, *loss, *QUICK, "train.steps=40", "optimizer.lr=0.1"
    )
    assert run.code == 0, run.said()
    assert run.row["loss"]["eval"] < run.row["loss"]["first"] / 10
    assert run.row["eval"]["accuracy"] is None


def test_several_targets_and_heads(call: Call) -> None:
    data = ("data=external", "data.target=tests.yours.two_targets", "model=external", "task=external")
    names = ("model.target=tests.yours.TwoHeads", "task.target=tests.yours.TwoLosses", "accum=x2")
    run = call(*data, *names, *QUICK, "train.steps=30", "optimizer.lr=0.05")
    assert run.code == 0, run.said()
    assert run.row["loss"]["eval"] < run.row["loss"]["first"] / 2


def test_epochs_instead_of_steps(call: Call) -> None:
    data = ("data=external", "data.target=tests.yours.curve", "data.args={num_samples:30}", "model=external")
    words = (*data, "model.target=tests.yours.line", "task=external", "task.target=torch.nn.MSELoss", *QUICK)
    run = call(*words, "train.epochs=1.5", "schedule=linear")
    assert run.code == 0, run.said()
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == pytest.approx([0.001 * (1 - step / 12) for step in range(12)])  # 45 samples, 4 at a time


@pytest.mark.slow
def test_an_endless_data_set_is_resumed_where_it_was(call: Call) -> None:
    words = ("data=external", "data.target=tests.yours.endless", "model=external", "model.target=tests.yours.line")
    words += ("task=external", "task.target=torch.nn.MSELoss", *QUICK)
    whole = call(*words, "train.steps=6", "hydra.run.dir=whole")
    assert whole.code == 0, whole.said()
    assert call(*words, "train.steps=3", "hydra.run.dir=parts").code == 0
    resumed = call("resume=parts", "train.steps=6")
    assert resumed.code == 0, resumed.said()
    losses = [read_row(run.cwd / name)["loss"] for run, name in ((whole, "whole"), (resumed, "parts"))]
    assert losses[0] == losses[1]


def test_a_mistake_that_shows_after_some_steps_loses_nothing(call: Call) -> None:
    words = ("data=external", "data.target=tests.yours.curve", "model=external", "model.target=tests.yours.line")
    late = call(*words, "task=external", "task.target=tests.yours.LateMistake", *QUICK, "snapshot.every_steps=1")
    assert late.code == 1, late.said()
    assert late.row["status"] == "error"
    assert "must be one whose criterion returns one number" in late.row["reason"]
    folder = late.folder
    lines = (folder / "metrics.jsonl").read_text()
    again = call(f"resume={folder}", "task.target=tests.yours.Mean")
    assert again.code == 3, again.said()
    assert (folder / "metrics.jsonl").read_text() == lines
    assert read_row(folder)["status"] == "error"
    mended = call(f"resume={folder}", "task.target=tests.yours.Regression", "train.steps=5")
    assert mended.code == 0, mended.said()


def test_a_loss_of_torch(call: Call) -> None:
    data = ("data=external", "data.target=tests.yours.curve", "model=external", "model.target=tests.yours.line")
    run = call(*data, "task=external", "task.target=torch.nn.MSELoss", *QUICK, "train.steps=40", "optimizer.lr=0.1")
    assert run.code == 0, run.said()
    assert run.row["loss"]["eval"] < run.row["loss"]["first"] / 10


@pytest.mark.slow
def test_labelled_texts_in_a_file_with_the_models_own_tokenizer(call: Call, tmp_path: Path) -> None:
    folder = save_tokenizer(Path(shutil.copytree(tiny("bert"), tmp_path / "bert")))
    rows = [{"said": sentence, "about": sentence.split()[-1]} for sentence in SENTENCES for _ in range(6)]
    Dataset.from_list(rows).to_csv(str(tmp_path / "a.csv"))
    data = ("data=hub", f"data.name={tmp_path}/a.csv", "data.text=said", "data.label=about", "data.sequence_length=12")
    run = call("model=hf", f"model.name={folder}", *data, *QUICK, "train.steps=40", "optimizer.lr=0.01")
    assert run.code == 0, run.said()
    assert run.row["eval"]["accuracy"] > 0.6
    pace = run.row["throughput"]
    assert 5 < pace["tokens_per_s"] / pace["samples_per_s"] < 11  # the longest is cut to 11, with its marks


CHATML = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.mark.slow
def test_conversations_are_learnt_and_answered(call: Call, tmp_path: Path) -> None:
    folder = save_chat_tokenizer(Path(shutil.copytree(with_weights("llama"), tmp_path / "llama")), CHATML)
    answers = {"the fox": "is quick", "the dog": "sleeps"}
    rows = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers.items()
        for _ in range(10)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = ("data=chat", f"data.name={tmp_path}/chats.jsonl", "data.sequence_length=16", "loader=packed")
    run = call("model=hf", f"model.name={folder}", *data, *QUICK, "train.steps=40", "optimizer.lr=0.01")
    assert run.code == 0, run.said()
    assert run.row["eval"]["accuracy"] == 1
    model, tokenizer = load(run.folder / "model").eval(), AutoTokenizer.from_pretrained(run.folder / "model")
    for question, answer in answers.items():
        messages = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        said = model.generate(**asked, max_new_tokens=4, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert tokenizer.decode(said[0, asked["input_ids"].shape[1] :]) == f"{answer} <end>"


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    model = HfConfig(tiny("gpt2"), args={"vocab_size": 10})
    with pytest.raises(
        BadInput, match=r"vocabulary=15: must be at most 10, .* choose its own with data\.tokenizer=auto"
    ):
        model.config_for(DataSpec(Modality.TOKENS, 15, (8,)))
