"""mode=prune and model.init as they are typed: what they take from a run's folder, and commands that they print."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowvram.cli.initial import as_hydra, with_initial, with_transformed
from lowvram.cli.linked_points import linked
from lowvram.config.errors import BadInput
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.adapter import NoAdapter
from lowvram.loops.export.folder import export
from lowvram.loops.export.plain import Origin
from lowvram.models.layout import weights_in
from lowvram.models.transformer import TransformerConfig
from lowvram.results import row as rows
from lowvram.results.terminal import hydra_quoted
from tests.calls import TINY, TINY_RESNET, Outcome, read_row
from tests.hugging import tiny
from tests.tiers import first_of

Call = Callable[..., Outcome]
CASES = {"transformer": TINY, "resnet": TINY_RESNET}
PRUNE = ("mode=prune", "prune.run=outputs/run", "prune.round_to=2", "logger=none", "hydra.run.dir=outputs/pruned")


WORDS = tuple(word for word in TINY if not word.startswith("model"))


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The folder of a run, with an exported model and nothing else."""
    config, spec = TransformerConfig(num_layers=1, width=32, num_heads=2), DataSpec(Modality.TOKENS, 256, (16,))
    folder = tmp_path / "outputs" / "run"
    folder.mkdir(parents=True)
    export(folder / "model", config.make(spec), Origin(config, spec, NoAdapter(), 0), merge=True)
    return folder


def printed(outcome: Outcome, before: str) -> list[str]:
    """The words of the command that was printed after a text, without the program."""
    (line,) = [line for line in outcome.out.splitlines() if line.startswith(before)]
    words = shlex.split(line.removeprefix(before))
    return words[next(index for index, word in enumerate(words) if "=" in word) :]


@pytest.mark.parametrize("name", first_of(list(CASES)))
def test_a_run_is_pruned_and_trains_on(call: Call, tmp_path: Path, name: str) -> None:
    assert call(*CASES[name], "seed=3", "optimizer=sgd", "hydra.run.dir=outputs/run").code == 0
    outputs = tmp_path / "outputs"
    before = {path: path.read_bytes() for path in (outputs / "run").rglob("*") if path.is_file()}
    pruned = call(*PRUNE, "prune.importance=wanda")
    assert pruned.code == 0, pruned.said()
    row, run = read_row(outputs / "pruned"), read_row(outputs / "run")
    assert call(*PRUNE[:2], "resume=outputs/run").sentence.startswith("mode='prune': must be train")
    assert {path: path.read_bytes() for path in (outputs / "run").rglob("*") if path.is_file()} == before
    assert row["pruning"]["loss_before"] == pytest.approx(run["loss"]["eval"], rel=1e-6)
    assert row["pruning"]["parameters_after"] < row["pruning"]["parameters_before"] == run["model"]["parameters"]
    assert row["config"]["seed"] == 3
    assert row["plan"] is None
    assert row["choices"]["model"] == run["choices"]["model"]

    words = printed(pruned, "train on with: ")
    assert "optimizer=sgd" in words
    on = call(*words, "hydra.run.dir=outputs/on")
    assert on.code == 0, on.said()
    ours = read_row(outputs / "on")
    assert ours["model"]["parameters"] == row["pruning"]["parameters_after"]
    assert ours["choices"]["optimizer"] == "sgd"
    assert ours["choices"]["data"] == "synthetic"


@pytest.mark.slow  # tests/compress/test_prune_hf.py prunes without processes, and below are the words
def test_a_model_of_transformers_is_pruned_and_trains_on(call: Call, tmp_path: Path) -> None:
    words = ("model=hf", *WORDS)
    trained = call(*words, f"model.name={tiny('llama:grouped')}", "model.dropout=null", "hydra.run.dir=outputs/run")
    assert trained.code == 0, trained.said()
    run = tmp_path / "outputs" / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    pruned = call(*PRUNE)
    assert pruned.code == 0, pruned.said()
    assert "pruned by magnitude: num_attention_heads=2 num_key_value_heads=1 intermediate_size=24" in pruned.out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    row = read_row(tmp_path / "outputs" / "pruned")
    assert row["pruning"]["loss_before"] == pytest.approx(read_row(run)["loss"]["eval"], rel=1e-6)

    typed = printed(pruned, "train on with: ")
    assert "model.init=outputs/pruned/model" in typed
    measured = call(*typed, "mode=measure", "hydra.run.dir=outputs/measured")
    planned = call(*WORDS, "model=hf", f"model.name={tmp_path}/outputs/pruned/model", "mode=plan", "plan.device=cpu")
    assert (measured.code, planned.code) == (0, 0), measured.said() + planned.said()
    figures = read_row(tmp_path / "outputs" / "measured")
    assert figures["config"]["model"]["dropout"] is None  # as in the run before
    assert figures["model"]["parameters"] == row["pruning"]["parameters_after"]
    assert planned.row["plan"]["allocated_bytes"] == figures["memory"]["peak_bytes"]


def test_a_grown_model_is_planned(call: Call, exported: Path, tmp_path: Path) -> None:
    grown = call("mode=grow", "grow.run=outputs/run", *WORDS, "logger=none", "hydra.run.dir=outputs/grown")
    assert grown.code == 0, grown.said()
    assert "grown by stack: model.num_layers=2" in grown.out
    row = read_row(tmp_path / "outputs" / "grown")
    assert row["growing"]["parameters_after"] > row["growing"]["parameters_before"]
    words = printed(grown, "train on with: ")
    assert "model.init=outputs/grown/model" in words
    assert not [word for word in words if word.startswith(("grow", "mode="))]
    planned = call(*words, "mode=plan", "plan.device=cpu")
    assert planned.row["model"]["parameters"] == row["growing"]["parameters_after"]


@pytest.mark.slow  # tests/models/test_widths.py compares them without processes
def test_the_pruned_model_is_planned_as_it_is_measured(call: Call, exported: Path, tmp_path: Path) -> None:
    assert call(*PRUNE, *WORDS).code == 0
    words = (*WORDS, "model.init=outputs/pruned")
    measured = call(*words, "mode=measure", "hydra.run.dir=outputs/measured")
    planned = call(*words, "mode=plan", "plan.device=cpu", "hydra.run.dir=outputs/planned")
    assert (measured.code, planned.code) == (0, 0), measured.said() + planned.said()
    plan, memory = planned.row["plan"], read_row(tmp_path / "outputs" / "measured")["memory"]
    assert plan["allocated_bytes"] == memory["peak_bytes"]


@pytest.mark.slow  # `test_a_resumed_run_gets_the_same_words` is quicker
def test_an_interrupted_run_goes_on(call: Call, exported: Path, tmp_path: Path) -> None:
    words = (*WORDS, "model.init=outputs/run")
    assert call(*words, "hydra.run.dir=outputs/whole").code == 0
    assert call(*words, "hydra.run.dir=outputs/cut", "name=term@2", "snapshot.every_steps=1").code == 75
    resumed = call("resume=outputs/cut", "name=null")
    assert resumed.code == 0, resumed.said()
    ours, theirs = (read_row(tmp_path / "outputs" / folder) for folder in ("cut", "whole"))
    assert ours["loss"] == theirs["loss"]
    shutil.rmtree(exported)
    gone = call("resume=outputs/cut", "name=null", "train.steps=5").sentence
    assert "outputs/run': must be the folder of a finished run, or of an exported model" in gone


def test_what_can_not_be_pruned_is_refused_in_a_sentence(call: Call, exported: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    no_run = "prune.run='empty': must be the folder of a finished run, or of an exported model: it holds no trained"
    assert call("mode=prune", "prune.run=empty").sentence.startswith(no_run)
    assert call("mode=prune", *WORDS).sentence.startswith("prune.run=null: must be the folder of a finished run")
    knobs = call(*PRUNE, *WORDS, "precision=bf16_pure", "sparsity=set")
    assert knobs.sentence.endswith(
        "mode=prune takes the model as its file has it, so it needs precision=fp32 sparsity=none"
    )
    assert call(*PRUNE, *WORDS, "export.format=int8").sentence.startswith("export.format='int8': must be safetensors")
    ratio = call(*PRUNE, "prune.ratio=1")
    assert ratio.sentence.startswith("prune.ratio=1.0: must be at least 0 and less than 1")
    assert "magnitude" in call(*PRUNE, "prune.importance=random").sentence
    weights = exported / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "model.safetensors is damaged" in call(*PRUNE).sentence
    assert not (tmp_path / "outputs" / "pruned").exists()


@pytest.mark.slow
def test_data_that_are_gone_are_named(call: Call, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 200)
    data = ("data=text", f"data.path={text}", "data.sequence_length=16")
    small = [word for word in TINY if not word.startswith("data")]
    trained = call(*small, *data, "hydra.run.dir=outputs/run")
    assert trained.code == 0, trained.said()
    text.unlink()
    assert "must be an existing file or folder" in call(*PRUNE).sentence


def test_other_sizes_than_those_of_the_weights_are_refused(call: Call, exported: Path) -> None:
    other = call(*WORDS, "model.init=outputs/run", "model.mlp_width=48").sentence
    assert "outputs/run': must be the folder of a model of these sizes: blocks.0.mlp" in other
    assert call("model.init=nowhere").sentence.startswith("model.init='nowhere': must be the folder of a finished run")


# Without processes


def described(folder: Path, **model: Any) -> Path:
    """A run's folder with an exported model, of which only the description matters."""
    (folder / "model").mkdir(parents=True)
    about = {"_target_": "lowvram.models.transformer.TransformerConfig", "num_heads": 2, "mlp_width": 24, **model}
    (folder / "model" / "config.json").write_text(json.dumps({"model": about, "data": {}}))
    (folder / "model" / "files.json").write_text('{"files": {}, "before": null}')
    return folder


def test_what_was_typed_wins_over_the_folder(tmp_path: Path) -> None:
    sizes = {"positions": "learned", "vocab_size": None, "tied_embeddings": True, "dropout": 0.1}
    folder = described(tmp_path / "run", **sizes, init="elsewhere")
    typed = [f"model.init={folder}", "model.dropout=0.5", "precision=bf16"]
    words = with_initial(typed)
    assert words[-3:] == [*typed[1:], typed[0]]
    added = words[:-3]
    assert added[0] == "model=transformer"
    assert {"model.mlp_width=24", "model.positions=learned", "model.vocab_size=null"} < set(added)
    assert not {"model.dropout=0.1", "model.init=elsewhere"} & set(added)
    assert with_initial(["model=gpt2", *typed])[0] != "model=transformer"
    assert "model.num_heads=2" in with_initial([*typed, "model.num_heads=2"])


@pytest.mark.parametrize("word", ["model.num_heads=1", "model.num_layers=1", "model.head_width=8"])
def test_what_would_make_another_model_of_the_same_weights_is_refused(word: str, tmp_path: Path) -> None:
    folder = described(tmp_path / "run", num_layers=2, head_width=None)
    with pytest.raises(BadInput, match=rf"{word}: must be (2|null), or left out, with model.init="):
        with_initial([f"model.init={folder}", word])


def test_a_resumed_run_gets_the_same_words(exported: Path) -> None:
    words = with_initial([f"model.init={exported}", "precision=bf16"])
    assert with_initial(words) == words


def test_words_stay_as_they_are_without_a_folder(tmp_path: Path) -> None:
    run = described(tmp_path / "run")
    for words in ([], ["model.init=null"], ["mode=train", f"prune.run={run}"]):
        assert with_initial(with_transformed(words)) == words


def of_transformers(folder: Path, weights: str = "model.safetensors") -> Path:
    """A folder in the layout of transformers, of which only the names of its files matter."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (folder / weights).touch()
    return folder


def test_a_folder_of_transformers_is_named(tmp_path: Path) -> None:
    folder = of_transformers(tmp_path / "run" / "model")
    named = ["model=hf", f"model.name={hydra_quoted(str(folder))}"]
    for key, mode in (("model.init", []), ("prune.run", ["mode=prune"]), ("grow.run", ["mode=grow"])):
        words = [*mode, f"{key}={tmp_path / 'run'}", "optimizer.lr=1e-3"]
        assert with_initial(with_transformed(words))[:2] == named
        assert with_initial(with_transformed(["model=hf", *words]))[:1] == named[1:]
    words = with_initial([f"model.init={folder}"])
    assert with_initial(words) == words == named  # a resumed run
    point = ["model=hf", "model.name=elsewhere", "model.args={hidden_size:8}", "model.init=point:0"]
    assert linked(point, {0: tmp_path / "run"}) == [named[1], "model=hf"]
    used = {"name": "elsewhere", "head": "causal_lm", "dropout": 0.1, "blocks": None, "args": {"hidden_size": 8}}
    config = {"config": {"model": used}, "choices": {"model": "hf"}}
    rows.write(tmp_path / "run", rows.merge(rows.empty_row(), {"name": "run", **config}))
    as_before = ["model.head=causal_lm", "model.dropout=0.1", "model.blocks=null"]
    assert with_initial([f"model.init={folder}"]) == [*named, *as_before]
    assert "model.dropout=0.1" not in with_initial([f"model.init={folder}", "model.dropout=0"])


def test_folders_of_transformers_that_can_not_be_used_are_refused(tmp_path: Path) -> None:
    folder = of_transformers(tmp_path / "model")
    with pytest.raises(BadInput, match=r"^model='gpt2': must be hf, or left out with model\.init="):
        with_initial(["model=gpt2", f"model.init={folder}"])
    with pytest.raises(BadInput, match=r"^model\.name='other': must be left out with prune\.run="):
        with_transformed(["mode=prune", "model.name=other", f"prune.run={folder}"])
    with pytest.raises(BadInput, match=r"^model\.weights='random': must be auto, or left out with prune\.run="):
        with_transformed(["mode=prune", "model.weights=random", f"prune.run={folder}"])
    without = of_transformers(tmp_path / "pickles", "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"^prune\.run=.*: must be the folder of a trained model: it has no \*\.safeten"):
        with_transformed(["mode=prune", f"prune.run={without}"])
    (folder / "files.json").write_text('{"files": {"model.safetensors": {"sha256": "", "bytes": 1}}, "before": null}')
    with pytest.raises(BadInput, match=r"damaged"):
        with_initial([f"model.init={folder}"])


def test_models_of_others_and_adapters_are_refused(tmp_path: Path) -> None:
    run = described(tmp_path / "run", _target_="lowvram.models.external.ExternalConfig")
    for key in ("model.init", "prune.run"):
        with pytest.raises(BadInput, match=rf"^{key}=.*: must be the folder of a trained model of lowvram's own"):
            with_initial(with_transformed(["mode=prune", f"{key}={run}"]))
    (run / "model" / "config.json").rename(run / "model" / "lowvram.json")
    with pytest.raises(BadInput, match=r"^prune\.run=.* it holds an adapter alone: train with export\.merge=true"):
        with_transformed(["mode=prune", f"prune.run={run}"])


def test_exports_in_other_formats_are_refused(exported: Path) -> None:
    (exported / "model" / "export.json").write_text('{"format": "int8"}')
    sentence = "of a model in safetensors: it holds an export of format int8; write its run again with resume="
    for key in ("model.init", "prune.run"):
        with pytest.raises(BadInput, match=rf"^{key}=.*{sentence}RUN export\.format=safetensors$"):
            with_initial(with_transformed(["mode=prune", f"{key}={exported}"]))
    rows.write(exported, {**rows.empty_row(), "name": "run"})
    with pytest.raises(BadInput, match=rf"{sentence}\S+/outputs/run export\.format=safetensors$"):
        with_initial([f"model.init={exported / 'model'}"])
    with pytest.raises(BadInput, match=rf"^model\.init=.*{sentence}\S+/outputs/run export"):  # not typed: of a preset
        weights_in(str(exported))


VALUES = (None, True, 3, 1e-5, "rotary", "null", "3", 'a "b", c', "~/x y", [1, "a"], {"k": [None]})


def test_several_folders_are_refused(tmp_path: Path) -> None:
    for key in ("model.init", "prune.run"):
        with pytest.raises(BadInput, match=rf"^{key}='one,two': must be one folder: type a command for each"):
            with_initial(with_transformed(["-m", "mode=prune", f"{key}=one,two"]))


@pytest.mark.parametrize("value", VALUES, ids=map(repr, VALUES))
def test_values_are_read_back_as_they_were(value: Any) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"key={as_hydra(value)}").value() == value
