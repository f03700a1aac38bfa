"""Finds out by trial whether a model draws random numbers while it trains, and which of its modules does first.

One forward pass on fake tensors: torch's operators that draw are seen as they run, and draws from the generators of
numpy, of Python and of the model's own are seen by the states of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from lowvram.compat.torch_modes import TorchDispatchMode
from lowvram.compat.torch_ops import schema_of
from lowvram.config.texts import first_line
from lowvram.core.fact import ModelFact
from lowvram.core.generators import global_sources, moved, sources_of, states_of
from lowvram.core.probes.fake_pass import fake_pass
from lowvram.core.structure import Probe, Structure

DRAWS = torch.Tag.nondeterministic_seeded
MEND = "turn that off (dropout: model.dropout=0), or choose another option"


@final
@dataclass(frozen=True)
class FirstDraw(Probe[str | None]):
    """What draws random numbers while the model trains, and what the user can do about it; None if nothing does."""

    def find(self, known: Structure) -> str | None:
        def watched(copy: nn.Module, fake: Any) -> str | None:
            drawing = Drawing(copy)
            before = states_of([*global_sources(), *sources_of(copy)])
            with drawing:
                known.call(copy, fake)
            other = next((source.name for source, _ in moved(before)), None)
            return drawing.first or (other and f"the model, from {other},")

        try:
            who = fake_pass(known.model, watched, known.short_example(2))
        except Exception as error:
            return f"this model can't be tried without memory ({first_line(error)}): choose another option"
        return None if who is None else f"{who} does: {MEND}"


NO_RANDOMNESS = ModelFact("the model draws no random numbers", lambda known: known.get(FirstDraw()))


@final
class Drawing(TorchDispatchMode):
    """Notes the innermost module in which an operator first draws."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.running: list[nn.Module] = []
        self.first: str | None = None
        for module in self.names:
            module.register_forward_pre_hook(lambda module, _: self.running.append(module))
            module.register_forward_hook(lambda *_: self.running.pop() and None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.first is None and DRAWS in func.tags and share_dropped(func, args, kwargs or {}):
            module = self.running[-1] if self.running else None
            name = self.names[module] if module is not None else ""
            self.first = f"{name} ({type(module).__name__})" if name else "the model itself"
        return func(*args, **(kwargs or {}))


def share_dropped(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The probability of dropout with which an operator is called; 1 if it draws for something else. torch leaves out
    arguments that have their default."""
    arguments = schema_of(operator).arguments
    defaults = {each.name: each.default_value for each in arguments if each.name == "dropout_p"}
    given = dict(zip([each.name for each in arguments], args, strict=False))
    return {"dropout_p": 1.0, **defaults, **given, **kwargs}["dropout_p"]
