"""The state of a model whose stages different ranks have, as one process has it, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.errors import Incompatible
from lowvram.core.mesh import Ranks, is_first_of_stage, stage_hosts
from lowvram.core.shards import place_of, put_together, taken_apart

PARAMS = "params"  # of saved param_groups: the numbers of their parameters


@final
@dataclass(frozen=True)
class Sent:
    """Stands for a tensor that is sent by itself.

    Args:
        how: as `taken_apart` tells it.
        num_bytes: of all its parts.
    """

    how: Any
    num_bytes: int


def from_all_stages(state: Any, keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> Any:
    """On the first rank, the states of its pipeline's ranks as one; None on the others. The state itself, if ranks have
    the whole model. A collective: all ranks must call it. One tensor at a time is under way.

    Args:
        keep: returns a copy on the CPU, of which the original is freed afterwards.
    """
    if (hosts := stage_hosts()) is None:
        return state
    if not is_first_of_stage():  # those that have the same send nothing
        return None
    structure = tree_map_only(Tensor, as_sent, state)
    leaves = [each for each in tree_leaves(state) if isinstance(each, Tensor)]
    structures: list[Any] | None = [None] * hosts.size if hosts.is_first else None
    dist.gather_object(structure, structures, group=hosts.group, group_dst=0)
    if structures is None:
        for leaf in leaves:
            dist.send(bytes_of(leaf), group=hosts.group, group_dst=0)
        return None
    states = [tree_map_only(Tensor, keep, state)]
    for rank, each in enumerate(structures[1:], 1):
        states.append(tree_map_only(Sent, lambda sent, rank=rank: keep(received(sent, hosts, rank)), each))
    return merged(states)


def as_sent(tensor: Tensor) -> Sent:
    parts, how = taken_apart(tensor.detach())
    return Sent(how, sum(part.nbytes for part in parts))


def bytes_of(tensor: Tensor) -> Tensor:
    """All bytes of a tensor, on the CPU."""
    parts, _ = taken_apart(tensor.detach())
    return torch.cat([part.contiguous().view(-1).view(torch.uint8).cpu() for part in parts])


def received(sent: Sent, hosts: Ranks, rank: int) -> Tensor:
    data = torch.empty(sent.num_bytes, dtype=torch.uint8, device="cpu")
    dist.recv(data, group=hosts.group, group_src=rank)
    return put_together(data, sent.how)


def merged(states: Sequence[Any]) -> Any:
    """Several states of one form as one, in which ranks have different entries of dictionaries."""
    first = states[0]
    if isinstance(first, dict):
        names = list(dict.fromkeys(name for each in states for name in each))
        return {name: merged_entry(name, [each[name] for each in states if name in each]) for name in names}
    if type(first) is list and all(len(each) == len(first) for each in states):
        return [merged(of_all) for of_all in zip(*states, strict=True)]
    return first


def merged_entry(name: Any, values: Sequence[Any]) -> Any:
    if name == PARAMS:
        return sorted({number for each in values for number in each})
    return merged(values)


def keep_own_part(optimizer: Optimizer) -> None:
    """Have an optimizer that updates some of a model's parameters save their states by their places among all of them,
    and load of a whole state what belongs to them; around its own methods, which may look at all that they are given. A
    collective of the pipeline's ranks."""
    check_groups(optimizer)
    save, load = optimizer.state_dict, optimizer.load_state_dict
    optimizer.state_dict = lambda: _by_place(optimizer, save())
    optimizer.load_state_dict = lambda state_dict: load(_of_own(optimizer, state_dict))


def check_groups(optimizer: Optimizer) -> None:
    """Raises Incompatible if the stages' optimizers have other groups of parameters, which can't be saved as one. A
    collective of the pipeline's ranks."""
    settings = [
        {name: str(value) for name, value in group.items() if name != PARAMS} for group in optimizer.param_groups
    ]
    hosts = stage_hosts()
    if hosts is not None and any(each != settings for each in hosts.gather(settings)):
        raise Incompatible(
            f"sharding=pipeline: {type(optimizer).__name__} has other groups of parameters for other stages of the"
            " model: choose another optimizer, or sharding=fsdp"
        )


def _by_place(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    places = dict[int, int | None]()
    groups = list[dict[str, Any]]()
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        places |= {number: place_of(each) for each, number in zip(own[PARAMS], saved[PARAMS], strict=True)}
        groups.append(saved | {PARAMS: [places[number] for number in saved[PARAMS]]})
    return {**state, "state": {places[number]: each for number, each in state["state"].items()}, "param_groups": groups}


def _of_own(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A saved state of all parameters, in each group in the model's order, without those of other ranks. A collective:
    all ranks of the pipeline must call it."""
    places = [[place_of(each) for each in group[PARAMS]] for group in optimizer.param_groups]
    hosts = stage_hosts()
    of_ranks = [places] if hosts is None else hosts.gather(places)
    groups, kept = list[dict[str, Any]](), dict[int, Any]()
    for own, saved, of_group in zip(places, state["param_groups"], zip(*of_ranks, strict=True), strict=True):
        whole = sorted({place for each in of_group for place in each if place is not None})
        number_at = dict(zip(whole, saved[PARAMS], strict=True))
        numbers = [number_at[place] for place in own if place is not None]
        kept |= {number: state["state"][number] for number in numbers if number in state["state"]}
        groups.append(saved | {PARAMS: numbers})
    return {**state, "state": kept, "param_groups": groups}
