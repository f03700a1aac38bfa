"""Models of transformers whose files hold what their configurations tie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.models import hf_ties
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto
from tests.hugging import with_weights
from tests.laboratory import CPU, knobs_of
from tests.models.test_hf import rewritten
from tests.models.test_hf_families import spec_for


def built(config: HfConfig) -> Any:
    return assemble(Auto().pose(config, spec_for(config)), knobs_of(), CPU).model


TIED = {  # a kind: the names of the head's weights, and of the embedding's
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "bert:masked": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "t5:pairs": ("lm_head.weight", "shared.weight"),
    "bart": ("lm_head.weight", "model.shared.weight"),
}


def untied(kind: str, folder: Path, spell: Callable[[str], str] = str) -> tuple[Path, Any]:
    """A folder with a head of its own beside the embedding that the configuration ties it to, and the model as the
    library reads it."""
    shutil.copytree(with_weights(kind), folder)
    head, embedding = TIED[kind]
    own = torch.randn(300, 16, generator=torch.Generator().manual_seed(7))

    def with_both(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        both = tensors | {embedding: tensors.get(embedding, tensors.get(head)), head: own}
        return {spell(name): tensor for name, tensor in both.items()}

    rewritten(folder, with_both)
    return folder, HfConfig(str(folder)).model_class().from_pretrained(folder).eval()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", TIED)
def test_a_head_with_values_of_its_own_stays_apart_from_the_embedding(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, wanted = untied(kind, tmp_path / "m")
    config = HfConfig(str(where))
    model = built(config)
    assert f"so trained and saved apart from what the configuration ties them to: {TIED[kind][0]}" in str(
        capsys.readouterr().out
    )
    spec = spec_for(config)
    inputs = spec.example(2)[0]
    ours, theirs = (config.call(each.eval(), inputs) for each in (model, wanted))
    torch.testing.assert_close(ours, theirs)
    config.save(model, spec, tmp_path / "saved")
    saved = config.model_class().from_pretrained(tmp_path / "saved").eval()
    torch.testing.assert_close(config.call(saved, inputs), theirs)
    says_tied = json.loads((tmp_path / "saved" / "config.json").read_text()).get("tie_word_embeddings", True)
    assert says_tied == (kind != "gpt2")  # the others tie more than that


def test_tied_weights_that_the_files_hold_several_times_stay_tied(tmp_path: Path) -> None:
    shutil.copytree(with_weights("gpt2"), tmp_path / "m")
    head, embedding = TIED["gpt2"]
    rewritten(tmp_path / "m", lambda tensors: tensors | {head: tensors[embedding].clone()})
    model = built(HfConfig(str(tmp_path / "m")))
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    "spell", [lambda name: f"module.{name}", lambda name: name.removeprefix("transformer.")], ids=["wrapped", "bare"]
)
def test_a_head_of_its_own_is_found_under_other_names(spell: Callable[[str], str], tmp_path: Path) -> None:
    where, _ = untied("gpt2", tmp_path / "m", spell)
    model = built(HfConfig(str(where)))
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)


def test_a_head_of_its_own_under_unknown_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, _ = untied("gpt2", tmp_path / "m")
    monkeypatch.setattr(hf_ties, "places_of", lambda *_: {})
    hf_ties.FOUND.clear()
    with pytest.raises(BadInput, match=r"hold the same for transformer\.wte\.weight and lm_head\.weight, which its"):
        built(HfConfig(str(where)))
    hf_ties.FOUND.clear()
