"""weights=stream: not a bit changes, and the device holds the weights of two blocks at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.held import held_bytes
from lowvram.core.host_file import file_of
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.rig import Rig
from lowvram.core.step import step
from lowvram.knobs.adapter import Lora
from lowvram.knobs.logits import ChunkedLogits
from lowvram.knobs.stepping import AfterBackward, InBackward, Norm
from lowvram.knobs.weights import StreamedWeights, stream
from lowvram.tasks import LanguageModel
from scripts.benchmarks.timed_link import TimedLink
from tests.knobs.on_host import DEEP, Choices, check_equal, check_goes_on, measured
from tests.laboratory import (
    CPU,
    DEVICES,
    PROBLEMS,
    TOKENS,
    Trained,
    knobs_of,
    make_batch,
    relative_error,
    train,
)

TOGETHER: dict[str, Choices] = {
    "plain": {},
    "parts": {"accum": "x4", "ckpt": "every2", "stepping": AfterBackward(clip=0.5)},
    "fp16": {"precision": "fp16", "accum": "x2"},
    "chunked": {"logits": ChunkedLogits(chunk_tokens=40), "accum": "x2"},
    "tiles": {"tile": "blocks", "ckpt": "every1", "stepping": InBackward()},
    "two passes": {"stepping": InBackward(0.5, Norm.two_passes)},
    "sums": {"stepping": InBackward(0.5), "accum": "x2"},
    "masters": {"stepping": "cpu_offload", "accum": "x2"},
    "activations": {"offload": "activations", "ckpt": "every1"},
    "other weights in each step": {"adapter": "badam"},
    "resting weights in tiles": {"adapter": "badam", "tile": "blocks", "ckpt": "every1", "stepping": "cpu_offload"},
    "adapters": {"adapter": Lora(rank=2)},
    "adapters of weights in 4 bits": {"adapter": "qlora", "ckpt": "every1", "tile": "blocks"},
    "blocks are left out": {"depth": "layer_drop"},
    "matrices": {"optimizer": "galore", "ckpt": "selective"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet", "resnet_frozen"])
@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("choices", TOGETHER.values(), ids=TOGETHER)
def test_not_a_bit_changes(choices: Choices, resident: int, problem: str, device: torch.device) -> None:
    if problem != "transformer_dropout" and {"logits", "adapter", "tile"} & {*choices}:
        pytest.skip("not of a ResNet")
    found, wanted = (
        train(PROBLEMS[problem], knobs_of(**choices, weights=option), [32, 32, 27], device=device)
        for option in (StreamedWeights(resident), "device")
    )
    check_equal(found, wanted, choices, device)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_device_holds_two_blocks_and_the_host_all_the_rest(device: torch.device) -> None:
    _, alone = measured(device, {})
    rig, peak = measured(device, {"weights": "stream"})
    in_blocks = {parameter for block in rig.structure.blocks for parameter in block.parameters()}
    head = rig.structure.head
    assert head is not None
    staying = [each for each in rig.model.parameters() if each not in in_blocks and each is not head.weight]
    visiting = [*rig.structure.blocks[0].parameters()]
    places = sum(-(-each.nbytes // 256) * 256 for each in [*visiting, *visiting, *staying])
    assert peak.by_kind_max[Kind.PARAMETERS] <= places + head.weight.nbytes + 512
    assert peak.by_kind_max[Kind.PARAMETERS] < alone.by_kind_max[Kind.PARAMETERS] / 2.5
    assert peak.by_kind_max[Kind.GRADIENTS] < alone.by_kind_max[Kind.GRADIENTS] / 5
    assert peak.by_kind_max[Kind.OPTIMIZER] == 0
    assert held_bytes(rig.model, rig.stepper)[Kind.PARAMETERS] == -(-places // 512) * 512
    assert all(host.holds(parameter) for parameter in rig.model.parameters())


def test_what_travels_is_counted() -> None:
    """The last two blocks of a forward pass, and the first two of a backward pass, are there already."""
    choices: Choices = {"accum": "x2"}
    rig, batch = assemble(DEEP, knobs_of(weights="stream", **choices), CPU), make_batch(TOKENS, 32)
    block = sum(parameter.nbytes for parameter in rig.structure.blocks[0].parameters())
    whole = sum(parameter.nbytes for parameter in rig.model.parameters())
    head, rows = rig.structure.head, batch.inputs.numel() * 32 * 4  # of the embedding
    assert head is not None
    staying = whole - 8 * block - head.weight.nbytes
    before = replace(host.traffic)
    step(rig, batch)
    assert host.traffic.to_host_bytes - before.to_host_bytes == 2 * whole
    visits = (8 + 6) + (6 + 6)
    assert (
        host.traffic.to_device_bytes - before.to_device_bytes
        == visits * block + staying + rows + 2 * head.weight.nbytes
    )


def test_blocks_that_stay_arrive_once_a_step() -> None:
    rig, batch = assemble(DEEP, knobs_of(weights=StreamedWeights(resident=8), accum="x4"), CPU), make_batch(TOKENS, 32)
    block = sum(parameter.nbytes for parameter in rig.structure.blocks[0].parameters())
    for _ in range(2):
        before = host.traffic.to_device_bytes
        step(rig, batch)
        assert 8 * block <= host.traffic.to_device_bytes - before < 10 * block


def test_the_number_of_blocks_that_stay_is_not_negative() -> None:
    with pytest.raises(BadInput, match=r"weights\.resident"):
        StreamedWeights(resident=-1)


@pytest.mark.parametrize("is_seen", [True, False])
def test_weights_that_somebody_writes_to_arrive_anew(is_seen: bool) -> None:
    """As where a snapshot is loaded between two evaluations; also by ways that their versions don't count."""
    rig, batch = assemble(DEEP, knobs_of(weights="stream"), CPU), make_batch(TOKENS, 4)
    with torch.no_grad():
        first = rig.forward(rig.move(batch))
        for parameter in rig.model.parameters():
            (parameter if is_seen else parameter.data).mul_(1.5)
        second = rig.forward(rig.move(batch))
    alone = assemble(DEEP, knobs_of(), CPU)
    with torch.no_grad():
        for parameter in alone.model.parameters():
            parameter.mul_(1.5)
        assert torch.equal(second, alone.forward(alone.move(batch)))
    assert not torch.equal(first, second)


@final
class Leaks(Knob):
    """The first block's result, doubled, reaches the loss past the other blocks."""

    stage = Stage.BUILD

    def apply(self, rig: Rig) -> Rig:
        leaked: list[Tensor] = []

        def keep(block: Any, inputs: Any, outputs: Tensor) -> None:
            leaked[:] = [block.get_submodule("attention_norm")(outputs)]

        rig.structure.blocks[0].register_forward_hook(keep)
        criterion = rig.criterion
        return replace(rig, criterion=lambda outputs, part: criterion(outputs, part) + leaked[0].sum())


def test_a_weight_is_never_read_that_has_been_replaced() -> None:
    """Here the backward pass reaches a block first past its output: torch sees that another block's weights are in the
    place of its own."""
    knobs = {**knobs_of(weights="stream"), "leaks": Leaks()}
    rig = assemble(DEEP, knobs, CPU)
    with pytest.raises(Incompatible, match=r"weights=device.*modified by an inplace operation"):
        step(rig, make_batch(TOKENS, 4))


@final
class Wrapped:
    """Holds a tensor where nobody looks for one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@final
class Wraps(Knob):
    """The first block returns an object, and the second one is given what is in it."""

    stage = Stage.BUILD

    def apply(self, rig: Rig) -> Rig:
        def wrap(block: nn.Module, inputs: Any, outputs: Any) -> Wrapped:
            return Wrapped(outputs)

        first, second, *_ = rig.structure.blocks
        first.register_forward_hook(wrap)
        second.register_forward_pre_hook(lambda block, inputs: (inputs[0].tensor, *inputs[1:]))
        return rig


def test_a_block_whose_result_hides_its_tensors_is_refused() -> None:
    rig = assemble(DEEP, {**knobs_of(weights="stream"), "wraps": Wraps()}, CPU)
    with pytest.raises(Incompatible, match="Block returns a Wrapped, in which no tensor is found"):
        step(rig, make_batch(TOKENS, 4))


def test_a_model_that_a_backward_pass_computes_again_loses_no_gradient() -> None:
    gradients: list[dict[str, Tensor]] = []
    for weights in ("stream", "device"):
        rig = assemble(DEEP, knobs_of(weights=weights), CPU)
        parts = [rig.move(make_batch(TOKENS, num_samples)) for num_samples in (4, 8)]
        losses = [checkpoint(rig.forward, part, use_reentrant=False).square().mean() for part in parts]
        sum(losses, torch.zeros(())).backward()
        gradients.append({name: each.grad for name, each in rig.model.named_parameters() if each.grad is not None})
    assert relative_error(*gradients) == 0


class WithMemory(LanguageModel):
    """Its model's weights have memory and values from the start, on the CPU."""

    def make_model(self) -> nn.Module:
        model, draw = super().make_model().to_empty(device="cpu"), torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.1, generator=draw)
        return model


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_weights_that_come_with_memory_stay_on_the_host(device: torch.device) -> None:
    problem = WithMemory(DEEP.model, DEEP.spec)
    rig = assemble(problem, knobs_of(weights="stream"), device)
    assert all(map(host.holds, rig.model.parameters()))
    assert {parameter.device.type for parameter in rig.model.parameters()} == {"cpu"}
    found, wanted = (train(problem, knobs_of(weights=option), [8, 8], device=device) for option in ("stream", "device"))
    check_equal(found, wanted, {}, device)


def test_a_backward_pass_that_fails_leaves_nothing_behind() -> None:
    rig, batch = assemble(DEEP, knobs_of(weights="stream"), CPU), make_batch(TOKENS, 8)
    alone = assemble(DEEP, knobs_of(), CPU)

    def fail(gradient: Tensor) -> None:
        raise RuntimeError("no more")

    handle = rig.structure.blocks[4].register_forward_hook(lambda block, _, out: out.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="no more"):
        step(rig, batch)
    handle.remove()
    for parameter in rig.model.parameters():
        parameter.grad = None
    found, wanted = step(rig, batch), step(alone, batch)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1].grad_norm, wanted[1].grad_norm)
    assert relative_error(dict(rig.model.named_parameters()), dict(alone.model.named_parameters())) == 0


class Hasty(TimedLink):
    """Nobody waits for what is sent."""

    def send(self, destination: Tensor, source: Tensor) -> Callable[[], None]:
        super().send(destination, source)
        return lambda: None


LATE: dict[str, Choices] = {
    "plain": {},
    "parts": {"accum": "x2", "weights": StreamedWeights(resident=1)},
    "at once": {"stepping": InBackward(), "ckpt": "every2"},
}


def trained_late(monkeypatch: pytest.MonkeyPatch, kind: type[TimedLink], seed: int, choices: Choices) -> Trained:
    """With copies by threads, each of which is late by chance."""
    draw = random.Random(seed)
    monkeypatch.setattr(stream, "link_to", lambda device: kind(lambda num_bytes: draw.random() * 0.002))
    return train(DEEP, knobs_of(**{"weights": "stream", **choices}), [8, 8, 8])


@pytest.mark.parametrize("choices", LATE.values(), ids=LATE)
def test_late_copies_change_nothing(monkeypatch: pytest.MonkeyPatch, choices: Choices) -> None:
    """On the emulated device with 200 seeds, and with mistakes: tests/emulated_cuda/races.py."""
    wanted = train(DEEP, knobs_of(**{**choices, "weights": "device"}), [8, 8, 8])
    found = trained_late(monkeypatch, TimedLink, 0, choices)
    assert torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))
    assert relative_error(found.parameters, wanted.parameters) == 0


def test_a_copy_that_nobody_waits_for_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = train(DEEP, knobs_of(), [8, 8, 8])
    found = trained_late(monkeypatch, Hasty, 0, {})
    assert not torch.equal(torch.stack(found.losses), torch.stack(wanted.losses))


ELSEWHERE: Choices = {"weights": "stream"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("stopped", "resumed"), [(ELSEWHERE, {}), ({}, ELSEWHERE), (ELSEWHERE, {"weights": StreamedWeights(resident=2)})]
)
def test_a_run_goes_on_to_the_last_digit_with_it_or_without(tmp_path: Path, stopped: Choices, resumed: Choices) -> None:
    check_goes_on(tmp_path, {}, stopped, resumed)


def test_without_whole_params() -> None:
    """Whoever keeps a weight of the forward pass has another one's values in the backward pass."""
    rig, seen = assemble(DEEP, knobs_of(weights="stream"), CPU), list[Tensor]()
    norm = next(module for module in rig.structure.blocks[0].modules() if isinstance(module, nn.LayerNorm))
    norm.register_forward_hook(lambda module, *_: seen.append(module.get_parameter("weight")))
    with torch.no_grad():
        norm.get_parameter("weight").fill_(2.0)
    rig.forward(rig.move(make_batch(TOKENS, 4)))
    assert not torch.equal(seen[0], norm.get_parameter("weight"))


def test_without_device_weights() -> None:
    """FSDP2's shards, too, would have to be in host memory, and would be taken there a second time."""
    rig = assemble(DEEP, knobs_of(weights="stream"), CPU)
    assert all(map(host.holds, rig.model.parameters()))


# In a file

FILED: dict[str, Choices] = {
    "states of torch's": {"stepping": InBackward(), "ckpt": "every1"},
    "states in few bits": {"precision": "bf16_split", "optimizer": "adamw_companded"},
    "adapters of weights in 4 bits": {"adapter": "qlora", "ckpt": "every1"},
}


@pytest.mark.parametrize("choices", FILED.values(), ids=FILED)
def test_weights_and_states_in_a_file_are_the_same(choices: Choices, tmp_path: Path) -> None:
    found, wanted = (
        train(PROBLEMS["transformer"], knobs_of(**choices, weights=StreamedWeights(folder=folder)), [32, 32, 27])
        for folder in (str(tmp_path), None)
    )
    check_equal(found, wanted, choices, CPU)
    assert not list(tmp_path.iterdir())


def test_weights_and_states_are_in_the_file(tmp_path: Path) -> None:
    rig = assemble(DEEP, knobs_of(weights=StreamedWeights(folder=str(tmp_path))), CPU)
    for seed in range(2):
        step(rig, make_batch(TOKENS, 8, seed=seed))
        states = [each for each in tree_leaves(rig.stepper.state_dict()) if isinstance(each, Tensor)]
        large = [each for each in [*rig.model.parameters(), *states] if each.nbytes >= 4096]
        assert len(large) > 3 * len(rig.structure.blocks)
        assert all(file_of(each) is not None for each in large)


def test_training_in_a_file_goes_on(tmp_path: Path) -> None:
    in_file: Choices = {"weights": StreamedWeights(folder=str(tmp_path)), "stepping": InBackward()}
    check_goes_on(tmp_path, {"stepping": InBackward()}, in_file, in_file)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"weights\.folder=.*nowhere': must be null or a folder"):
        StreamedWeights(folder=str(tmp_path / "nowhere"))
