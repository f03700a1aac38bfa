"""Families of transformers: each trains from a folder's weights, and what is left computes the same elsewhere."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality, pairs_layout
from lowvram.knobs.adapter import Lora
from lowvram.loops.export.folder import export, load
from lowvram.loops.export.plain import Origin
from lowvram.loops.fields import described_blocks
from lowvram.models.hf import Head, HfConfig
from lowvram.models.hf_sizes import SHIFTED_KINDS
from lowvram.models.hf_source import local_files, transformers
from lowvram.tasks import Auto, Problem
from tests.hugging import FAMILIES, HEADS, WORDS, tiny, with_weights
from tests.laboratory import CPU, KNOBS, batches, knobs_of, make_batch, relative_error, train
from tests.wordy import save_tokenizer

pytestmark = pytest.mark.sampled(12)

SPECS = {
    Modality.TOKENS: DataSpec(Modality.TOKENS, 300, (8,)),
    Modality.LABELLED_TOKENS: DataSpec(Modality.LABELLED_TOKENS, 5, (8,), vocab_size=300),
    Modality.MASKED_TOKENS: DataSpec(Modality.MASKED_TOKENS, 300, (8,)),
    Modality.PAIRS: DataSpec(Modality.PAIRS, 300, (8,), layout=pairs_layout(8, 6)),
    Modality.IMAGES: DataSpec(Modality.IMAGES, 5, (3, 16, 16)),
}
NO_ADAPTER: Any = KNOBS["adapter", "none"]
READ = {Modality.TOKENS, Modality.PAIRS}
GENERATORS = [kind for kind in FAMILIES if HfConfig(tiny(kind)).modality in READ]
NUM_NEW = 6  # tokens to generate


def spec_for(config: HfConfig) -> DataSpec:
    spec = SPECS[config.modality]
    return DataSpec(spec.modality, 5, config.natural_shape()) if spec.modality is Modality.IMAGES else spec


def trained(config: HfConfig) -> tuple[Problem, Rig]:
    """A model after a few steps."""
    task = Auto().pose(config, spec_for(config))
    rig = assemble(task, knobs_of(), CPU)
    rig.stepper.set_lr(0.01)
    for batch in batches(task.spec, [4, 4, 4]):
        step(rig, batch)
    return task, rig


@cache
def exported(kind: str) -> tuple[Problem, Rig, Path]:
    """A model that was trained from a folder's weights, and the folder to which it was saved."""
    config, folder = HfConfig(with_weights(kind)), Path(f"{with_weights(kind)}-trained")
    task, rig = trained(config)
    export(folder, rig.model, Origin(config, task.spec, NO_ADAPTER, 0), merge=False)
    rig.model.eval()
    return task, rig, folder


def loaded(kind: str) -> tuple[Any, dict[str, Any]]:
    """The model as anybody loads it, and what `from_pretrained` has to say of the weights."""
    return getattr(transformers, FAMILIES[kind][0]).from_pretrained(exported(kind)[2], output_loading_info=True)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_trained_model_loads_without_a_missing_weight_and_computes_the_same(kind: str) -> None:
    task, rig, folder = exported(kind)
    model, said = loaded(kind)
    assert not any(said.values()), said
    batch = make_batch(task.spec, 4)
    with torch.no_grad():
        found, wanted = task.call(model, batch.inputs), task.call(rig.model, batch.inputs)
        again = task.call(load(folder).eval(), batch.inputs)
    assert torch.equal(found, wanted)
    assert torch.equal(again, wanted)
    start = assemble(task, knobs_of(), CPU).model
    assert relative_error(dict(model.named_parameters()), dict(start.named_parameters())) > 0.01


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_trained_model_generates_as_it_did_where_it_was_trained(kind: str) -> None:
    """With the cache, which is off while it trains."""
    model, _ = loaded(kind)
    rig, prompt = exported(kind)[1], torch.tensor([[5, 6, 7]])
    told = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    assert model.generation_config.use_cache
    assert torch.equal(model.generate(prompt, **told), rig.model.generate(prompt, **told))  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_trained_model_keeps_its_configuration(kind: str) -> None:
    before, after = (
        json.loads((Path(folder) / "config.json").read_text()) for folder in (with_weights(kind), exported(kind)[2])
    )
    assert after == before


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if HfConfig(tiny(kind)).modality is Modality.PAIRS])
def test_the_loss_of_a_written_text_is_the_librarys_own(kind: str) -> None:
    """With the decoder's inputs that the model makes itself."""
    config = HfConfig(tiny(kind))
    task = Auto().pose(config, spec_for(config))
    model: Any = assemble(task, knobs_of(), CPU).model
    texts = [[5, 6, 7, 1], [8, 1]]
    decoder_ids, targets = map(
        torch.stack, zip(*(config.text_rules.decoded(np.array(text), 6) for text in texts), strict=True)
    )
    inputs = {"input_ids": torch.tensor([[9, 8, 1], [7, 1, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    batch = Part({**inputs, "decoder_input_ids": decoder_ids}, targets)
    ours = task.criterion(task.call(model, batch.inputs), batch) / batch.num_targets
    torch.testing.assert_close(ours, model(**inputs, labels=targets).loss)


@pytest.mark.parametrize("kind", ["bert:masked", "roberta:masked", "distilbert:masked"])
def test_the_loss_of_masked_tokens_is_the_librarys_own(kind: str) -> None:
    config = HfConfig(tiny(kind))
    task, batch = Auto().pose(config, spec_for(config)), make_batch(spec_for(config), 4)
    model: Any = assemble(task, knobs_of(), CPU).model
    ours = task.criterion(task.call(model, batch.inputs), batch) / batch.num_targets
    torch.testing.assert_close(ours, model(**batch.inputs, labels=batch.targets).loss)


@pytest.mark.parametrize(
    ("kind", "blocks", "has_head"),
    [
        ("bert:masked", "3 BertLayer", True),
        ("t5:pairs", "4 T5Block", True),
        ("bart", "2 BartEncoderLayer, 2 BartDecoderLayer", False),
        ("marian", "2 MarianEncoderLayer, 2 MarianDecoderLayer", False),
    ],
)
def test_blocks_and_head_are_found(kind: str, blocks: str, has_head: bool) -> None:
    """BART adds a bias to the outputs of its last layer, so logits=chunked is refused."""
    config = HfConfig(tiny(kind))
    task = Auto().pose(config, spec_for(config))
    model = task.make_model()
    assert described_blocks(task.structure(model).blocks) == blocks
    assert (task.structure(model).head is not None) == has_head


@pytest.mark.parametrize("kind", ["bert:masked", "t5:pairs"])
def test_chunked_logits_keep_the_loss(kind: str) -> None:
    config = HfConfig(tiny(kind))
    task, batch = Auto().pose(config, spec_for(config)), make_batch(spec_for(config), 4)
    losses = []
    for logits in ("full", "chunked"):
        rig = assemble(task, knobs_of(logits=logits), CPU)
        losses.append(rig.criterion(rig.forward(batch), batch))
    torch.testing.assert_close(*losses)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["bert:masked", "t5:pairs", "bart"])
@pytest.mark.parametrize("choice", [{"ckpt": "every1"}, {"accum": "x2"}, {"stepping": "in_backward"}])
def test_a_knob_that_saves_memory_keeps_the_losses(kind: str, choice: dict[str, Any]) -> None:
    config = HfConfig(tiny(kind))
    task = Auto().pose(config, spec_for(config))
    found, wanted = (train(task, knobs_of(optimizer="sgd", **each), [4, 8], lr=0.01).losses for each in (choice, {}))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)


def test_a_model_that_names_no_start_of_what_it_writes_is_refused() -> None:
    config = HfConfig(tiny("bart"), args={"decoder_start_token_id": None})
    with pytest.raises(BadInput, match=r"model\.args\.decoder_start_token_id=null: must be the token"):
        config.make(spec_for(config))


# What differs from family to family


def test_the_token_that_ends_texts_trains_although_texts_are_padded_with_it() -> None:
    """A model that is told a padding token when it is built never trains that token's embedding."""
    for head, pad_id in ((Head.causal_lm, None), (Head.sequence_classification, 2)):
        config = HfConfig(tiny("llama"), head=head)
        model: Any = assemble(Auto().pose(config, spec_for(config)), knobs_of(), CPU).model
        assert (config.text_rules.stop_ids[0], model.get_input_embeddings().padding_idx) == (2, None)
        assert model.config.pad_token_id == pad_id


@pytest.mark.parametrize(("kind", "longest"), [("bert", 64), ("opt", 64), ("roberta", 62)])
def test_the_longest_text_is_one_that_the_model_has_positions_for(kind: str, longest: int) -> None:
    config = HfConfig(tiny(kind))
    assert config.natural_shape() == (longest,)
    task = Auto().pose(config, replace(SPECS[config.modality], shape=(longest,)))
    task.call(assemble(task, knobs_of(), CPU).model, make_batch(task.spec, 2).inputs)


@pytest.mark.parametrize(
    ("kind", "more", "longest"),
    [
        ("ibert", {}, 62),
        ("esm", {"position_embedding_type": "absolute"}, 62),
        ("esm", {"position_embedding_type": "rotary"}, 64),
    ],
)
def test_positions_behind_that_of_padding_are_counted(
    kind: str, more: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    sizes = {**WORDS, **HEADS, "pad_token_id": 1, "mask_token_id": 2, **more}
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    config = HfConfig(str(tmp_path), head=Head.masked_lm)
    assert config.natural_shape() == (longest,)
    task = Auto().pose(config, DataSpec(Modality.MASKED_TOKENS, 300, (longest,)))
    task.call(assemble(task, knobs_of(), CPU).model, make_batch(task.spec, 2).inputs)


@pytest.mark.slow
def test_all_kinds_are_known_whose_positions_start_behind_the_padding() -> None:
    auto_classes = transformers.AutoModelForSequenceClassification, transformers.AutoModelForMaskedLM
    configs = {config.model_type: config for auto in auto_classes for config, _ in auto._model_mapping.items()}
    assert {kind for kind, config in configs.items() if skips_padding(config, auto_classes)} == SHIFTED_KINDS


def skips_padding(config_class: Any, auto_classes: tuple[Any, ...]) -> bool:
    """Whether an embedding of positions has one for padding. Kinds that can't be made by default have none."""
    for auto in auto_classes:
        try:
            with torch.device("meta"):
                model = auto.from_config(config_class(vocab_size=300, pad_token_id=1))
        except Exception:
            continue
        named = [(name, getattr(module, "padding_idx", None)) for name, module in model.named_modules()]
        return any(name.endswith("position_embeddings") and padding is not None for name, padding in named)
    return False


@pytest.mark.parametrize("kind", ["convnext", "swin", "resnet"])
def test_weights_that_fit_any_image_size_train_at_another(kind: str) -> None:
    config = HfConfig(with_weights(kind))
    task = Auto().pose(config, DataSpec(Modality.IMAGES, 5, (3, 48, 48)))
    task.call(assemble(task, knobs_of(), CPU).model, make_batch(task.spec, 2).inputs)


def test_weights_for_one_image_size_are_refused_at_another() -> None:
    with pytest.raises(BadInput, match=r"data\.image_size=48: must be 16, for which the weights were trained"):
        HfConfig(with_weights("vit")).make(DataSpec(Modality.IMAGES, 5, (3, 48, 48)))


def test_images_smaller_than_a_window_are_refused() -> None:
    least, less = (DataSpec(Modality.IMAGES, 5, (3, size, size)) for size in (13, 12))
    task = Auto().pose(HfConfig(tiny("swin")), least)
    task.call(assemble(task, knobs_of(), CPU).model, make_batch(least, 2).inputs)
    with pytest.raises(BadInput, match=r"data\.image_size=12: must be at least 13, .*window_size=4"):
        HfConfig(tiny("swin")).make(less)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_encoder_that_sees_all_tokens_does_not_predict_the_next(kind: str) -> None:
    config = HfConfig(tiny(kind), head=Head.causal_lm)
    with pytest.raises(BadInput, match=r"model\.head='causal_lm': must be masked_lm, or causal_lm with .*is_decoder"):
        config.make(SPECS[Modality.TOKENS])
    config = replace(config, args={"is_decoder": True})
    task, (batch, other) = (
        Auto().pose(config, SPECS[Modality.TOKENS]),
        (make_batch(SPECS[Modality.TOKENS], 2) for _ in "ab"),
    )
    other.inputs[:, -1] += 1
    model = assemble(task, knobs_of(), CPU).model
    assert torch.equal(task.call(model, batch.inputs)[:, :-1], task.call(model, other.inputs)[:, :-1])


# Files beside the weights


def test_settings_of_generate_and_the_tokenizer_come_along(tmp_path: Path) -> None:
    source = Path(shutil.copytree(with_weights("llama"), tmp_path / "llama"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.6}))
    (source / "tokenizer.json").write_text("{}")
    config = HfConfig(str(source))
    export(tmp_path / "out", trained(config)[1].model, Origin(config, spec_for(config), NO_ADAPTER, 0), merge=False)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [2, 7],
        "temperature": 0.6,
    }
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_classes_have_the_names_that_the_data_give_them(tmp_path: Path) -> None:
    config = HfConfig(with_weights("vit"))
    task, rig = trained(config)
    spec = replace(task.spec, class_names=("ant", "bee", "cat", "dog", "emu"))
    export(tmp_path / "out", rig.model, Origin(config, spec, NO_ADAPTER, 0), merge=False)
    names: Any = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (names.id2label[4], names.label2id) == ("emu", {name: i for i, name in enumerate(spec.class_names or ())})


def test_a_head_of_more_classes_than_the_data_have_keeps_its_own_names(tmp_path: Path) -> None:
    config = HfConfig(with_weights("vit"))
    spec = replace(spec_for(config), num_classes=2, class_names=("ant", "bee"))
    model = assemble(Auto().pose(config, spec), knobs_of(), CPU).model
    export(tmp_path / "out", model, Origin(config, spec, NO_ADAPTER, 0), merge=False)
    names: Any = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert names.id2label[0] == "LABEL_0"


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_has_the_tokenizer_and_the_names_beside_it(tmp_path: Path, merge: bool) -> None:
    source = save_tokenizer(Path(shutil.copytree(with_weights("bert"), tmp_path / "bert")))
    config, adapter = HfConfig(str(source)), Lora(rank=2, train=["classifier"])
    spec = replace(spec_for(config), class_names=("ant", "bee", "cat", "dog", "emu"))
    model: Any = assemble(Auto().pose(config, spec), knobs_of(adapter=adapter), CPU).model
    export(tmp_path / "out", model, Origin(config, spec, adapter, 0), merge=merge)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer("the fox")["input_ids"] == transformers.AutoTokenizer.from_pretrained(source)("the fox")["input_ids"]
    )
    described = json.loads((tmp_path / "out" / ("config.json" if merge else "lowvram.json")).read_text())
    assert (described["id2label"]["4"] if merge else described["data"]["class_names"][4]) == "emu"
    assert torch.equal(load(tmp_path / "out").classifier.bias, model.classifier.bias)


def test_a_model_of_the_hub_brings_the_files_that_were_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--some--body"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(with_weights("llama"), cached / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert local_files("some/body", None) == cached / "snapshots" / "abc"
    assert local_files("some/body", "other") is None
    assert local_files("no/body", None) is None
