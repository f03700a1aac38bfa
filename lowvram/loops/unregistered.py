"""What modules keep where no state_dict looks: numbers and texts in attributes, and generators.

A forward pass may change them. Snapshots hold those that are plain; what they can't hold is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import nn

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_modules import OF_MODULES, own_buffers
from lowvram.core.changes import Look, OfEntry
from lowvram.core.generators import sources_of
from lowvram.core.places import Places, containers_in, tensors_in

NUMBERS = (int, float, bool, str, type(None))
MOST_NAMED = 3
FIRST_LOOKS = 3  # before steps, after which it is known whether they change anything


@final
class Unregistered:
    """What a model's modules keep, as a run begins."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._begun = {name: numbers_in(module) for name, module in self._modules.items()}
        self._sources = sources_of(model)
        self._num_looks, self._is_changing = 0, False
        places = Places(model)
        places.with_values = [each for each in places.with_values if is_others(each)]
        self._look = Look(places, with_tensors=False)
        buffers = {id(own_buffers(each)) for each in self._modules.values()}
        held = (each for each in tensors_in(places, containers_in(places)) if id(each[1]) not in buffers)
        self._tensors = [(what, tensor, version_of(tensor)) for what, _, _, tensor in held]

    def state(self) -> dict[str, Any]:
        """The numbers and texts in attributes that have changed since the run began, by the module's name, and the
        states of generators. What hasn't changed is the configuration's."""
        changed = {name: changed_numbers(numbers_in(each), self._begun[name]) for name, each in self._modules.items()}
        return {
            "values": {name: each for name, each in changed.items() if each},
            "generators": [source.text() for source in self._sources],
        }

    def before_step(self) -> dict[str, Any] | None:
        """The state before a step, as a step that fails may change it; None where the first steps have changed nothing,
        which costs no time then."""
        if self._num_looks >= FIRST_LOOKS and not self._is_changing:
            return None
        state = self.state()
        self._num_looks += 1
        self._is_changing = bool(state["values"] or state["generators"])
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, in a model that was made again."""
        for name, values in state.get("values", {}).items():
            if name in self._modules:
                vars(self._modules[name]).update(values)
        texts = state.get("generators", [])
        if len(texts) == len(self._sources):
            for source, text in zip(self._sources, texts, strict=True):
                source.set_text(text)

    def lost(self) -> list[str]:
        """What has changed since the run began, and `state` doesn't hold."""
        known = {id(vars(module)): numbers_in(module) for module in self._modules.values()}
        changes = [
            change.what
            for change in self._look.changes()
            if not (isinstance(change, OfEntry) and change.name in known.get(id(change.owner), ()))
        ]
        written = [what for what, tensor, version in self._tensors if version_of(tensor) != version]
        return list(dict.fromkeys([*changes, *written]))

    def told(self) -> str | None:
        """A line for the user about what is lost; None if nothing is."""
        names = self.lost()
        if not names:
            return None
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return (
            f"note: snapshots don't hold {', '.join(names[:MOST_NAMED])}{more}, which the forward pass changes: a"
            " resumed run begins with what the constructor makes (register tensors as buffers)"
        )


def is_others(module: nn.Module) -> bool:
    """Whether a module's code is neither torch's nor lowvram's, which keep in order what they change."""
    return type(module).__module__.partition(".")[0] not in ("torch", "lowvram")


def numbers_in(module: nn.Module) -> dict[str, Any]:
    """Those in attributes of a module of the user's own."""
    own = vars(module).items() if is_others(module) else ()
    return {name: value for name, value in own if name not in OF_MODULES and type(value) in NUMBERS}


def changed_numbers(now: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in now.items() if name not in begun or begun[name] != value}
