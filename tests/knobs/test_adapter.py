"""adapter: what trains and what doesn't, where values come from, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowvram.compat.torch_modules import BatchNorm
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.probes.blocks import FoundBlocks
from lowvram.core.probes.draws import NO_RANDOMNESS, FirstDraw
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.core.structure import Blocks, Structure
from lowvram.knobs.adapter import Freeze, Lora, QLora
from lowvram.planning.target import Target
from lowvram.planning.trace.events import Phase
from lowvram.planning.trace.tracer import trace
from lowvram.tasks import Auto, Problem
from tests.laboratory import (
    CPU,
    IMAGES,
    PROBLEMS,
    TOKENS,
    TRANSFORMER,
    InDouble,
    knobs_of,
    make_batch,
    peak_as_planned,
    relative_error,
    saved_bytes,
    train,
)

pytestmark = pytest.mark.medium

ADDING = [Lora(), QLora()]


def trainable(rig: Rig) -> set[str]:
    return {name for name, parameter in rig.model.named_parameters() if parameter.requires_grad}


def rig_of(problem: str, **choices: str | Knob) -> Rig:
    return assemble(PROBLEMS[problem], knobs_of(**choices), CPU)


# freeze


@pytest.mark.parametrize(
    ("problem", "names", "wanted"),
    [
        ("resnet", None, {"head.weight", "head.bias"}),
        ("transformer", None, {"token_embedding.weight"}),  # which the head shares
        ("transformer", ["blocks.2.mlp.up"], {"blocks.2.mlp.up.weight", "blocks.2.mlp.up.bias"}),
        ("resnet", ["head.bias", "0.last.norm"], {"head.bias", "blocks.0.last.norm.weight", "blocks.0.last.norm.bias"}),
    ],
)
def test_the_head_trains_or_the_parts_that_are_named(problem: str, names: list[str] | None, wanted: set[str]) -> None:
    rig = rig_of(problem, adapter=Freeze(names))
    before = {name: tensor.clone() for name, tensor in rig.model.named_parameters()}
    assert step(rig, make_batch(PROBLEMS[problem].spec, 8))[1].applied
    assert trainable(rig) == wanted
    assert {name for name, tensor in rig.model.named_parameters() if not tensor.equal(before[name])} == wanted


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
def test_what_trains_has_the_gradients_that_it_has_when_all_train(problem: str) -> None:
    some = train(PROBLEMS[problem], knobs_of(adapter=Freeze(["blocks.1", "head"])), [8]).gradients
    whole = train(PROBLEMS[problem], knobs_of(), [8]).gradients
    assert 0 < len(some) < len(whole)
    assert relative_error(some, {name: whole[name] for name in some}) == 0


def test_a_name_in_no_parameter_is_refused_with_those_that_are() -> None:
    with pytest.raises(BadInput, match=r"adapter.train='layers': .* there are token_embedding, weight, blocks,"):
        rig_of("transformer", adapter=Freeze(["head", "layers"]))


def test_no_name_at_all_is_refused() -> None:
    with pytest.raises(BadInput, match=r"adapter.train='\[\]': must be null \(the head\) or a list"):
        Freeze([])


class Headless(InDouble):
    def structure(self, model: nn.Module) -> Structure:
        known = super().structure(model)
        stated = {**known.stated, Blocks(): lambda known: FoundBlocks((), None, has_plain_blocks=False)}
        return replace(known, stated=stated, found={})


def test_freeze_needs_a_head_or_names() -> None:
    task = Headless(PROBLEMS["transformer"])
    with pytest.raises(Incompatible, match=r"needs that the task knows the model's last layer: .*adapter.train"):
        assemble(task, {"adapter=freeze": Freeze()}, CPU)
    assemble(task, {"adapter=freeze": Freeze(["norm"])}, CPU)


@pytest.mark.parametrize("adapter", [Freeze(), *ADDING])
def test_batch_norm_that_does_not_train_keeps_its_statistics(adapter: Knob) -> None:
    rig = rig_of("resnet", adapter=adapter)
    rig.model.train()
    before = {name: buffer.clone() for name, buffer in rig.model.named_buffers()}
    step(rig, make_batch(IMAGES, 8))
    assert all(buffer.equal(before[name]) for name, buffer in rig.model.named_buffers())
    assert "normalise by the statistics that they came with" in (adapter.caveat(rig.model) or "")
    assert adapter.caveat(rig_of("resnet_group", adapter=adapter).model) is None


def test_batch_norm_that_trains_goes_on() -> None:
    rig = rig_of("resnet", adapter=Freeze(["blocks.0.first.norm"]))
    rig.model.train()
    norms = {name for name, module in rig.model.named_modules() if isinstance(module, BatchNorm) and module.training}
    assert norms == {"blocks.0.first.norm"}


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_a_head_alone_gets_its_gradient_when_it_is_sharded_and_its_logits_chunked(problem: str) -> None:
    choices: dict[str, str | Knob] = {"adapter": "freeze", "logits": "chunked", "optimizer": "sgd"}
    found = train(PROBLEMS[problem], knobs_of(**choices, offload="parameters"), [8]).gradients
    assert relative_error(found, train(PROBLEMS[problem], knobs_of(**choices), [8]).gradients) < 2e-6


# lora and qlora


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
def test_adapters_start_as_nothing_beside_the_model_that_the_seed_makes(problem: str) -> None:
    rig, plain = rig_of(problem, adapter="lora"), rig_of(problem)
    values = {name.replace(".base_layer.", "."): value for name, value in rig.model.state_dict().items()}
    assert all(value.equal(values[name]) for name, value in plain.model.state_dict().items())
    batch = make_batch(PROBLEMS[problem].spec, 4)
    assert step(rig, batch)[0] == step(plain, batch)[0]


@pytest.mark.parametrize("adapter", ADDING)
@pytest.mark.parametrize("others", [{}, {"ckpt": "every1", "precision": "bf16", "stepping": "in_backward"}])
def test_their_initial_values_belong_to_seed_and_name(adapter: Knob, others: dict[str, str]) -> None:
    reference = rig_of("transformer", adapter="lora").model.state_dict()
    model = rig_of("transformer", adapter=adapter, **others).model
    added = {name: value for name, value in model.state_dict().items() if ".lora_" in name}
    assert len(added) == 2 * 4 * 3
    for name, value in added.items():
        assert value.equal(reference[name])
        bound = value.shape[1] ** -0.5  # of peft's kaiming_uniform_(a=sqrt(5))
        assert not value.any() if ".lora_B." in name else bound / 2 < value.abs().max() <= bound


@pytest.mark.parametrize("adapter", [*ADDING, Lora(rank=2, alpha=3.0)])
def test_their_gradients_follow_from_those_of_the_weights(adapter: Lora) -> None:
    """W + s B A with B zero: the gradient of B is s G A^T, that of A is zero."""
    choices = {"adapter": adapter}
    task, plain = InDouble(PROBLEMS["transformer"]), InDouble(PROBLEMS["transformer"])
    found = train(task, knobs_of(**choices, optimizer="sgd"), [8], lr=0.0)
    whole = train(plain, knobs_of(optimizer="sgd"), [8]).gradients
    wanted = {}
    for name in found.gradients:
        layer = name.partition(".lora_")[0]
        first = found.parameters[f"{layer}.lora_A.default.weight"]
        change = adapter.alpha / adapter.rank * whole[f"{layer}.weight"] @ first.T
        wanted[name] = change if ".lora_B." in name else torch.zeros_like(found.gradients[name])
    error = relative_error(found.gradients, wanted)
    assert error < 1e-12 if type(adapter) is Lora else 1e-3 < error < 0.3


@pytest.mark.parametrize(
    ("problem", "adapter", "wanted"),
    [
        ("transformer", Lora(), 12),
        ("transformer", Lora(targets=["qkv", "blocks.0.mlp"]), 5),
        ("resnet", Lora(), 7),  # convolutions: the blocks have no linear layer
        ("resnet", QLora(targets=["blocks.1"]), 2),
    ],
)
def test_targets_get_two_matrices_and_nothing_else_trains(problem: str, adapter: Lora, wanted: int) -> None:
    rig = rig_of(problem, adapter=adapter)
    names = trainable(rig)
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in names)
    assert len(names) == 2 * wanted
    assert step(rig, make_batch(PROBLEMS[problem].spec, 8))[1].applied


def test_named_layers_train_whole_beside_them() -> None:
    rig = rig_of("resnet", adapter=QLora(train=["head", "blocks.0.first.conv"]))
    wholes = {name for name in trainable(rig) if ".lora_" not in name}
    assert wholes == {"head.weight", "head.bias", "blocks.0.first.conv.weight"}
    assert step(rig, make_batch(IMAGES, 8))[1].applied


@pytest.mark.sampled
@pytest.mark.parametrize("problem", ["transformer", "resnet"])
@pytest.mark.parametrize("kind", [Lora, QLora])
def test_matrix_a_can_stay_as_it_was_drawn(problem: str, kind: type[Lora]) -> None:
    """B then has the gradient that it has beside an A that trains, and A has none."""
    both, only_b = (rig_of(problem, adapter=kind(train_a=train_a)) for train_a in (True, False))
    assert trainable(only_b) == {name for name in trainable(both) if ".lora_B." in name}
    before = {name: tensor.clone() for name, tensor in only_b.model.named_parameters()}
    assert step(only_b, make_batch(PROBLEMS[problem].spec, 8))[1].applied
    changed = {name for name, tensor in only_b.model.named_parameters() if not tensor.equal(before[name])}
    assert changed == trainable(only_b)
    some, all_of_them = (
        train(PROBLEMS[problem], knobs_of(adapter=kind(train_a=train_a)), [8]).gradients for train_a in (False, True)
    )
    assert relative_error(some, {name: all_of_them[name] for name in some}) == 0


def test_dropout_of_adapters_is_random() -> None:
    plain, rig = (
        assemble(PROBLEMS["transformer"], knobs_of(adapter=Lora(dropout=dropout), ckpt="every1"), CPU)
        for dropout in (0.0, 0.5)
    )
    assert plain.structure.get(FirstDraw()) is None
    assert NO_RANDOMNESS in Lora(dropout=0.5).breaks() - Lora(dropout=0.0).breaks()
    assert step(rig, make_batch(TOKENS, 4))[1].applied


def test_without_trained_blocks() -> None:
    """Of the layers of the blocks nothing trains that a mask could keep at 0: nothing at all, or the factors of a
    product, which has no zeros where one of them has."""
    for adapter, trains in ((Freeze(), False), (Lora(), True)):
        rig = rig_of("transformer", adapter=adapter)
        blocks = {name: weight for name, weight in rig.model.named_parameters() if "blocks." in name}
        trained = [name for name, weight in blocks.items() if weight.requires_grad]
        assert bool(trained) is trains
        assert all("lora_" in name for name in trained)
        with pytest.raises(Incompatible, match=r"the weights of the model's blocks train, and adapter=.* ends that"):
            rig_of("transformer", adapter=adapter, sparsity="magnitude")


def test_without_no_randomness() -> None:
    """What the compiler recomputes draws other numbers: it refuses, as it does for the model's own dropout."""
    with pytest.raises(Incompatible, match=r"draws no random numbers, and adapter=Lora.* ends that"):
        assemble(PROBLEMS["transformer"], knobs_of(ckpt="compiler", adapter=Lora(dropout=0.5)), CPU)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lora(rank=0), "adapter.rank=0: must be at least 1"),
        (lambda: Lora(alpha=0.0), "adapter.alpha=0.0: must be more than 0"),
        (lambda: QLora(dropout=1.0), "adapter.dropout=1.0: must be at least 0"),
        (lambda: Lora(targets=[]), r"adapter.targets='\[\]': must be null"),
        (
            lambda: rig_of("transformer", adapter=Lora(targets=["query"])),
            "adapter.targets='query': .*attention, qkv,",
        ),
        (lambda: rig_of("transformer", adapter=Lora(targets=["head"])), "adapter.targets='head': .* but the head"),
        (lambda: rig_of("transformer", adapter=Lora(train=["foo"])), "adapter.train='foo': .* the model's layers"),
        (lambda: rig_of("transformer", adapter=QLora(train=["blocks"])), "adapter.train=.*no layer is left"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


# Memory

WIDE_BLOCKS = 4
WIDE = Auto().pose(replace(TRANSFORMER, width=128, num_layers=WIDE_BLOCKS), TOKENS)


def planned(problem: Problem, adapter: str) -> dict[Kind, int]:
    return peak_as_planned(problem, knobs_of(adapter=adapter), 2).by_kind_max


@pytest.mark.sampled
@pytest.mark.parametrize("ckpt", ["none", "every2"])
@pytest.mark.parametrize("kind", [Lora, QLora])
def test_no_input_is_kept_for_a_matrix_a_that_stays_as_it_was(kind: type[Lora], ckpt: str) -> None:
    """In each block, those of `qkv`, `up` and `down`. Attention keeps its result, which is the input of the fourth."""
    batch = make_batch(TOKENS, 4)
    kept = [saved_bytes(WIDE, knobs_of(adapter=kind(train_a=train_a), ckpt=ckpt), batch) for train_a in (True, False)]
    inputs_bytes = 4 * batch.inputs.numel() * (128 + 128 + 4 * 128)
    num_blocks = WIDE_BLOCKS if ckpt == "none" else WIDE_BLOCKS // 2
    assert kept[0] - kept[1] == num_blocks * inputs_bytes


@pytest.mark.parametrize("adapter", ["lora", "qlora"])
def test_gradients_and_state_are_those_of_the_adapters(adapter: str) -> None:
    full, small = planned(WIDE, "none"), planned(WIDE, adapter)
    kinds = (Kind.GRADIENTS, Kind.OPTIMIZER)
    share = sum(small[kind] for kind in kinds) / sum(full[kind] for kind in kinds)
    rigs = (assemble(WIDE, knobs_of(adapter=choice), CPU) for choice in (adapter, "none"))
    few, many = (sum(parameter.numel() for parameter in rig.trainable) for rig in rigs)
    assert few / many <= share < 1.1 * few / many


def test_weights_in_4_bits_are_planned_as_such() -> None:
    """Half a byte each, and a scale of four bytes for each 64; the rest as before."""
    plain, small = planned(WIDE, "lora")[Kind.PARAMETERS], planned(WIDE, "qlora")[Kind.PARAMETERS]
    num_weights = 4 * 12 * 128**2
    pairs = 4 * 4 * 2048
    assert plain - small == num_weights * 4 - num_weights // 2 - num_weights // 64 * 4 - pairs


def test_packing_takes_one_wide_weight_and_the_plan_sees_it() -> None:
    problem = Auto().pose(replace(TRANSFORMER, width=1024, num_layers=2), TOKENS)
    sums = trace(problem, knobs_of(adapter="qlora"), 2, Target()).sums()
    last_bytes, widest_bytes = sums.by_kind_max[Kind.PARAMETERS], 4 * 4 * 1024**2
    assert last_bytes + 0.9 * widest_bytes < sums.by_phase[Phase.BUILD] < last_bytes + 2 * widest_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_wide_weight_is_kept_for_the_backward_pass(precision: str) -> None:
    lora, qlora = (
        peak_as_planned(WIDE, knobs_of(adapter=adapter, precision=precision), 2).by_kind_max[Kind.ACTIVATIONS]
        for adapter in ("lora", "qlora")
    )
    widest_bytes = 3 * 4 * 128 * 512  # one weight, while it is made
    assert qlora < lora + widest_bytes
