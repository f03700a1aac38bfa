"""qat=int8 on convolutions: that they round as export.format=pt2e does, whatever batch norm follows, and nothing else
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from lowvram.compress.formats.graph import Called, traced
from lowvram.compress.formats.pt2e import quantized_graph
from lowvram.compress.qat import LARGEST, FakeQuantizedConv2d, Int8, Layers, rounded
from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble, skeleton
from lowvram.core.fact import Fact
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.models.hf import HfConfig
from lowvram.tasks import Auto, Problem
from tests.calls import Outcome
from tests.compress.test_qat import exchanged
from tests.hugging import tiny
from tests.laboratory import (
    CPU,
    IMAGES,
    KNOBS,
    PROBLEMS,
    RESNET,
    TOKENS,
    TRANSFORMER,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)

CONVOLUTION, LINEAR = torch.ops.aten.conv2d.default, torch.ops.aten.linear.default
VIT = DataSpec(Modality.IMAGES, 5, (3, 16, 16))
SMALL = Auto().pose(replace(RESNET, layers=[1]), IMAGES)
OTHERS = [PROBLEMS[model] for model in ("resnet", "resnet_group", "resnet_frozen")]


def trained(problem: Problem, num_steps: int = 3) -> Rig:
    """By qat=int8, then in evaluation. Some scales of batch norms are far smaller than others, and some negative."""
    rig = assemble(problem, knobs_of(qat="int8"), CPU)
    for seed in range(num_steps):
        step(rig, make_batch(problem.spec, 9, seed))
    with torch.no_grad():
        for module in rig.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight[::2] *= -1
                module.weight[::3] *= 1e-3
    rig.model.eval()
    return rig


def plain_model(rig: Rig, problem: Problem) -> nn.Module:
    """The model that is exported."""
    plain = assemble(problem, knobs_of(), CPU).model
    plain.load_state_dict(rig.model.state_dict())
    return plain.eval().requires_grad_(False)


def written(rig: Rig, problem: Problem, operator: object) -> list[tuple[Tensor, Tensor]]:
    """The codes of all weights that the graph in 8 bits gives to an operator, and their scales, in the order of the
    forward pass."""
    program = traced(Called(plain_model(rig, problem), problem), problem, "pt2e", strict=True)
    graph = quantized_graph(program.module(), [make_batch(problem.spec, 4).inputs])
    nodes = [node.args[1] for node in graph.graph.nodes if node.target is operator]
    return [(tensor_of(graph, node.args[0]), tensor_of(graph, node.args[1])) for node in nodes]


def tensor_of(graph: GraphModule, node: Any) -> Tensor:
    assert isinstance(node, Node)
    found: Any = graph
    for name in str(node.target).split("."):
        found = getattr(found, name)
    return found


def in_order(rig: Rig, problem: Problem, kind: str) -> list[str]:
    """The names of the layers of a class, in the order of the forward pass."""
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: called.append(name))
        for name, module in rig.model.named_modules()
        if type(module).__name__ == kind
    ]
    with torch.no_grad():
        rig.forward(make_batch(problem.spec, 2))
    for hook in hooks:
        hook.remove()
    return called


def scale_of_norm(model: nn.Module, name: str) -> Tensor:
    """By which the batch norm after the convolution multiplies each channel; ones if another norm follows, which no
    convolution takes in."""
    norm = model.get_submodule(name.removesuffix("conv") + "norm")
    if isinstance(norm, nn.BatchNorm2d):
        assert norm.running_var is not None
        return norm.weight / (norm.running_var + norm.eps).sqrt()
    return torch.ones(model.get_parameter(f"{name}.weight").shape[0])


def codes_of(weight: Tensor) -> Tensor:
    """The codes of a weight that is rounded already."""
    return (weight / (weight.abs().amax((1, 2, 3), keepdim=True) / LARGEST)).round()


@pytest.mark.parametrize("problem", [SMALL, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
@torch.no_grad()
def test_a_graph_in_8_bits_has_the_codes_of_training(problem: Problem) -> None:
    with torch.enable_grad():
        rig = trained(problem)
    names, found = in_order(rig, problem, "FakeQuantizedConv2d"), written(rig, problem, CONVOLUTION)
    assert len(names) == len(found) > 2
    for name, (codes, scales) in zip(names, found, strict=True):
        trained_weight = rounded(rig.model.get_parameter(f"{name}.weight"))
        factor = scale_of_norm(rig.model, name)[:, None, None, None]
        assert torch.equal(codes.float(), codes_of(trained_weight) * factor.sign())
        wanted, dequantized = trained_weight * factor, codes * scales[:, None, None, None]
        assert (dequantized - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@torch.no_grad()
def test_a_graph_in_8_bits_has_the_linear_layers_of_training() -> None:
    problem = Auto().pose(replace(TRANSFORMER, num_layers=1), TOKENS)
    with torch.enable_grad():
        rig = trained(problem, num_steps=1)
    rig.model.get_parameter("blocks.0.mlp.up.weight")[3] *= 1e-4
    names, found = in_order(rig, problem, "FakeQuantizedLinear"), written(rig, problem, LINEAR)
    assert len(names) == len(found) - 1  # the last layer has 8 bits in the graph alone
    for name, (codes, scales) in zip(names, found[:-1], strict=True):
        layer: Any = rig.model.get_submodule(name)
        assert torch.equal(codes * scales[:, None], rounded(layer.weight))


def test_a_rounded_weight_stays_as_it_is() -> None:
    once = rounded(torch.randn(7, 5, 3, 3))
    twice = rounded(once)
    assert torch.equal(codes_of(once), codes_of(twice))
    assert torch.allclose(once, twice, rtol=1e-6, atol=0)


def test_gradients_pass_the_rounding_unchanged() -> None:
    weight = torch.randn(7, 5, 3, 3)
    weight[0], weight[1, 0, 0, 0], weight[2] = 0, -9, 1e-30
    gradient = torch.randn_like(weight)
    found = rounded(weight.requires_grad_())
    found.backward(gradient)
    assert torch.equal(weight.grad, gradient)  # pyright: ignore[reportArgumentType]
    assert found.isfinite().all()
    assert not found[0].any()
    assert torch.allclose(found.abs().amax((1, 2, 3)), weight.abs().amax((1, 2, 3)))


@pytest.mark.parametrize("model", ["resnet", "resnet_frozen"])
def test_convolutions_are_exchanged_and_their_tensors_stay(model: str) -> None:
    ours, plain = skeleton(PROBLEMS[model], knobs_of(qat="int8")), skeleton(PROBLEMS[model], knobs_of())
    names = [name for name, module in plain.named_modules() if type(module) is nn.Conv2d]
    assert [name for name, module in ours.named_modules() if type(module) is FakeQuantizedConv2d] == names
    assert not any(type(module) is nn.Conv2d for module in ours.modules())
    about = [{name: (x.shape, x.stride()) for name, x in each.state_dict().items()} for each in (ours, plain)]
    assert about[0] == about[1]


def test_a_rounded_weight_lies_in_memory_as_before() -> None:
    weight = torch.randn(7, 5, 3, 3).contiguous(memory_format=torch.channels_last)
    assert rounded(weight).stride() == weight.stride()


def test_a_convolution_computes_as_before_but_for_the_rounding() -> None:
    layer = nn.Conv2d(4, 6, (3, 1), stride=(2, 1), padding="valid", dilation=2, groups=2)
    x = torch.randn(2, 4, 9, 7)
    with torch.no_grad():
        layer.weight.copy_(rounded(layer.weight))
        assert torch.allclose(FakeQuantizedConv2d(layer)(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("group", "option"), [("ckpt", "every1"), ("stepping", "in_backward"), ("accum", "x2"), ("offload", "parameters")]
)
def test_other_knobs_compute_the_same_beside_it(group: str, option: str) -> None:
    if Fact.CUDA in KNOBS[group, option].needs():
        pytest.skip("needs a card")
    problem = PROBLEMS["resnet_group"]  # batch norm sees another batch in parts
    found, wanted = (train(problem, knobs_of(qat="int8", **more), [8, 9]) for more in ({group: option}, {}))
    band = KNOBS[group, option].band
    assert relative_error(found.gradients, wanted.gradients) <= band
    assert relative_error(*({"": torch.stack(each.losses)} for each in (found, wanted))) <= band


@pytest.mark.parametrize("model", ["resnet", "resnet_frozen"])
def test_its_memory_is_planned_as_it_is_measured(model: str) -> None:
    problem, knobs = PROBLEMS[model], knobs_of(qat="int8")
    measured, planned = peak_as_measured(problem, knobs, 6), peak_as_planned(problem, knobs, 6)
    assert measured.peak_bytes == planned.peak_bytes
    assert measured.by_kind_max == planned.by_kind_max
    assert measured.peak_bytes > peak_as_measured(problem, knobs_of(), 6).peak_bytes


def test_the_last_layer_and_what_is_not_asked_for_stay() -> None:
    vit = Auto().pose(HfConfig(name=tiny("vit")), VIT)

    def layers(choice: Layers) -> tuple[int, int]:
        kinds = [type(module).__name__ for module in skeleton(vit, knobs_of(qat=Int8(choice))).modules()]
        return kinds.count("FakeQuantizedLinear"), kinds.count("FakeQuantizedConv2d")

    assert layers(Layers.auto) == layers(Layers.linear) == (18, 0)
    assert layers(Layers.all) == (18, 1)
    assert not exchanged(skeleton(PROBLEMS["resnet"], knobs_of(qat="int8")))


@pytest.mark.parametrize("qat", ["int4", Int8(Layers.linear)])
def test_a_model_without_linear_layers_is_refused_what_rounds_those_alone(qat: Any) -> None:
    why = r"needs that the model has linear layers besides the last: this model has none: leave qat=none \(qat=int8 "
    with pytest.raises(Incompatible, match=why):
        assemble(PROBLEMS["resnet"], knobs_of(qat=qat), CPU)


@pytest.mark.slow
def test_a_resnet_trains_from_the_command_line(call: Callable[..., Outcome]) -> None:
    tiny_resnet = ["model=resnet", "model.layers=[1]", "model.width=8", "data=synthetic", "data.image_size=8"]
    outcome = call(*tiny_resnet, "qat=int8", "train.steps=2", "train.batch_size=8", "data.eval_samples=8")
    assert outcome.code == 0
    assert outcome.row["memory"]["peak_bytes"] == outcome.row["plan"]["allocated_bytes"]
