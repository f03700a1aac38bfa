"""Several ranks against one process at the same logical batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard, distribute_tensor

import lowvram
from lowvram.compat.torch_storage import num_holders
from lowvram.config.errors import BadInput
from lowvram.core import host
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, conflicts
from lowvram.core.ledger import Peak, ledger
from lowvram.core.mesh import data_ranks
from lowvram.core.peak import ROUND_BYTES
from lowvram.core.shards import local, whole
from lowvram.core.step import step
from lowvram.knobs.sharding import DDP, FSDP, ZeRO1
from lowvram.knobs.stepping import AfterBackward
from lowvram.tasks import Auto, Problem
from tests.laboratory import (
    CPU,
    KNOBS,
    PROBLEMS,
    TOKENS,
    TRANSFORMER,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    my_slice,
    named,
    relative_error,
    train,
)
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = pytest.mark.medium

OPTIONS = ["ddp", "zero1", "fsdp"]
TWENTY = [32] * 19 + [27]  # the last batch divides by nothing
THREE = [32, 32, 27]
CLIPPED = AfterBackward(clip=0.5)  # far below the norms that come
TWENTY_STEPS: dict[str, dict[str, str | Knob]] = {
    "adamw": {"stepping": CLIPPED},
    "sgd": {"optimizer": "sgd", "accum": "x4", "ckpt": "every2"},
}


def train_each(task: Problem | InDouble, choices: list[dict[str, str | Knob]], sizes: list[int]) -> list[Trained]:
    return [train(task, knobs_of(**each), sizes) for each in choices]


def errors(found: Trained, wanted: Trained) -> dict[str, float]:
    """Relative differences of losses, gradients, parameters and buffers."""
    assert [update.applied for update in found.updates] == [update.applied for update in wanted.updates]
    pairs = {name: (getattr(found, name), getattr(wanted, name)) for name in ("gradients", "parameters", "buffers")}
    pairs["losses"] = ({"": torch.stack(found.losses)}, {"": torch.stack(wanted.losses)})
    return {name: relative_error(*pair) for name, pair in pairs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_with_unequal_targets_train_like_one_process(option: str, problem: str) -> None:
    task, choices = InDouble(PROBLEMS[problem]), list(TWENTY_STEPS.values())
    wanted = train_each(task, choices, TWENTY)
    for found in on_ranks(train_each, task, [{**each, "sharding": option} for each in choices], TWENTY):
        for name, one, other in zip(TWENTY_STEPS, found, wanted, strict=True):
            assert max(errors(one, other).values()) < 1e-10, name


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_everything_at_once_has_the_losses_of_one_process(option: str) -> None:
    """Autocast, too, where one process computes in parts of the same size."""
    both: dict[str, str | Knob] = {"precision": "bf16", "ckpt": "every2", "stepping": CLIPPED}
    task = PROBLEMS["transformer"]
    wanted = train(task, knobs_of(**both, accum="x8"), TWENTY)
    for found in on_ranks(train, task, knobs_of(**both, accum="x4", sharding=option), TWENTY):
        assert errors(found, wanted)["losses"] < 1e-4


THREE_STEPS: dict[str, Knob] = {
    "ddp": DDP(),
    "zero1": ZeRO1(),
    "zero1_bandwidth": ZeRO1(reduce_every_part=False),
    "fsdp": FSDP(),
    "fsdp_gathered": FSDP(reshard_after_forward=False),
    "fsdp_bandwidth": FSDP(reduce_every_part=False),
}
COPIES: dict[str, Knob] = {
    "hsdp": FSDP(replicate=2),
    "hsdp_gathered": FSDP(replicate=2, reshard_after_forward=False),
    "hsdp_bandwidth": FSDP(replicate=2, reduce_every_part=False),
    "fsdp_of_two": FSDP(reshard_after_forward=2),
    "zero1": ZeRO1(),
}


@pytest.mark.parametrize(("problem", "ranks"), first_of([("resnet_frozen", 2), ("transformer", 3)]))
def test_every_field_keeps_losses_gradients_and_buffers(problem: str, ranks: int) -> None:
    """Law 1, also where nothing divides by the number of ranks, and where weights lie as channels_last."""
    parts: dict[str, str | Knob] = {"optimizer": "sgd", "accum": "x2"}
    choices = [{**parts, "sharding": each} for each in THREE_STEPS.values()]
    for dtype, band in ((torch.float64, 1e-12), (torch.float32, FSDP.band)):
        task = InDouble(PROBLEMS[problem]) if dtype is torch.float64 else PROBLEMS[problem]
        wanted = train(task, knobs_of(**parts), THREE)
        for found in on_ranks(train_each, task, choices, THREE, num_ranks=ranks):
            for name, each in zip(THREE_STEPS, found, strict=True):
                error = errors(each, wanted)
                assert max(error[what] for what in ("losses", "gradients", "buffers")) <= band, name


def histories(options: list[str], optimizers: list[str]) -> list[Tensor]:
    task = PROBLEMS["transformer"]
    choices = [{"sharding": option, "optimizer": each} for option in options for each in optimizers]
    return [torch.stack(trained.losses) for trained in train_each(task, choices, THREE)]  # pyright: ignore[reportArgumentType]


def optimizers_for(option: str) -> list[str]:
    """Those that no fact refuses beside it."""
    absent = {Fact.ONE_RANK: ""}
    pairs = [("optimizer", name) for group, name in KNOBS if group == "optimizer"]
    return [name for group, name in pairs if not conflicts(named((group, name), ("sharding", option)), absent, {})]


@pytest.mark.parametrize("optimizers", first_of([["muon"], None]))
def test_what_looks_at_single_weights_knows_them_in_parts(optimizers: list[str] | None) -> None:
    """Each optimizer that may: it asks which layer a weight belongs to, or has states of its own kinds."""
    optimizers = optimizers or optimizers_for("zero1")
    assert len(optimizers) == 1 or {"muon", "adam_mini", "adamw_8bit", "sgd"} <= set(optimizers)
    wanted = histories(["none"], optimizers)
    for found in on_ranks(histories, ["zero1"], optimizers):
        for name, one, other in zip(optimizers, found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=0, msg=name)


@pytest.mark.slow
def test_four_ranks_train_like_one_process() -> None:
    """Two copies of two shards, too; with parts and with a clipped norm, which counts each weight once."""
    parts: dict[str, str | Knob] = {"optimizer": "sgd", "accum": "x2", "stepping": CLIPPED}
    task = InDouble(PROBLEMS["transformer"])
    wanted = train(task, knobs_of(**parts), THREE)
    choices = [{**parts, "sharding": each} for each in COPIES.values()]
    for found in on_ranks(train_each, task, choices, THREE, num_ranks=4):
        for name, each in zip(COPIES, found, strict=True):
            assert [float(update.grad_norm) for update in each.updates] == pytest.approx(
                [float(update.grad_norm) for update in wanted.updates], rel=1e-12
            )
            assert max(errors(each, wanted)[what] for what in ("losses", "gradients", "buffers")) <= 1e-12, name


@pytest.mark.slow
def test_copies_whose_shards_are_gathered_by_fewer_ranks_in_the_backward_pass() -> None:
    """Eight ranks: two copies of four shards, which two ranks keep between a block's forward and its backward pass."""
    task, clipped = InDouble(PROBLEMS["transformer"]), {"accum": "x2", "stepping": CLIPPED}
    wanted = train(task, knobs_of(**clipped), THREE)
    sharding = FSDP(replicate=2, reshard_after_forward=2)
    for found in on_ranks(train, task, knobs_of(**clipped, sharding=sharding), THREE, num_ranks=8):
        assert [float(update.grad_norm) for update in found.updates] == pytest.approx(
            [float(update.grad_norm) for update in wanted.updates], rel=1e-12
        )
        error = errors(found, wanted)
        assert error["losses"] <= 1e-12
        assert error["parameters"] <= 1e-10


def test_gradients_are_summed_in_the_format_that_is_asked_for() -> None:
    """In bf16 each of the two is rounded once, and their sum once more."""
    task, sgd = InDouble(PROBLEMS["transformer"]), {"optimizer": "sgd"}
    wanted = train(task, knobs_of(**sgd), [32])
    choices: list[dict[str, str | Knob]] = [{**sgd, "sharding": FSDP(reduce=each)} for each in ("fp32", "bf16")]
    for in_fp32, in_bf16 in on_ranks(train_each, task, choices, [32]):
        assert 0 < errors(in_fp32, wanted)["gradients"] < 1e-6
        assert 1e-4 < errors(in_bf16, wanted)["gradients"] < 1e-2


def test_numbers_must_divide_the_ranks() -> None:
    for option, key in (
        (FSDP(replicate=3), "sharding.replicate=3: must be 1, or a number that divides the 4 ranks"),
        (FSDP(replicate=4), "sharding.replicate=4: must be 1, or a number"),
        (FSDP(reshard_after_forward=3), "sharding.reshard_after_forward=3: must be true, false, or a number"),
        (FSDP(reshard_after_forward=4), "sharding.reshard_after_forward=4: must be true, false, or a number"),
        (FSDP(replicate=2, reshard_after_forward=2), "between 1 and 2 that divides it: the ranks of one copy"),
    ):
        with pytest.raises(BadInput, match=key):
            option.check_ranks(4)
    FSDP(replicate=2, reshard_after_forward=True).check_ranks(4)
    FSDP(reshard_after_forward=2).check_ranks(4)
    for wrong in ({"replicate": 0}, {"reduce": "fp16"}):
        with pytest.raises(BadInput, match=f"sharding.{next(iter(wrong))}"):
            FSDP(**wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("option", OPTIONS)
def test_batch_norm_over_ranks_is_another_model_and_says_so(option: str) -> None:
    """But one: all ranks end with the same statistics."""
    task = InDouble(PROBLEMS["resnet"])
    first, second = on_ranks(train, task, knobs_of(sharding=option), THREE)
    assert errors(first, train(task, knobs_of(), THREE))["gradients"] > 1e-2
    assert max(errors(first, second).values()) == 0
    caveat = THREE_STEPS[option].caveat
    assert "BatchNorm normalises over the samples of each rank" in str(caveat(task.make_model()))
    assert caveat(PROBLEMS["resnet_group"].make_model()) is None


# Memory


DEEP = Auto().pose(replace(TRANSFORMER, num_layers=8, width=32), TOKENS)


def measured(choices: dict[str, str | Knob]) -> tuple[Peak, dict[str, int]]:
    """The ledger of a later step, and what the weights take in bytes."""
    rig, batch = assemble(DEEP, knobs_of(**choices), CPU), my_slice(make_batch(TOKENS, 32))
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    blocks = rig.structure.blocks
    in_blocks = {parameter for block in blocks for parameter in block.parameters()}
    weights = {
        "shards": sum(rounded(local(parameter)) for parameter in rig.model.parameters()),
        "block": sum(rounded(parameter) for parameter in blocks[0].parameters()),
        "rest": sum(rounded(parameter) for parameter in rig.model.parameters() if parameter not in in_blocks),
    }
    return peak, weights


def rounded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.itemsize // ROUND_BYTES) * ROUND_BYTES


def test_a_rank_holds_its_shards_and_one_block_at_a_time() -> None:
    alone, _ = measured({})
    for peak, weights in on_ranks(measured, {"sharding": "fsdp"}):
        assert peak.by_kind_max[Kind.PARAMETERS] == weights["shards"] + weights["rest"] + weights["block"]
        assert peak.by_kind_max[Kind.PARAMETERS] < 0.7 * alone.by_kind_max[Kind.PARAMETERS]
        for kind in (Kind.GRADIENTS, Kind.OPTIMIZER, Kind.ACTIVATIONS):
            assert peak.by_kind_max[kind] < 0.6 * alone.by_kind_max[kind]
        assert sum(peak.by_kind.values()) == peak.peak_bytes


def test_with_zero1_a_rank_holds_the_state_of_its_rows_alone() -> None:
    """And, where each part is reduced, of gradients no more than its rows and two that are on their way."""
    alone, _ = measured({})
    for peak, _ in on_ranks(measured, {"sharding": "zero1"}):
        assert peak.by_kind_max[Kind.PARAMETERS] == alone.by_kind_max[Kind.PARAMETERS]
        assert peak.by_kind_max[Kind.OPTIMIZER] < 0.6 * alone.by_kind_max[Kind.OPTIMIZER]
        assert peak.by_kind_max[Kind.GRADIENTS] < 0.8 * alone.by_kind_max[Kind.GRADIENTS]


def test_what_zero1_has_sent_and_received_is_freed() -> None:
    """But for what is on its way, three gradients and their rows at most, whatever the number of parts."""
    parts: dict[str, str | Knob] = {"accum": "x8"}
    (alone, weights), *_ = on_ranks(measured, {**parts, "sharding": "ddp"})
    for peak, _ in on_ranks(measured, {**parts, "sharding": "zero1"}):
        more = peak.by_kind_max[Kind.ACTIVATIONS] - alone.by_kind_max[Kind.ACTIVATIONS]
        kept = weights["shards"] / 2  # its rows of all gradients
        assert more < kept + weights["block"]


def bytes_held(option: str) -> tuple[int, int]:
    """Of weights, and of the optimizer's state after a step; without what the allocator adds to small tensors."""
    rig = assemble(DEEP, knobs_of(sharding=option), CPU)
    step(rig, my_slice(make_batch(TOKENS, 32)))
    optimizer = rig.stepper.optimizer  # pyright: ignore[reportAttributeAccessIssue]
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    sizes = [
        sum(local(each).numel() * each.itemsize for each in tensors) for tensors in (rig.model.parameters(), state)
    ]
    return sizes[0], sizes[1]


@pytest.mark.parametrize("num_ranks", first_of([2, 4]))
def test_shares_are_even(num_ranks: int) -> None:
    weights, state = bytes_held("none")
    most = 1 / num_ranks + 0.02
    for its_weights, its_state in on_ranks(bytes_held, "fsdp", num_ranks=num_ranks):
        assert its_weights <= most * weights
        assert its_state <= most * state
    for its_weights, its_state in on_ranks(bytes_held, "zero1", num_ranks=num_ranks):
        assert its_weights == weights
        assert its_state <= most * state


@pytest.mark.slow
def test_the_fields_say_what_they_cost() -> None:
    parts: dict[str, str | Knob] = {"accum": "x4"}
    (every, _), (once, _) = (
        on_ranks(measured, {**parts, "sharding": FSDP(reduce_every_part=each)})[0] for each in (True, False)
    )
    alone, _ = measured(parts)
    assert once.by_kind_max[Kind.GRADIENTS] == alone.by_kind_max[Kind.GRADIENTS]
    assert every.by_kind_max[Kind.GRADIENTS] < 0.7 * once.by_kind_max[Kind.GRADIENTS]
    gathered, weights = on_ranks(measured, {"sharding": FSDP(reshard_after_forward=False)})[0]
    wanted = weights["shards"] + weights["rest"] + 8 * weights["block"]
    assert gathered.by_kind_max[Kind.PARAMETERS] == wanted


def test_ddp_holds_no_second_copy_of_the_gradients() -> None:
    alone, _ = measured({})
    for peak, _ in on_ranks(measured, {"sharding": "ddp"}):
        assert peak.by_kind_max[Kind.GRADIENTS] == alone.by_kind_max[Kind.GRADIENTS]


def holders_of_what_is_gathered(times: int) -> set[int]:
    """How many more hold what a block gathers, as soon as it has, than before."""
    with patch.object(FSDPModule, "set_custom_all_gather") as told:
        assemble(PROBLEMS["transformer"], knobs_of(sharding="fsdp"), CPU)
    shard, whole, seen = torch.zeros(8), torch.zeros(16), set[int]()
    before = num_holders(whole)
    for gather in [call.args[0] for call in told.call_args_list] * times:
        gather(whole, shard, dist.group.WORLD)
        seen.add(num_holders(whole) - before)
    return seen


@pytest.mark.slow
def test_nothing_lives_on_that_was_gathered_for_a_moment() -> None:
    """Left to itself gloo holds one of five a moment too long, and peaks would be now one thing and now another."""
    for seen in on_ranks(holders_of_what_is_gathered, 50):
        assert seen == {0}


# What others may rely on


def gradients_as_born(option: str) -> dict[str, tuple[int, Tensor]]:
    """What a hook on each parameter sees: how often it fires in a step, and the last gradient."""
    rig = assemble(InDouble(PROBLEMS["transformer"]), knobs_of(sharding=option), CPU)
    seen: dict[str, tuple[int, Tensor]] = {}
    for name, parameter in rig.model.named_parameters():

        def note(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            seen[name] = (seen.get(name, (0,))[0] + 1, whole(parameter.grad).clone())

        parameter.register_post_accumulate_grad_hook(note)
    step(rig, my_slice(make_batch(TOKENS, 30, dtype=torch.float64)))
    return seen


def test_hooks_on_shards_see_summed_gradients_as_they_are_born() -> None:
    wanted = gradients_as_born("none")
    for seen in on_ranks(gradients_as_born, "fsdp"):
        assert {times for times, _ in seen.values()} == {1}
        found = {name: gradient for name, (_, gradient) in seen.items()}
        assert relative_error(found, {name: wanted[name][1] for name in found}) < 1e-12


def test_without_grads_at_update_ddp_would_use_the_gradients_of_one_rank() -> None:
    wanted = {name: gradient for name, (_, gradient) in gradients_as_born("none").items()}
    for seen in on_ranks(gradients_as_born, "ddp"):
        assert relative_error({name: gradient for name, (_, gradient) in seen.items()}, wanted) > 0.1


def logits_by_hand() -> tuple[float, float]:
    """The loss with a head that is applied outside of the model's forward, in training and without gradients; relative
    to that of the model."""
    rig = assemble(InDouble(PROBLEMS["transformer"]), knobs_of(sharding="fsdp"), CPU)
    model: Any = rig.model
    part = my_slice(make_batch(TOKENS, 8, dtype=torch.float64))
    wanted = rig.criterion(rig.forward(part), part)
    wanted.backward()
    gradient = whole(model.head.weight.grad)
    rig.stepper.update()
    rig = assemble(InDouble(PROBLEMS["transformer"]), knobs_of(sharding="fsdp"), CPU)
    model = rig.model
    model.head.forward = lambda hidden_btd: hidden_btd
    loss = rig.criterion(F.linear(rig.forward(part), model.head.weight), part)
    loss.backward()
    error = relative_error({"": whole(model.head.weight.grad)}, {"": gradient})
    with torch.no_grad():
        again = rig.criterion(F.linear(rig.forward(part), model.head.weight), part)
    return max(abs(float(loss / wanted) - 1), error), abs(float(again / loss) - 1)


def test_the_head_may_be_read_after_the_forward() -> None:
    for in_training, without_gradients in on_ranks(logits_by_hand):
        assert in_training < 1e-12
        assert without_gradients < 1e-12


def adafactor_over_shards() -> None:
    mesh = init_device_mesh("cpu", (data_ranks().size,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    weight.grad = torch.ones_like(weight)
    torch.optim.Adafactor([weight]).step()


def test_without_whole_updates() -> None:
    """Adafactor's sums over rows and columns can't be taken over shards (torch 2.13)."""
    with pytest.raises(RuntimeError, match="placement"):
        on_ranks(adafactor_over_shards)


def bytes_of_a_weight_after_its_block() -> int:
    rig, seen = assemble(PROBLEMS["transformer"], knobs_of(sharding="fsdp"), CPU), list[Tensor]()
    norm = next(module for module in rig.structure.blocks[0].modules() if isinstance(module, nn.LayerNorm))
    norm.register_forward_hook(lambda module, *_: seen.append(module.get_parameter("weight")))
    rig.forward(rig.move(my_slice(make_batch(TOKENS, 4))))
    return seen[0].untyped_storage().nbytes()


def test_without_whole_params() -> None:
    """Whoever keeps a weight of the forward pass, as norms=output does, has none in the backward pass."""
    assert on_ranks(bytes_of_a_weight_after_its_block) == [0, 0]


def bytes_on_the_host(sharding: str) -> int:
    """Of weights, beside offload=parameters, if nobody asks whether they fit together."""
    with patch("lowvram.core.assemble.conflicts", lambda *_: []):
        rig = assemble(PROBLEMS["transformer"], knobs_of(sharding=sharding, offload="parameters"), CPU)
    return sum(each.nbytes for each in rig.model.parameters() if host.holds(each))


def test_without_own_share() -> None:
    """Only FSDP2 keeps weights in host memory."""
    for option in OPTIONS:
        for num_bytes in on_ranks(bytes_on_the_host, option):
            assert (num_bytes > 0) == (option == "fsdp")


class PartlyUnused(nn.Module):
    """`never` takes part in no sample, `even` only in those whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.never = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return hidden + self.even(x) if bool((x[:, 0] > 0).any()) else hidden


def weights_of_partly_unused(num_ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(1127)
    model = PartlyUnused()
    x, targets = torch.randn(8, 4), torch.randint(4, (8,))
    x[:, 0] = torch.tensor([1.0] * 4 + [-1.0] * 4)  # the second rank never uses `even`
    options = "sharding=ddp" if num_ranks > 1 else ""
    rig = lowvram.assemble(
        lowvram.task(model, x), f"optimizer=adamw optimizer.weight_decay=0.3 accum=x2 {options}", "cpu"
    )
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4) if num_ranks > 1 else slice(None)
    for _ in range(3):
        lowvram.step(rig, lowvram.Part(x[mine], targets[mine]))
    return {name: value.clone() for name, value in rig.model.state_dict().items()}


def test_a_weight_that_no_rank_uses_stays_as_on_one_rank_also_with_weight_decay() -> None:
    plain = weights_of_partly_unused(1)
    for found in on_ranks(weights_of_partly_unused, 2):
        for name, value in plain.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(found["never.weight"], plain["never.weight"])
