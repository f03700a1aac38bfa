"""Saved states of sharded parameters, and what stands for the parameters in optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lowvram.compat.torch_distributed import part_of_parts
from lowvram.compat.torch_modes import is_traceable_wrapper_subclass
from lowvram.compat.torchao import new_moment
from lowvram.config.errors import Incompatible
from lowvram.core.copies import original
from lowvram.core.kept_apart import SHARDS, is_laid_out_as, keep_apart, saved_apart, whole_of
from lowvram.core.shards import all_shards, local, place_of_own, placed, set_row_order, taken_apart
from lowvram.core.shards import whole as whole_on_host
from lowvram.core.states import gathered, placed_value
from lowvram.knobs.optimizer import AdamW8bit
from lowvram.knobs.optimizer.low_bit import as_numbers, fill, form_of, memory_order
from lowvram.knobs.sharding.zero1 import OwnRows
from tests.ranks import on_ranks, one_rank_alone


def test_an_early_versions_moments_of_convolutions_are_not_guessed_at() -> None:
    weight = torch.zeros(64, 3, 3, 3)
    sharded = nn.Parameter(distribute_tensor(weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
    with pytest.raises(Incompatible, match="an early version of lowvram saved the moments of few bits"):
        fill(weight, torch.ones(64, 3, 3, 3), sharded, None)
    fill(weight, torch.ones(64, 3, 3, 3), sharded, [0, 2, 3, 1])
    assert weight.all()


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    with one_rank_alone():
        yield


def test_means_over_a_dimension_are_spread_as_their_parameter_is() -> None:
    """Adam-mini's second moments have the length 1 in it; beside a sharded gradient a plain tensor would be refused."""
    parameter = distribute_tensor(torch.zeros(7, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    for shape, place in (((7, 3), Shard(0)), ((7, 1), Shard(0)), ((1, 3), Replicate())):
        value = placed_value(torch.ones(shape), parameter)
        assert isinstance(value, DTensor)
        assert value.placements == (place,)
        assert torch.equal(local(placed(value, parameter)), torch.ones(shape))  # it may be sharded already
    for shape in ((), (7,), (7, 2), (5, 3)):
        assert type(placed_value(torch.ones(shape), parameter)) is torch.Tensor


def test_optimizers_know_the_parameters_behind_zero1s_rows() -> None:
    """Muon and Adam-mini ask which layer a weight belongs to."""
    weight = nn.Parameter(torch.zeros(7, 3))
    (part,) = OwnRows(init_device_mesh("cpu", (1,))).of([weight])
    assert original(part) is weight


def parted(rows: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """On each of three ranks a shard of so many rows: in codes where they are whole blocks, else in numbers. Returns
    all shards as this rank got them, and as they were made."""
    mesh = init_device_mesh("cpu", (3,))
    made = [moment(num_rows, seed) for seed, num_rows in enumerate(rows)]
    own = made[mesh.get_local_rank()]
    whole = torch.empty(sum(rows), 64, device="meta")
    spread = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    keep_apart(spread)
    gathered_state = gathered({"moment": spread})
    assert (gathered_state is None) == (mesh.get_local_rank() > 0)
    if gathered_state is not None:
        assert all(map(are_equal, gathered_state["moment"][SHARDS], made))
    return all_shards(spread), made


def moment(num_rows: int, seed: int) -> Tensor:
    """Of so many rows of 64 numbers, as torchao's 8-bit AdamW keeps it."""
    values = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(seed))
    inner: Any = AdamW8bit().make([nn.Parameter(values)])
    made = new_moment(inner.inner, values, signed=True)
    made.copy_(values)
    return made


def are_equal(one: Tensor, other: Tensor) -> bool:
    return form_of(one) == form_of(other) and all(
        torch.equal(of_one, of_other)
        for of_one, of_other in zip(taken_apart(one)[0], taken_apart(other)[0], strict=True)
    )


@pytest.mark.medium
def test_shards_of_codes_and_of_numbers_reach_all_ranks_as_they_are() -> None:
    for rows, have_codes in (([68, 68, 64], [True, True, True]), ([67, 67, 64], [False, False, True])):
        for found, made in on_ranks(parted, rows, num_ranks=3):
            assert [is_traceable_wrapper_subclass(shard) for shard in made] == have_codes
            assert all(map(are_equal, found, made))


def laid_out(whole: Tensor, order: Tensor | None) -> None:
    """On two data ranks by two that split layers: by columns and by rows, as a layer and its part are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for places in ([part_of_parts(Shard(0), 2), Shard(0)], [part_of_parts(Shard(1), 2), Shard(1)]):
        like = distribute_tensor(whole.t() if places[1] == Shard(1) else whole, mesh, places, src_data_rank=None)
        set_row_order(like, order)
        saved, wanted = saved_apart(all_shards(like), like), whole_on_host(like)
        assert torch.equal(whole_of(saved, saved[SHARDS]), wanted)
        assert is_laid_out_as(saved, like)
        assert torch.equal(saved[SHARDS][place_of_own(like)[0]], local(like))
        other = distribute_tensor(wanted, mesh, places, src_data_rank=None)
        set_row_order(other, None if order is not None else torch.arange(7))
        assert not is_laid_out_as(saved, other)
        assert not is_laid_out_as(saved, wanted)


@pytest.mark.medium
@pytest.mark.parametrize("order", [None, torch.tensor([0, 1, 5, 6, 2, 3, 4])], ids=["in order", "packed"])
def test_shards_of_parts_of_layers_make_the_whole(order: Tensor | None) -> None:
    """Of seven rows the first part of the layer has four, the second three; of three columns two and one."""
    on_ranks(laid_out, torch.arange(21.0).view(7, 3), order, num_ranks=4)


def test_moments_in_other_blocks_are_rounded_again_and_in_the_same_ones_stay() -> None:
    shards = [moment(68, 0), moment(68, 1), moment(64, 2)]
    numbers = torch.cat([as_numbers(shard) for shard in shards])
    parameter = nn.Parameter(torch.zeros(200, 64))
    whole = moment(200, 3)
    fill(whole, {SHARDS: shards}, parameter, None)
    assert 0 < (as_numbers(whole) - numbers).abs().max() < 0.05
    again = moment(200, 4)
    fill(again, whole, parameter, [0, 1])
    assert are_equal(again, whole)


def test_moments_of_images_weights_keep_their_places() -> None:
    """A weight that is channels_last has its moments in the order of its memory, one that is sharded in its own."""
    values = torch.randn(64, 16, 3, 3)
    last = nn.Parameter(torch.zeros(64, 16, 3, 3).to(memory_format=torch.channels_last))
    assert memory_order(last) == [0, 2, 3, 1]
    found = torch.zeros(64, 3, 3, 16)
    fill(found, {SHARDS: [values[:30], values[30:]]}, last, None)
    assert torch.equal(found, values.permute(0, 2, 3, 1))
    back = torch.zeros(64, 16, 3, 3)
    fill(back, found, nn.Parameter(torch.zeros(64, 16, 3, 3)), [0, 2, 3, 1])
    assert torch.equal(back, values)
