"""What is known of a model. A knob asks; a probe answers by a trial, once for all builds of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

from torch import Tensor, nn

from lowvram.core.fact import ModelFact
from lowvram.core.layers import is_plain_linear
from lowvram.core.mesh import tell_once
from lowvram.core.probes.blocks import FoundBlocks, find_blocks

T = TypeVar("T")


class Probe(ABC, Generic[T]):
    """A question about a model. Subclasses are frozen dataclasses, whose fields are the details of the question.

    An answer holds the names of modules instead of modules, so that it holds for each build of the model.
    """

    @abstractmethod
    def find(self, known: Structure) -> T:
        """The answer, from a trial or from the model's modules. The model isn't changed."""


@final
@dataclass(frozen=True)
class Stated(Probe[T]):
    """A question that no trial answers: those who wrote the model or described the data do (`Structure.stated`)."""

    question: str
    otherwise: T  # the answer where nobody states one

    def find(self, known: Structure) -> T:
        del known
        return self.otherwise


@final
@dataclass(frozen=True)
class Blocks(Probe[FoundBlocks]):
    """Which modules are the repeated blocks, and which layers are the last."""

    def find(self, known: Structure) -> FoundBlocks:
        return find_blocks(known.model, known.call, known.example(2))


Stating = Mapping[Probe[Any], Callable[["Structure"], Any]]  # questions that need no trial, each with its answer


@final
@dataclass(frozen=True, eq=False)
class Structure:
    """What is known of a build of a model.

    Args:
        model: on any device, perhaps without memory, perhaps with what knobs have put into it.
        call: calls the model on inputs, and returns its outputs.
        example: makes inputs of so many samples, on the CPU.
        short_example: the same, of texts only the first tokens: enough to show how modules are called.
        stated: what needs no trial.
        found: the answers so far; all builds of a model share it.
    """

    model: nn.Module
    call: Callable[[nn.Module, Any], Any]
    example: Callable[[int], Any]
    short_example: Callable[[int], Any]
    stated: Stating = field(default_factory=dict)
    found: dict[Probe[Any], Any] = field(default_factory=dict)

    def get(self, probe: Probe[T]) -> T:
        """The answer to a question. Raises BadInput if the model can't be called on such inputs."""
        if probe not in self.found:
            self.found[probe] = self.stated.get(probe, probe.find)(self)
        return self.found[probe]

    def modules(self, names: Iterable[str]) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name in names]

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated units of the model, in the order of the forward pass; empty if they aren't known."""
        return self.modules(self.get(Blocks()).blocks)

    @property
    def head(self) -> nn.Linear | None:
        """The layer that makes the logits, if the criterion is their cross-entropy summed over the targets; None if
        there is no such layer, or it isn't known."""
        name = self.get(Blocks()).head
        module = None if name is None else self.model.get_submodule(name)
        return module if isinstance(module, nn.Linear) else None

    @property
    def last_weights(self) -> set[Tensor]:
        """The weights of the layers that make the outputs, whatever the criterion; empty if they aren't known."""
        parameters: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        last = {parameters[name] for name in self.get(Blocks()).last if name in parameters}
        return last.union([] if self.head is None else [self.head.weight])


def known_last_weights(known: Structure, option: str) -> set[Tensor]:
    """`Structure.last_weights`; if they aren't known, a line says so, once for each option."""
    last = known.last_weights
    if not last:
        tell_once(f"{option}: which layer is the model's last isn't known, so each is treated as an inner one")
    return last


def unless(has: Callable[[Structure], object], remedy: str) -> Callable[[Structure], str | None]:
    """A `ModelFact.lack`: the reason `remedy`, where `has` finds nothing in the model."""
    return lambda known: None if has(known) else remedy


def lacking(known: Structure, facts: Iterable[ModelFact]) -> dict[ModelFact, str]:
    """Those of the facts that the model lacks, each with what the user can do."""
    reasons = {fact: fact.lack(known) for fact in facts}
    return {fact: reason for fact, reason in reasons.items() if reason is not None}


def no_blocks(known: Structure) -> str | None:
    if known.blocks:
        return None
    why = known.get(Blocks()).trouble
    trouble = "" if why is None else f", as the model can't be tried without memory ({why})"
    return f"none were found{trouble}: name their class with model.blocks=CLASS"


BLOCKS = ModelFact("the task knows the model's repeated blocks", no_blocks)
HEAD = ModelFact(
    "the task knows the model's last layer",
    unless(
        lambda known: known.head is not None and is_plain_linear(known.head),
        "this task has no linear layer whose product the model returns as it is, without a hook, a forward pass of its"
        " own or a change afterwards: leave logits=full, and list what trains in adapter.train",
    ),
)
