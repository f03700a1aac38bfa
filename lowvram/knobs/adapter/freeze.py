"""adapter=none trains the whole model, adapter=freeze only some of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from lowvram.config.errors import require
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Neutral
from lowvram.core.names import check_matches, is_named
from lowvram.core.rig import Rig
from lowvram.core.structure import HEAD
from lowvram.knobs.adapter.parts import Adapter, Frozen, freeze_statistics


@final
@dataclass(frozen=True)
class NoAdapter(Neutral, Adapter):
    """The whole model trains."""

    searched = False


@final
@dataclass(frozen=True)
class Freeze(Frozen):
    """Only named parts of the model train, or only its head; the rest is frozen."""

    train: list[str] | None = None

    band = 2e-6  # over the gradients of what trains
    decides_learning = True

    def __post_init__(self) -> None:
        allowed = "null (the head) or a list of at least one name"
        require(self.train is None or bool(self.train), "adapter.train", "[]", allowed)

    def needs(self) -> frozenset[Fact | ModelFact]:
        return frozenset({HEAD} if self.train is None else ())

    def breaks(self) -> frozenset[Fact]:
        return frozenset({Fact.TRAINED_BLOCKS} if self.train is None else ())

    def apply(self, rig: Rig) -> Rig:
        parameters = dict(rig.model.named_parameters(remove_duplicate=False))
        check_matches("adapter.train", self.train or [], parameters, "the model's parameters")
        head = rig.structure.head if self.train is None else None
        trains = {weight for name, weight in parameters.items() if is_named(name, self.train or [])}
        trains |= set() if head is None else set(head.parameters())
        for weight in parameters.values():
            weight.requires_grad_(weight in trains)
        freeze_statistics(rig.model)
        return rig
