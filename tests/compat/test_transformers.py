"""Private names of Hugging Face's transformers."""

from __future__ import annotations

import pytest

from tests.compat.sentences import needed


@needed("transformers.AutoModelForCausalLM._model_mapping", by="model=hf")
def test_a_configuration_has_its_class() -> None:
    from lowvram.compat.transformers import class_of
    from lowvram.models.hf_source import transformers

    found = class_of(transformers.AutoModelForCausalLM, transformers.GPT2Config())
    assert found is transformers.GPT2LMHeadModel
    with pytest.raises(KeyError):
        class_of(transformers.AutoModelForCausalLM, transformers.ViTConfig())
