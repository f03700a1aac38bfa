"""model=hf: models of the library transformers."""

from __future__ import annotations

import ast
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowvram
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.probes.draws import FirstDraw
from lowvram.data.spec import DataSpec, Modality
from lowvram.data.tokenizer import pretrained
from lowvram.models.hf import Head, HfConfig, Missing, Weights
from lowvram.models.hf_source import transformers
from lowvram.tasks import Auto, Problem
from tests.hugging import CONFIGS, tiny, with_weights
from tests.laboratory import CPU, knobs_of, make_batch
from tests.test_laws_foreign import SPECS

WORDS, TEXTS, IMAGES = (SPECS[each] for each in (Modality.TOKENS, Modality.LABELLED_TOKENS, Modality.IMAGES))


def problem(config: HfConfig) -> Problem:
    return Auto().pose(config, SPECS[config.modality])


def built(config: HfConfig, seed: int = 0) -> Any:
    return assemble(problem(config), knobs_of(), CPU, seed=seed).model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny BERT with weights, as the library saves it."""
    config = HfConfig(tiny("bert")).config()
    config.num_labels = TEXTS.num_classes
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_random_weights_are_the_authors_and_the_seeds(kind: str) -> None:
    config = HfConfig(tiny(kind))
    first, again, other = (built(config, seed).state_dict() for seed in (0, 0, 1))
    torch.manual_seed(0)
    wanted = problem(config).model.make(SPECS[config.modality]).state_dict()
    assert all(torch.equal(first[name], again[name]) and torch.equal(first[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_pretrained_weights_of_a_folder_are_taken(folder: Path) -> None:
    found, wanted = built(HfConfig(str(folder))).state_dict(), weights(folder)
    assert HfConfig(str(folder)).num_classes == TEXTS.num_classes
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_weights_can_be_started_anew(folder: Path) -> None:
    found = built(HfConfig(str(folder), weights=Weights.random)).state_dict()
    name = "bert.embeddings.word_embeddings.weight"
    assert not torch.equal(found[name], weights(folder)[name])


def test_the_loss_is_the_librarys_own(folder: Path) -> None:
    task, batch = problem(HfConfig(str(folder))), make_batch(TEXTS, 4)
    model: Any = assemble(task, knobs_of(), CPU).model
    ours = task.criterion(task.call(model, batch.inputs), batch) / batch.num_targets
    kept = batch.targets >= 0
    inputs = {name: tensor[kept] for name, tensor in batch.inputs.items()}
    theirs = model(**inputs, labels=batch.targets[kept]).loss
    torch.testing.assert_close(ours, theirs)


def test_the_state_at_the_end_of_a_text_is_what_the_library_takes() -> None:
    model: Any = built(HfConfig(tiny("t5")))
    inputs = make_batch(TEXTS, 4).inputs
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs), type(model).forward(model, **inputs).logits)


def test_dropout_is_off_unless_asked_for() -> None:
    assert problem(HfConfig(tiny("bert"))).structure(built(HfConfig(tiny("bert")))).get(FirstDraw()) is None
    config = HfConfig(tiny("bert"), dropout=0.2)
    assert built(config).bert.embeddings.dropout.p == 0.2
    assert HfConfig(tiny("bert"), dropout=None).config().hidden_dropout_prob == 0.1


def test_arguments_change_the_configuration() -> None:
    assert len(built(HfConfig(tiny("bert"), args={"num_hidden_layers": 1})).bert.encoder.layer) == 1


def test_the_description_knows_the_folders_content(folder: Path) -> None:
    before = HfConfig(str(folder)).description
    assert before == HfConfig(str(folder)).description
    assert before != HfConfig(str(folder), args={"num_hidden_layers": 1}).description


# Refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "./nowhere"}, "model.name='./nowhere': must be a folder that exists"),
        ({"args": {"layers": 3}}, "model.args.layers=3: must be removed: this model knows"),
        ({"dropout": 1.0}, "model.dropout=1.0: must be null"),
    ],
)
def test_bad_values_are_reported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as told:
        HfConfig(**{"name": tiny("bert"), **changes})
    assert message in str(told.value)


def test_a_model_of_a_hub_that_is_out_of_reach_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram.compat.hf_offline.is_reachable", lambda: False)
    with pytest.raises(BadInput, match=r"model\.name='nobody/nothing': must be the folder of .*--local-dir"):
        HfConfig("nobody/nothing")


def test_a_folder_that_is_no_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"it has no config\.json"):
        HfConfig(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="must be a model that transformers knows"):
        HfConfig(str(tmp_path))


CODE = "from pathlib import Path; Path({trap!r}).touch()\nfrom transformers import {base}\nclass {name}({base}): pass"


def with_code(folder: Path, trap: Path, **values: Any) -> str:
    """A model of transformers whose config.json asks for code beside it; that code would leave the file `trap`."""
    shutil.copytree(tiny("gpt2"), folder)
    for name, base in (("Config", "GPT2Config"), ("Model", "GPT2LMHeadModel"), ("Tokenizer", "GPT2Tokenizer")):
        (folder / f"{name.lower()}.py").write_text(CODE.format(trap=str(trap), base=base, name=name))
    code: dict[str, Any] = {"AutoConfig": "config.Config", "AutoModelForCausalLM": "model.Model"}
    code["AutoTokenizer"] = ["tokenizer.Tokenizer", None]
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | {"auto_map": code} | values))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": code, "tokenizer_class": "Tokenizer"}))
    return str(folder)


@pytest.fixture
def says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 99))


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "auto_map"),
        ({"model_type": "mine"}, "auto_map"),
        ({"auto_map": {}, "attn_implementation": "somebody/kernels"}, "attn_implementation"),
        ({"auto_map": {}, "_attn_implementation": "somebody/kernels"}, "_attn_implementation"),
        ({"auto_map": {}, "text_config": {"attn_implementation": "a/b"}}, "attn_implementation"),
    ],
)
def test_code_of_a_folder_is_never_run(
    values: dict[str, Any], told: str, tmp_path: Path, says_yes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    where = with_code(tmp_path / "m", tmp_path / "trap", **values)
    with pytest.raises(BadInput, match=rf"^model\.name='{where}': must be .* its own \({told} in its config\.json\)"):
        HfConfig(where)
    assert not (tmp_path / "trap").exists()
    assert capsys.readouterr().out == ""  # nobody was asked


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path, says_yes: None) -> None:
    where = with_code(tmp_path / "m", tmp_path / "trap", model_type="mine")
    with pytest.raises(BadInput, match=r"^data\.tokenizer=.*custom code"):
        pretrained(where, where, None)
    assert not (tmp_path / "trap").exists()


def test_whoever_reads_what_others_have_made_says_that_its_code_is_not_trusted() -> None:
    """In words, each time: the default of these libraries is to ask."""
    root = Path(lowvram.__file__).parents[1]
    for path in [*(root / "lowvram").rglob("*.py"), *(root / "scripts").glob("*.py")]:
        for call in filter(reads_foreign, ast.walk(ast.parse(path.read_text()))):
            assert any(ast.unparse(word) == "trust_remote_code=False" for word in call.keywords), path


def reads_foreign(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"


def test_a_head_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"model\.head='causal_lm': must be a head that transformers has for the kind vit"
    ):
        HfConfig(tiny("vit"), head=Head.causal_lm).make(WORDS)
    shutil.copytree(tiny("bert"), tmp_path / "bert")
    file = tmp_path / "bert" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["BertModel"]}))
    with pytest.raises(BadInput, match=r"model.head='auto': must be one of causal_lm, .*names BertModel"):
        _ = HfConfig(str(tmp_path / "bert")).modality


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match=r"pytorch_model.bin is a pickle, which can run code"):
        built(HfConfig(str(folder), weights=Weights.pretrained))


# Weights that the files lack, or have under other names


def rewritten(folder: Path, change: Any) -> None:
    """Change a folder's weights: names to tensors, to the same."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


WRAPPED = {
    "compiled": lambda name: f"_orig_mod.{name}",
    "parallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "blocks": lambda name: name.replace("layer.1.", "layer.1._orig_mod."),
    "blocks of a parallel one": lambda name: f"module.{name}".replace("layer.1.", "layer.1._orig_mod."),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", WRAPPED)
def test_names_that_a_wrapper_has_changed_are_read(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = weights(folder)
    rewritten(folder, lambda tensors: {WRAPPED[kind](name): tensor for name, tensor in tensors.items()})
    found = built(HfConfig(str(folder))).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert "which a wrapper of torch has added: read without it" in capsys.readouterr().out


def lost(pattern: str) -> Any:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if pattern not in name}


LACKING: dict[str, tuple[Any, str]] = {
    "a layer": (
        lost("layer.1."),
        "bert.encoder.layer.1.attention.output.LayerNorm.bias, .* and 12 more not in its files",
    ),
    "a bias": (lost("layer.2.output.dense.bias"), "bert.encoder.layer.2.output.dense.bias not in its files"),
    "the trained head": (lost("classifier"), "classifier.bias, classifier.weight not in its files"),
    "all names": (lambda tensors: {f"net.{name}": each for name, each in tensors.items()}, "and 53 more not in its"),
    "a shape": (
        lambda tensors: {**tensors, "bert.pooler.dense.bias": torch.ones(3)},
        r"dense.bias: \(3,\) there, \(16,\) here",
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", LACKING)
def test_pretrained_weights_are_never_replaced_by_random_ones_unasked(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, told = LACKING[kind]
    rewritten(folder, change)
    with pytest.raises(BadInput, match=rf"^model.name='{folder}': must be a model whose weights fit .*{told}"):
        built(HfConfig(str(folder)))
    built(HfConfig(str(folder), missing=Missing.allow))
    assert "starts at random: " in capsys.readouterr().out


def test_layers_that_the_weights_do_not_have_are_not_made(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"layer\.3\.attention.*model\.missing=allow"):
        built(HfConfig(str(folder), args={"num_hidden_layers": 4}))


def test_a_new_head_starts_at_random_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The pooler belongs to it: the class that saved the weights has none."""
    config = HfConfig(with_weights("bert:masked"), head=Head.sequence_classification)
    built(config)
    new = "bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, classifier.weight"
    out = capsys.readouterr().out
    assert f"starts at random: {new}; with adapter=lora" in out
    assert "not in this model, so not read: cls.predictions.bias" in out


@pytest.mark.parametrize("others", [["pytorch_model.bin"], ["training_args.bin", "model.gguf"], ["tf_model.h5"]])
def test_weights_in_other_formats_alone_are_refused(others: list[str], folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / others[-1])
    for name in others[:-1]:
        (folder / name).touch()
    with pytest.raises(BadInput, match=rf"must be a folder with \*\.safetensors: {others[-1]} is .*weights=random"):
        HfConfig(str(folder))
    HfConfig(str(folder), weights=Weights.random)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../bert/model.safetensors", "/etc/passwd", 7])
def test_an_index_that_names_anything_else_is_refused(name: object, folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"classifier.bias": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadInput, match=r"index\.json names only files of safetensors beside it: it names"):
        HfConfig(str(folder))


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b"", lambda b: b"\xff" * 8 + b[8:]], ids=str.split("cut empty other")
)
def test_damaged_weights_are_one_sentence(damage: Any, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadInput, match=r"^model\.name=.*: must be a model whose weights fit its configuration: "):
        built(HfConfig(str(folder)))


def quantized(folder: Path, **about: Any) -> HfConfig:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": about}))
    return HfConfig(str(folder))


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_quantized_weights_are_refused(method: str, folder: Path) -> None:
    with pytest.raises(BadInput, match=rf"weights aren't quantized: these are, with {method} .*adapter=qlora"):
        quantized(folder, quant_method=method)


def test_weights_in_fp8_are_read_and_saved_as_fp32(folder: Path, tmp_path: Path) -> None:
    name = "bert.encoder.layer.1.output.dense.weight"
    wanted = weights(folder)[name]
    scale = wanted.abs().max() / 448
    codes = {name: (wanted / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
    rewritten(folder, lambda tensors: tensors | codes)
    config = quantized(folder, quant_method="fp8", weight_block_size=[128, 128])
    model = built(config)
    assert torch.equal(model.state_dict()[name], codes[name].float() * scale)
    config.save(model, TEXTS, tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


NAME = "bert.encoder.layer.1.output.dense.weight"
CODES = {
    "int8": {NAME: torch.ones(16, 32, dtype=torch.int8)},
    "4 bits in a byte, under another name": {f"module.{NAME}": torch.ones(16, 32, dtype=torch.uint8)},
    "fp8 with scales": {NAME: torch.ones(16, 32).to(torch.float8_e4m3fn), f"{NAME}_scale": torch.ones(1)},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CODES)
def test_codes_that_nothing_explains_are_refused(kind: str, folder: Path) -> None:
    rewritten(folder, lambda tensors: {name: each for name, each in tensors.items() if name != NAME} | CODES[kind])
    with pytest.raises(BadInput, match=rf"weights are floats, .*{NAME} is (I8|U8|F8_E4M3) in its files"):
        built(HfConfig(str(folder)))


def test_weights_in_fp8_without_scales_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = {NAME: weights(folder)[NAME].to(torch.float8_e4m3fn)}
    rewritten(folder, lambda tensors: tensors | codes)
    assert torch.equal(built(HfConfig(str(folder))).state_dict()[NAME], codes[NAME].float())
    assert f"floats of 8 bits in its files, without a scale, so taken as they stand: {NAME}" in capsys.readouterr().out


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    about = {"peft_type": "LORA", "r": 2, "target_modules": ["query"], "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(BadInput, match=r"without an adapter beside it \(adapter_config\.json\): merge the adapter"):
        built(HfConfig(str(folder)))
    built(HfConfig(str(folder), weights=Weights.random))


def test_weights_of_another_shape_are_reported(folder: Path) -> None:
    with pytest.raises(BadInput, match="must be a model whose weights fit its configuration"):
        built(HfConfig(str(folder), args={"hidden_size": 32}))


def test_more_classes_than_the_head_knows_are_reported_or_start_a_new_head(folder: Path) -> None:
    more = replace(TEXTS, num_classes=7)
    with pytest.raises(BadInput, match=r"classes=7: must be at most 5, .*model\.reset_head=true"):
        HfConfig(str(folder)).make(more)
    task = Auto().pose(HfConfig(str(folder), reset_head=True), more)
    model: Any = assemble(task, knobs_of(), CPU).model
    assert model.classifier.out_features == 7
    assert torch.equal(model.bert.pooler.dense.weight, weights(folder)["bert.pooler.dense.weight"])


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("num_classes", [5, 7])
def test_a_new_head_is_new_whatever_its_size(
    kind: str, num_classes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    of_distilbert = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    more = of_distilbert if kind == "distilbert" else size
    config = transformers.AutoConfig.for_model(kind, vocab_size=300, num_labels=5, **more)
    saved = transformers.AutoModelForSequenceClassification.from_config(config)
    saved.save_pretrained(tmp_path / kind)
    there = saved.state_dict()
    spec = replace(TEXTS, num_classes=num_classes)
    first, again = (
        HfConfig(str(tmp_path / kind), reset_head=reset).build(replace(TEXTS, num_classes=5) if not reset else spec)
        for reset in (True, False)
    )
    for name, value in first.state_dict().items():
        is_head = not name.startswith(f"{kind}.")
        is_old = value.shape == there[name].shape and torch.equal(value, there[name])
        assert is_old == (not is_head or (name.endswith("bias") and value.shape == there[name].shape)), name
    assert all(torch.equal(value, there[name]) for name, value in again.state_dict().items())
    assert "model.reset_head starts at random: " in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("gpt2", DataSpec(Modality.TOKENS, 300, (65,)), "data.sequence_length=65: must be at most 64"),
        ("gpt2", DataSpec(Modality.TOKENS, 301, (8,)), "vocabulary=301: must be at most 300"),
        ("gpt2", IMAGES, "data='images': must be a source of tokens"),
        ("vit", DataSpec(Modality.IMAGES, 5, (1, 32, 32)), "the images' channels=1: must be 3"),
    ],
)
def test_data_that_do_not_fit_are_reported(kind: str, spec: DataSpec, message: str) -> None:
    with pytest.raises(BadInput) as told:
        HfConfig(tiny(kind)).make(spec)
    assert message in str(told.value)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_saved_model_has_the_entries_of_its_own_configuration(kind: str, tmp_path: Path) -> None:
    """Those that were changed for the training alone come back, and none is added: a ViT knows no cache."""
    config = HfConfig(tiny(kind), dropout=0.5)
    config.save(built(config), SPECS[config.modality], tmp_path)
    saved, known = (json.loads((Path(each) / "config.json").read_text()) for each in (tmp_path, tiny(kind)))
    assert {name: saved.get(name) for name in config.forced(known)} == {
        name: known.get(name) for name in config.forced(known)
    }
    assert "use_cache" not in saved.keys() - known.keys()
