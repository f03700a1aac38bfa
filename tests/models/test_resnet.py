"""The residual network: sizes, norms, memory layout, initial values, refusals, and what recomputing saves."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.config.errors import BadInput
from lowvram.config.schema import build
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.ledger import ledger
from lowvram.core.seeds import generator_for
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.resnet import (
    BlockKind,
    FrozenNorm,
    Initialisation,
    NormKind,
    ResNet,
    ResNetConfig,
    StemKind,
)
from lowvram.tasks import Classification

CONF = Path(__file__).parents[2] / "conf" / "model"
CPU = torch.device("cpu")
SIZES = {"resnet18": (11_689_512, 8), "resnet50": (25_557_032, 16), "resnet101": (44_549_160, 33)}
SMALL = ResNetConfig(layers=[2, 1], width=8, image_size=16)
TEN_CLASSES = DataSpec(Modality.IMAGES, 10, (3, 16, 16))


def preset(name: str) -> ResNetConfig:
    node = OmegaConf.load(CONF / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    return build(node, "model")


def made(config: ResNetConfig, seed: int = 0, spec: DataSpec = TEN_CLASSES) -> ResNet:
    """The model with its initial values, made as the framework makes it."""
    model = assemble(Classification().pose(config, spec), {}, CPU, seed).model
    assert isinstance(model, ResNet)
    return model


def random_images(num_samples: int = 4, size: int = 16) -> Tensor:
    return torch.randn(num_samples, 3, size, size, generator=torch.Generator().manual_seed(1))


def loss_and_gradients(model: ResNet, images_nchw: Tensor) -> list[Tensor]:
    """The loss, then the gradient of every parameter."""
    loss = F.cross_entropy(model(images_nchw), torch.arange(len(images_nchw)))
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def recompute(model: ResNet) -> None:
    """Every block keeps only its input, and computes the rest again in the backward pass."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


@pytest.mark.parametrize(("name", "sizes"), SIZES.items())
def test_presets_have_the_papers_parameters_and_blocks(name: str, sizes: tuple[int, int]) -> None:
    config = preset(name)
    with torch.device("meta"):
        model = config.make(DataSpec(Modality.IMAGES, 1000, config.natural_shape()))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (num_parameters, len(model.blocks)) == sizes
    assert config.natural_shape() == (3, 224, 224)


def test_small_preset_is_the_default() -> None:
    assert preset("resnet") == ResNetConfig()


@pytest.mark.parametrize("name", ["resnet", *SIZES])
def test_yaml_lists_every_field_with_a_comment(name: str) -> None:
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    fields = [line for line in lines if not line.startswith(("#", "_target_"))]
    names = [field.name for field in dataclasses.fields(ResNetConfig)]
    assert [line.split(":")[0] for line in fields] == names
    assert lines[0].startswith("# ")
    assert all("  # " in line for line in fields)


@pytest.mark.parametrize("block", BlockKind)
@pytest.mark.parametrize(("stem", "side"), [(StemKind.full, 16), (StemKind.half, 8), (StemKind.quarter, 4)])
def test_shapes_from_stem_to_head(block: BlockKind, stem: StemKind, side: int) -> None:
    model = made(replace(SMALL, block=block, stem=stem))
    x_nchw = model.stem(random_images())
    assert x_nchw.shape == (4, 8, side, side)
    for each in model.blocks:
        x_nchw = each(x_nchw)
    expansion = {BlockKind.basic: 1, BlockKind.bottleneck: 4}[block]
    assert x_nchw.shape == (4, 16 * expansion, side // 2, side // 2)
    assert model(random_images()).shape == (4, 10)
    assert model(random_images(size=24)).shape == (4, 10)


def test_channels_and_classes_may_differ_from_the_usual() -> None:
    model = made(replace(SMALL, num_classes=99), spec=DataSpec(Modality.IMAGES, 10, (1, 16, 16)))
    assert model(random_images()[:, :1]).shape == (4, 99)


def test_bottleneck_has_its_stride_on_the_3x3() -> None:
    block = made(replace(SMALL, block=BlockKind.bottleneck)).blocks[2]
    strides = {name: conv.stride for name, conv in block.named_modules() if isinstance(conv, nn.Conv2d)}
    halving = {name for name, stride in strides.items() if stride == (2, 2)}
    assert halving == {"middle.conv", "shortcut.conv"}


@pytest.mark.parametrize("norm", NormKind)
@pytest.mark.parametrize("block", BlockKind)
def test_in_place_changes_no_number(norm: NormKind, block: BlockKind) -> None:
    config = replace(SMALL, norm=norm, block=block)
    plain = loss_and_gradients(made(replace(config, in_place=False)), random_images())
    in_place = loss_and_gradients(made(replace(config, in_place=True)), random_images())
    assert all(map(torch.equal, in_place, plain))


@pytest.mark.parametrize("norm", NormKind)
@pytest.mark.parametrize("block", BlockKind)
def test_in_place_is_right_when_blocks_are_recomputed(norm: NormKind, block: BlockKind) -> None:
    kept, recomputed = (made(replace(SMALL, norm=norm, block=block, in_place=True)) for _ in range(2))
    recompute(recomputed)
    expected, found = (loss_and_gradients(model, random_images()) for model in (kept, recomputed))
    assert all(map(torch.equal, found, expected))


def test_a_block_leaves_its_input_alone() -> None:
    for block in made(SMALL).blocks:
        x_nchw = torch.randn(2, 8, 8, 8)
        before = x_nchw.clone()
        block(x_nchw)
        assert torch.equal(x_nchw, before)


@pytest.mark.parametrize("block", BlockKind)
def test_channels_last_reaches_weights_and_activations_and_changes_no_number(block: BlockKind) -> None:
    config = replace(SMALL, block=block)
    plain, last = made(config), made(replace(config, channels_last=True))
    inputs: list[Tensor] = []
    last.blocks[1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for name, tensor in last.named_parameters():
        if name.endswith("conv.weight"):
            assert tensor.is_contiguous(memory_format=torch.channels_last), name
        assert torch.equal(tensor, plain.get_parameter(name)), name
    images_nchw = random_images().double()
    found, expected = (loss_and_gradients(model.double(), images_nchw) for model in (last, plain))
    torch.testing.assert_close(found, expected)
    assert inputs[0].is_contiguous(memory_format=torch.channels_last)
    assert not inputs[0].is_contiguous()


def test_channels_last_can_be_planned_on_fake_tensors() -> None:
    with FakeTensorMode():
        model = replace(SMALL, channels_last=True).make(TEN_CLASSES)
    assert model.blocks[0].get_parameter("first.conv.weight").stride() == (72, 1, 24, 8)


def test_batch_norm_moves_and_frozen_norm_does_not() -> None:
    for norm, moves in [(NormKind.batch, True), (NormKind.frozen, False)]:
        model = made(replace(SMALL, norm=norm))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss_and_gradients(model, random_images())
        changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
        assert changed == (list(before) if moves else []), norm
    assert not [name for name, _ in model.named_parameters() if "norm" in name]


def test_frozen_norm_is_batch_norm_in_evaluation() -> None:
    generator = torch.Generator().manual_seed(0)
    batch_norm, frozen = nn.BatchNorm2d(5).eval(), FrozenNorm(5)
    for name, tensor in batch_norm.state_dict().items():
        if name != "num_batches_tracked":
            tensor.uniform_(0.5, 2, generator=generator)
            frozen.get_buffer(name).copy_(tensor)
    x_nchw = torch.randn(2, 5, 3, 3, generator=generator)
    torch.testing.assert_close(frozen(x_nchw), batch_norm(x_nchw))
    assert frozen(x_nchw.bfloat16()).dtype is torch.bfloat16


def test_group_norm_needs_no_other_sample() -> None:
    model = made(replace(SMALL, norm=NormKind.group))
    torch.testing.assert_close(model(random_images())[:1], model(random_images()[:1]))
    assert not list(model.buffers())


def test_zero_gamma_makes_each_block_its_shortcut() -> None:
    zero, one = made(replace(SMALL, zero_init_last_gamma=True)), made(SMALL)
    x_nchw = random_images()[:, :1].expand(-1, 8, -1, -1).relu()
    assert torch.equal(zero.blocks[0](x_nchw), x_nchw)
    assert not torch.equal(one.blocks[0](x_nchw), x_nchw)
    # The residual branch still learns: the gradient reaches its gamma.
    gammas = [block.get_parameter("last.norm.weight") for block in zero.blocks]
    gradients = torch.autograd.grad(zero(random_images()).square().sum(), gammas)
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("initialisation", Initialisation)
def test_initial_values(initialisation: Initialisation) -> None:
    model = made(ResNetConfig(layers=[1, 1], width=64, initialisation=initialisation, num_classes=100))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("conv.weight"):
            fan_in, fan_out = tensor[0].numel(), tensor[:, 0].numel()
            fan = fan_out if initialisation is Initialisation.kaiming else fan_in + fan_out
            assert tensor.var().item() == pytest.approx(2 / fan, rel=0.1), name
        elif name == "head.weight":
            assert tensor.std().item() == pytest.approx(0.01, rel=0.05)
        else:
            assert tensor.eq(1 if name.endswith(("norm.weight", "running_var")) else 0).all(), name


@pytest.mark.parametrize("norm", NormKind)
def test_initial_values_depend_on_seed_and_name_alone(norm: NormKind) -> None:
    config = replace(SMALL, norm=norm)
    first, deeper, other = made(config), made(replace(config, layers=[2, 1, 1])), made(config, seed=1)
    for name, tensor in reversed([*first.named_parameters(), *first.named_buffers()]):
        again = torch.empty_like(tensor)
        first.initialise(name, again, generator_for(0, name, CPU))
        assert torch.equal(tensor, again), name
    for name, tensor in first.blocks.state_dict().items():
        assert torch.equal(tensor, deeper.blocks.state_dict()[name]), name
    assert not torch.equal(first.head.weight, other.head.weight)


def test_a_foreign_tensor_is_not_initialised() -> None:
    with pytest.raises(KeyError, match=r"blocks\.0\.gate"):
        made(SMALL).initialise("blocks.0.gate", torch.empty(3), torch.Generator())


def test_dropout_acts_in_training_only() -> None:
    model, plain = made(replace(SMALL, dropout=0.5)).eval(), made(SMALL).eval()
    images_nchw = random_images()
    assert torch.equal(model(images_nchw), plain(images_nchw))
    model.dropout.train()  # batch norm stays in evaluation
    assert not torch.equal(model(images_nchw), plain(images_nchw))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": []}, "model.layers=[]: must be a list of positive numbers, one per stage"),
        ({"layers": [2, 0]}, "model.layers=[2, 0]: must be a list of positive numbers, one per stage"),
        ({"width": 0}, "model.width=0: must be a positive number"),
        ({"image_size": -1}, "model.image_size=-1: must be a positive number"),
        ({"num_classes": 0}, "model.num_classes=0: must be a positive number, or null"),
        ({"dropout": 1.0}, "model.dropout=1.0: must be at least 0 and less than 1"),
        ({"dropout": float("nan")}, "model.dropout=nan: must be at least 0 and less than 1"),
        (
            {"norm": NormKind.frozen, "zero_init_last_gamma": True},
            "model.zero_init_last_gamma=true: must be false with model.norm=frozen",
        ),
    ],
)
def test_values_out_of_range_are_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as caught:
        replace(SMALL, **changes)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("spec", "key", "words"),
    [
        (DataSpec(Modality.IMAGES, 11, (3, 16, 16)), "model.num_classes", ["=10:", "at least 11"]),
        (DataSpec(Modality.TOKENS, 256, (16,)), "data", ["'tokens'", "a source of images"]),
    ],
)
def test_data_that_do_not_fit_are_refused(spec: DataSpec, key: str, words: list[str]) -> None:
    with pytest.raises(BadInput) as caught:
        replace(SMALL, num_classes=10).make(spec)
    assert caught.value.key == key
    assert all(word in str(caught.value) for word in words)


def activation_bytes(config: ResNetConfig, recomputes: bool) -> int:
    """The most that activations take in a forward and backward pass over 8 samples."""
    model = made(config, spec=DataSpec(Modality.IMAGES, 10, config.natural_shape()))
    images_nchw = random_images(8, config.image_size)
    if recomputes:
        recompute(model)
    with ledger(model, inputs=images_nchw) as peak:
        F.cross_entropy(model(images_nchw), torch.arange(8)).backward()
    return peak.by_kind_max[Kind.ACTIVATIONS]


@pytest.mark.parametrize("in_place", [True, False])
def test_recomputing_every_block_nearly_halves_the_activations_of_the_small_preset(in_place: bool) -> None:
    config = replace(preset("resnet"), in_place=in_place)
    kept_bytes, recomputed_bytes = (activation_bytes(config, recomputes) for recomputes in (False, True))
    assert recomputed_bytes <= 0.55 * kept_bytes
