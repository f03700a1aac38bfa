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


@needed("transformers.AutoModelForImageClassification._model_mapping", by="model=hf")
def test_of_several_classes_the_one_that_the_configuration_names_is_taken() -> None:
    from lowvram.compat.transformers import class_of
    from lowvram.models.hf_source import transformers

    auto = transformers.AutoModelForImageClassification
    with_teacher = transformers.DeiTForImageClassificationWithTeacher
    assert class_of(auto, transformers.DeiTConfig()) is transformers.DeiTForImageClassification
    assert class_of(auto, transformers.DeiTConfig(architectures=[with_teacher.__name__])) is with_teacher


@needed("transformers.utils.import_utils.is_fake_tensor", by="plans of model=hf")
def test_fake_tensors_that_are_known_are_read() -> None:
    import torch
    from transformers.masking_utils import find_packed_sequence_indices
    from transformers.utils.import_utils import is_tracing

    from lowvram.compat.torch_fake import FakeTensorMode
    from lowvram.compat.transformers import known_values_readable

    with FakeTensorMode():
        known, other = torch.arange(4)[None], torch.arange(4)[None]
        with known_values_readable(lambda tensor: tensor is known):
            assert not is_tracing(known)
            assert is_tracing(other)
        assert is_tracing(known)
        assert find_packed_sequence_indices(other) is not None


@needed("PreTrainedModel._init_weights and _is_hf_initialized", by="model.reset_head")
def test_a_part_of_a_model_starts_anew() -> None:
    import torch

    from lowvram.compat.transformers import start_anew
    from lowvram.models.hf_source import transformers

    config = transformers.AutoConfig.for_model("vit", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.AutoModelForImageClassification.from_config(config)
    torch.nn.init.ones_(model.classifier.bias)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start_anew(model, model.classifier)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
