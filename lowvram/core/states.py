"""Converts states of models and optimizers between sharded and whole tensors, so that what is saved can be loaded with
any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lowvram.compat.torch_trees import tree_map_only
from lowvram.compat.torch_versions import version
from lowvram.config.errors import Incompatible
from lowvram.core import host
from lowvram.core.extra_state import extra_states, give
from lowvram.core.host_file import file_of
from lowvram.core.kept_apart import is_kept_apart, saved_apart
from lowvram.core.merged_states import from_all_stages, keep_own_part
from lowvram.core.mesh import all_ranks, is_first_of_stage, stage_hosts
from lowvram.core.rates import OWN
from lowvram.core.references import replace_tensors
from lowvram.core.shards import (
    all_shards,
    is_sharded,
    is_unevenly_split,
    local,
    place_of,
    placed,
    reshard,
    row_order,
    set_row_order,
    taken_apart,
    whole,
)
from lowvram.core.stages import stages_of
from lowvram.core.trainable import ever_trains
from lowvram.core.untouched import note_begun
from lowvram.core.values import own_tensors

if TYPE_CHECKING:
    from lowvram.core.rig import Part, Rig, Run

STATE_ENTRIES = ("params", "noise_step")  # of an optimizer's param_groups; the other entries are settings
CHANGED = "changed_by_steps"  # in saved param_groups: the names of entries that the optimizer has changed itself


def gathered(state: dict[str, Any], keep: Callable[[Tensor], Tensor] = Tensor.cpu) -> dict[str, Any] | None:
    """On rank 0, a state of any nesting with every sharded tensor made whole on the CPU, or, if it is kept apart,
    what `saved_apart` makes of its shards; None on the other ranks.

    A collective: all ranks must call it, with the same nesting.

    Args:
        keep: returns a copy on the CPU of a whole tensor, which is freed afterwards.
    """

    def gather(tensor: DTensor) -> Tensor | dict[str, Any] | None:
        if is_kept_apart(tensor):
            shards = all_shards(tensor)
            return saved_apart([shard.cpu() for shard in shards], tensor) if is_first_of_stage() else None
        entire = whole(tensor)
        return compact(keep(entire)) if is_first_of_stage() else None

    entire = from_all_stages(tree_map_only(DTensor, gather, state))
    return entire if all_ranks().is_first else None


def compact(tensor: Tensor) -> Tensor:
    """A tensor with the same values whose storage has nothing else: shards that don't divide evenly are padded, and
    safetensors refuses to save a part of a storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def trained_state(model: nn.Module, unchanged: Collection[str] | None = None) -> dict[str, Tensor]:
    """A model's state_dict without parameters that get the same values when the model is made again.

    Args:
        unchanged: the names of those; None: all frozen ones.
    """
    left_out = {name for name, _ in frozen_parameters(model)} if unchanged is None else unchanged
    return {name: value for name, value in model.state_dict().items() if name not in left_out}


@final
class Frozen:
    """The parameters that a model has frozen when its run begins. Its code may freeze others later, or thaw these."""

    def __init__(self, model: nn.Module) -> None:
        self._model, frozen = model, frozen_parameters(model)
        self._versions = {name: version(parameter) for name, parameter in frozen}
        self._values = {name: digest(local(parameter)) for name, parameter in frozen if is_unevenly_split(parameter)}
        self._changed = set[str]()  # on some rank

    def unchanged(self) -> set[str]:
        """The names of those that have always been frozen, and that nobody has changed in place, as far as this rank
        knows."""
        found = {name: each for name, each in frozen_parameters(self._model) if name in self._versions}
        return {
            name for name, parameter in found.items() if name not in self._changed and self._is_same(name, parameter)
        }

    def _is_same(self, name: str, parameter: nn.Parameter) -> bool:
        """FSDP2 moves the shards of a rank with fewer rows to other memory, which it fills up, when the model first
        computes."""
        now = version(parameter)
        if now != self._versions[name] and name in self._values and self._values[name] == digest(local(parameter)):
            self._versions[name] = now
        return now == self._versions[name]

    def agree(self) -> None:
        """Tell the other ranks what this one has found changed, so that all have the same state. A collective: all
        ranks must call it."""
        changed = sorted(self._versions.keys() - self.unchanged())
        self._changed.update(*all_ranks().gather(changed))

    def switched(self) -> dict[str, bool]:
        """The parameters that are frozen or thawed by now, and whether they train."""
        now = {name for name, _ in frozen_parameters(self._model)}
        return {name: name not in now for name in self._versions.keys() ^ now}

    def switch(self, trains: Mapping[str, bool]) -> None:
        """The inverse of `switched`, in a model that was made again."""
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for name, does_train in trains.items():
            named[name].requires_grad_(does_train)


def digest(tensor: Tensor) -> str:
    """Of the bytes of a tensor, which may be made of others."""
    found = hashlib.sha256()
    for part in taken_apart(tensor.detach())[0]:
        found.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()


def frozen_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Those that train at no step of the run."""
    named = model.named_parameters(remove_duplicate=False)
    return [(name, parameter) for name, parameter in named if not ever_trains(parameter)]


def refusing_thawed(run: Run, model: nn.Module) -> Run:
    """A `Rig.run` that raises Incompatible once a weight trains that is frozen now, as no optimizer updates it."""
    frozen = frozenset(name for name, _ in frozen_parameters(model))
    return partial(_run, run, frozen) if frozen else run


def _run(run: Run, frozen: frozenset[str], rig: Rig, parts: list[Part], total: Tensor) -> Tensor:
    loss = run(rig, parts, total)
    thawed = [name for name, each in rig.model.named_parameters() if each.requires_grad and name in frozen]
    if thawed:
        more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
        raise Incompatible(
            f"the model lets {thawed[0]}{more} train (requires_grad) since this step, and no optimizer updates what was"
            " frozen as the run began: let the constructor leave it trainable, and forward freeze it until then"
        )
    return loss


def load_whole(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors into a model that may be sharded. Frozen parameters may be missing and then stay as they
    are."""
    like = model.state_dict()
    if stage_hosts() is not None:  # other ranks have the others
        state = {name: value for name, value in state.items() if name in like}
    frozen = {name: like[name] for name, _ in frozen_parameters(model)}
    loaded = {name: placed(value, like[name]) if name in like else value for name, value in state.items()}
    model.load_state_dict({**frozen, **loaded})


def whole_model(
    model: nn.Module, make: Callable[[], nn.Module], keep: Callable[[Tensor], Tensor] = Tensor.cpu
) -> nn.Module | None:
    """On rank 0, the model with whole tensors; None on the others. A sharded model's tensors are put, on the CPU, into
    one that `make` returns, which may be without memory. A collective: all ranks must call it.

    Args:
        keep: as of `gathered`.
    """
    reshard(model)  # an evaluation leaves what belongs to no block gathered
    if (stages := stages_of(model)) is not None:
        values = gathered(stages.kept_here(dict(named_tensors(model))), keep)
        return None if values is None else give(with_values(make(), values), extra_states(model))
    if not any(map(is_sharded, model.parameters())):
        return model if all_ranks().is_first else None
    names = {tensor: name for name, tensor in reversed(named_tensors(model))}  # of a tied one, the first
    values = gathered({name: tensor for tensor, name in names.items()}, keep)
    if values is None:
        return None
    entire = with_values(make(), {name: values[names[tensor]] for name, tensor in named_tensors(model)})
    return give(entire, extra_states(model))


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All parameters and buffers, also buffers that no state_dict has, under each of their names."""
    named = model.named_modules(remove_duplicate=False)
    return [(f"{prefix}.{name}".lstrip("."), each) for prefix, module in named for name, each in own_tensors(module)]


def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Give a model without memory these values, on the CPU, by the names of its parameters and buffers. Tied tensors
    stay tied."""
    real: dict[Tensor, Tensor] = {}
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module):
            if tensor not in real:
                value = values[f"{prefix}.{name}".removeprefix(".")].detach().cpu()
                if (
                    value.untyped_storage().nbytes() > value.nbytes
                ):  # without the rows that even shards are filled up by
                    value = value.clone()  # else safetensors can't write it under two names
                is_parameter = isinstance(tensor, nn.Parameter)
                real[tensor] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            setattr(module, name, real[tensor])
    replace_tensors(model, real)
    return model


def add_hooks(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    """Make an optimizer tell when a step begins; when it loads a state, keep its own settings and shard whole tensors
    as its parameters are; and where parameters are in host memory, update them on the host's processor and mark their
    state as host memory, too."""
    optimizer.register_step_pre_hook(note_begun)
    keep_own_settings(optimizer)
    if any(map(is_sharded, parameters)):
        optimizer.register_load_state_dict_pre_hook(_placed_state)
        optimizer.register_state_dict_post_hook(_note_order)
    if any(map(host.holds, parameters)):
        optimizer.register_step_post_hook(_mark_state)
    if all(map(host.holds, parameters)):
        optimizer.step = _on_host(optimizer.step)
    if all(place_of(each) is not None for each in parameters):
        keep_own_part(optimizer)


def keep_own_settings(optimizer: Optimizer) -> None:
    """Make a new optimizer that loads a state keep weight decay and other settings as configured: torch would load
    those that were saved. Entries of its groups that it has changed itself since it was made, such as a count of steps,
    belong to its state, and are loaded."""
    made_with = [_settings(group) for group in optimizer.param_groups]

    def note_changed(_: Optimizer, state: dict[str, Any]) -> None:
        for group, first in zip(state["param_groups"], made_with, strict=False):
            by_others = STATE_ENTRIES if OWN in group else (*STATE_ENTRIES, "lr")
            own = {name: value for name, value in group.items() if name not in by_others}
            if changed := [name for name, value in own.items() if not (name in first and _is_same(value, first[name]))]:
                group[CHANGED] = changed

    optimizer.register_state_dict_post_hook(note_changed)
    optimizer.register_load_state_dict_pre_hook(_with_own_settings)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    settings = {name: value for name, value in group.items() if name != "params"}
    try:
        return deepcopy(settings)
    except Exception:  # of any class of the user's own
        return settings


def _is_same(value: Any, first: Any) -> bool:
    if type(value) is not type(first):
        return False
    try:
        return torch.equal(value, first) if isinstance(value, Tensor) else bool(value == first)
    except Exception:  # of any class of the user's own
        return False


def _with_own_settings(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    groups = []
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        loaded = {*STATE_ENTRIES, *saved.get(CHANGED, ())}
        settings = {name: value for name, value in own.items() if name not in loaded}
        groups.append({name: value for name, value in {**own, **saved, **settings}.items() if name != CHANGED})
    return {**state, "param_groups": groups}


def _on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step, whose temporary tensors count as host memory."""

    def step_on_host(*args: Any) -> Any:
        with host.computing():
            return step(*args)

    return step_on_host


def _mark_state(optimizer: Optimizer, *_: Any) -> None:
    """Mark the state of parameters in host memory as host memory, too. That of those in a file goes there."""
    for parameter, state in optimizer.state.items():
        if host.holds(parameter):
            file = file_of(parameter)
            for value in state.values():
                if isinstance(value, Tensor) and not host.holds(value):
                    host.mark(value)
                if isinstance(value, Tensor) and file is not None:
                    file.take_in(value)


def _note_order(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Note at the saved state of a parameter that its rows stand in the parameter's order."""
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            for value in state["state"].get(key, {}).values():
                if isinstance(value, DTensor) and value.ndim == parameter.ndim:
                    set_row_order(value, row_order(parameter))


def _placed_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A saved state in which tensors that fit their parameter (`placed_value`) are spread as the parameter is."""
    placed_state = dict(state["state"])
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if key in placed_state:
                placed_state[key] = {name: placed_value(value, parameter) for name, value in placed_state[key].items()}
    return {**state, "state": placed_state}


def placed_value(value: Any, parameter: Tensor) -> Any:
    """A value of a parameter's saved state, spread over the ranks as the parameter is, if it has its shape. Means over
    a dimension have the length 1 there: if the parameter is sharded in it, each rank has them whole."""
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not (is_whole and isinstance(parameter, DTensor)) or value.ndim != parameter.ndim:
        return value
    if any(length not in (1, own) for length, own in zip(value.shape, parameter.shape, strict=True)):
        return value
    return placed(value, parameter)
