"""offload=parameters: not a bit changes, and the device holds one block of weights at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.ledger import ledger
from lowvram.core.mesh import data_ranks
from lowvram.core.peak import ROUND_BYTES
from lowvram.core.rig import Rig
from lowvram.core.shards import local
from lowvram.core.step import step
from lowvram.knobs.logits import ChunkedLogits, TiledLogits
from lowvram.knobs.offload.parameters import mesh_of_one
from lowvram.knobs.stepping import AfterBackward, InBackward
from lowvram.tasks import Auto
from tests.knobs.on_host import DEEP, Choices, band_on_card, check_equal, check_goes_on, measured, to_cpu
from tests.laboratory import CPU, DEVICES, PROBLEMS, TOKENS, TRANSFORMER, knobs_of, make_batch, relative_error, train

TOGETHER: dict[str, Choices] = {
    "plain": {},
    "parts": {"accum": "x4", "ckpt": "every2", "stepping": AfterBackward(clip=0.5)},
    "fp16": {"precision": "fp16", "accum": "x2"},
    "chunked": {"logits": ChunkedLogits(chunk_tokens=40), "accum": "x2"},
}


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet", "resnet_frozen"])
@pytest.mark.parametrize("choices", TOGETHER.values(), ids=TOGETHER)
def test_not_a_bit_changes(choices: Choices, problem: str, device: torch.device) -> None:
    found, wanted = (
        train(PROBLEMS[problem], knobs_of(**choices, offload=option), [32, 32, 27], device=device)
        for option in ("parameters", "none")
    )
    check_equal(found, wanted, choices, device)


@final
class ReturnsView(Knob):
    """The model returns a view, as transformers' GPT-2 does."""

    stage = Stage.BUILD

    def apply(self, rig: Rig) -> Rig:
        rig.model.register_forward_hook(lambda model, inputs, outputs: outputs.view(outputs.shape))
        return rig


def test_a_model_that_returns_a_view_trains_without_a_warning_in_every_step() -> None:
    train(PROBLEMS["transformer"], {**knobs_of(offload="parameters"), "view": ReturnsView()}, [32])


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_device_holds_one_block_and_the_host_all_the_rest(device: torch.device) -> None:
    _, alone = measured(device, {})
    rig, peak = measured(device, {"offload": "parameters"})
    blocks = rig.structure.blocks
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    head = rig.structure.head
    assert head is not None
    staying = [each for each in rig.model.parameters() if each not in in_blocks and each is not head.weight]
    visiting = [*blocks[0].parameters(), *staying]
    assert peak.by_kind_max[Kind.PARAMETERS] == sum(-(-each.nbytes // ROUND_BYTES) * ROUND_BYTES for each in visiting)
    assert peak.by_kind_max[Kind.PARAMETERS] < alone.by_kind_max[Kind.PARAMETERS] / 5
    assert peak.by_kind_max[Kind.GRADIENTS] < alone.by_kind_max[Kind.GRADIENTS] / 5
    assert peak.by_kind_max[Kind.OPTIMIZER] == 0
    kept = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER)
    assert peak.by_kind_max[Kind.HOST] >= sum(alone.by_kind_max[kind] for kind in kept) * 0.99
    if device.type == "cpu":  # a card's memory is told apart by the device
        assert all(host.holds(parameter) for parameter in rig.model.parameters())
    assert all(local(parameter).device.type == "cpu" for parameter in rig.model.parameters())


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_host_updates_its_weights_in_its_own_memory(device: torch.device) -> None:
    """An update of 16-bit weights computes in fp32: the temporary tensors are where the weights are."""
    _, alone = measured(device, {"precision": "bf16_pure"})
    _, peak = measured(device, {"precision": "bf16_pure", "offload": "parameters"})
    assert peak.by_kind_max[Kind.OTHER] < alone.by_kind_max[Kind.OTHER] / 4


def test_what_travels_is_counted() -> None:
    rig, batch = assemble(DEEP, knobs_of(offload="parameters", accum="x2"), CPU), make_batch(TOKENS, 32)
    weights = sum(parameter.numel() * 4 for parameter in rig.model.parameters())
    blocks = sum(parameter.numel() * 4 for block in rig.structure.blocks for parameter in block.parameters())
    rows = batch.inputs.numel() * 32 * 4  # of the embedding; its whole weight goes to the device for the head
    before = replace(host.traffic)
    step(rig, batch)
    assert host.traffic.to_device_bytes - before.to_device_bytes == 2 * (weights + blocks) + rows
    assert host.traffic.to_host_bytes - before.to_host_bytes == 2 * weights


@pytest.mark.sampled
@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "choices",
    [{"accum": "x2"}, {"stepping": InBackward(clip=0.5)}, {"precision": "fp16"}],
    ids=["parts", "clip", "fp16"],
)
def test_with_tiles_of_the_last_weight_numbers_are_the_same(choices: Choices, tied: bool, device: torch.device) -> None:
    problem = Auto().pose(replace(TRANSFORMER, tied_embeddings=tied), TOKENS)
    found, wanted = (
        train(problem, knobs_of(**choices, logits=TILES, offload=option), [32, 32, 27], device=device)
        for option in ("parameters", "none")
    )
    band = 2e-6 if device == CPU and "precision" not in choices else band_on_card(choices)
    assert relative_error({"": torch.stack(found.losses)}, {"": torch.stack(wanted.losses)}) <= band
    assert relative_error(to_cpu(found.gradients), to_cpu(wanted.gradients)) <= band


TILES = TiledLogits(chunk_tokens=40)  # of the 256 targets of a batch: seven tiles
WIDE = Auto().pose(replace(TRANSFORMER, vocab_size=5000), TOKENS)


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_neither_the_last_weight_nor_its_gradient_is_whole_on_the_device(device: torch.device) -> None:
    knobs = knobs_of(offload="parameters", logits=TILES)
    rig, batch = assemble(WIDE, knobs, device), make_batch(TOKENS, 32).to(device)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors(), device) as peak:
        step(rig, batch)
    head = rig.structure.head
    assert head is not None
    assert max(peak.by_kind_max[kind] for kind in (Kind.PARAMETERS, Kind.GRADIENTS)) < head.weight.nbytes / 3
    assert local(head.weight).device.type == "cpu"
    assert local(head.weight).is_pinned() == (device.type == "cuda")


def test_while_a_weight_gets_its_initial_values_fp32_is_gone_before_it_is_copied() -> None:
    with ledger() as peak:
        rig = assemble(WIDE, knobs_of(offload="parameters", precision="bf16_pure"), CPU)
    head = rig.structure.head
    assert head is not None
    numel = head.weight.numel()
    assert peak.peak_bytes < numel * 9  # beside copies in 16 bits; on a CPU the one of the host counts, too


ELSEWHERE: Choices = {"offload": "parameters"}
IN_TILES: Choices = {**ELSEWHERE, "logits": TILES}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("whole", "stopped", "resumed"),
    [({}, ELSEWHERE, {}), ({}, {}, ELSEWHERE), ({}, ELSEWHERE, ELSEWHERE), (IN_TILES, IN_TILES, IN_TILES)],
)
def test_a_run_goes_on_to_the_last_digit_with_it_or_without(
    tmp_path: Path, whole: Choices, stopped: Choices, resumed: Choices
) -> None:
    check_goes_on(tmp_path, whole, stopped, resumed)


def test_without_whole_params() -> None:
    """Whoever keeps a weight of the forward pass, as norms=output does, has none in the backward pass."""
    rig, seen = assemble(PROBLEMS["transformer"], knobs_of(offload="parameters"), CPU), list[Tensor]()
    norm = next(module for module in rig.structure.blocks[0].modules() if isinstance(module, nn.LayerNorm))
    norm.register_forward_hook(lambda module, *_: seen.append(module.get_parameter("weight")))
    rig.forward(rig.move(make_batch(TOKENS, 4)))
    assert seen[0].untyped_storage().nbytes() == 0


def test_without_whole_updates() -> None:
    """Adafactor's sums over rows and columns can't be taken over weights that FSDP2 holds (torch 2.13), alone too."""
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh_of_one(CPU), [Shard(0)]))
    assert data_ranks().size == 1
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="placement"):
        torch.optim.Adafactor([weight]).step()
