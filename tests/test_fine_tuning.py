"""Fine-tuning a local folder of transformers from the command line: others load what is left, and evaluate the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowvram.data.loader import eval_batches
from lowvram.data.source import Samples, resolve_source
from lowvram.data.text import Text
from lowvram.knobs.adapter.layers import library
from lowvram.models.hf import HfConfig
from lowvram.models.hf_source import transformers
from tests.calls import ROOT, Outcome
from tests.hugging import FAMILIES, tiny, with_weights
from tests.laboratory import CPU
from tests.tiers import first_of

Call = Callable[..., Outcome]
LENGTH, EVAL_SAMPLES = 16, 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with weights, and nothing else."""
    config = transformers.AutoConfig.from_pretrained(tiny("gpt2"))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def held_out(folder: Path) -> Samples:
    """What the runs evaluate on."""
    text = Text(path=str(ROOT / "README.md"), sequence_length=LENGTH, eval_samples=EVAL_SAMPLES, tokenizer="bytes")
    return resolve_source(text, HfConfig(str(folder))).open(seed=0).eval


def words(folder: Path) -> tuple[str, ...]:
    return (
        "model=hf",
        f"model.name={folder}",
        "data=text",
        f"data.path={ROOT / 'README.md'}",
        "data.tokenizer=bytes",
        f"data.sequence_length={LENGTH}",
        f"data.eval_samples={EVAL_SAMPLES}",
        "train.batch_size=8",
        "train.steps=30",
        "optimizer.lr=0.01",
        "logger=none",
    )


@torch.no_grad()
def loss_of(model: Any, samples: Samples) -> float:
    """The mean over all tokens."""
    model.eval()
    ((part, _),) = eval_batches(samples, len(samples), CPU)
    return F.cross_entropy(model(part.inputs).logits.float().flatten(0, 1), part.targets.flatten()).item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
def test_an_adapter_is_loaded_by_peft_and_evaluates_the_same(call: Call, folder: Path, held_out: Samples) -> None:
    outcome = call(*words(folder), "adapter=lora", "precision=bf16", "ckpt=every1")
    assert outcome.code == 0, outcome.said()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.autocast("cpu", torch.bfloat16):
        before = loss_of(base, held_out)
        after = loss_of(library().PeftModel.from_pretrained(base, outcome.folder / "model"), held_out)
    assert after == pytest.approx(outcome.row["loss"]["eval"], rel=1e-4)
    assert abs(before - after) > 0.01
    assert outcome.row["model"]["trainable"] < outcome.row["model"]["parameters"] / 2


@pytest.mark.slow
@pytest.mark.parametrize("more", [("adapter=none",), ("adapter=lora", "export.merge=true")], ids=lambda more: more[0])
def test_a_whole_model_is_loaded_by_transformers_and_evaluates_the_same(
    call: Call, folder: Path, held_out: Samples, more: tuple[str, ...]
) -> None:
    outcome = call(*words(folder), *more)
    assert outcome.code == 0, outcome.said()
    model = transformers.AutoModelForCausalLM.from_pretrained(outcome.folder / "model")
    before = loss_of(transformers.AutoModelForCausalLM.from_pretrained(folder), held_out)
    assert loss_of(model, held_out) == pytest.approx(outcome.row["loss"]["eval"], rel=1e-5)
    assert abs(before - outcome.row["loss"]["eval"]) > 0.01


@pytest.mark.parametrize("kind", first_of(["vit", "swin", "roberta", "opt"]))
@pytest.mark.slow
def test_every_kind_of_model_is_left_whole(call: Call, kind: str) -> None:
    """More families, in one process: tests/models/test_hf_families.py."""
    sizes = ("data.sequence_length=16", "data.image_size=16", "data.num_classes=5", "data.eval_samples=4")
    words = (f"model.name={with_weights(kind)}", "data=synthetic", "train.steps=2", "train.batch_size=4")
    outcome = call("model=hf", *words, *sizes, "logger=none")
    assert outcome.code == 0, outcome.said()
    model_class = getattr(transformers, FAMILIES[kind][0])
    _, said = model_class.from_pretrained(outcome.folder / "model", output_loading_info=True)
    assert not any(said.values()), said
