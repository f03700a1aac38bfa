"""Forward passes that run a second time as they ran first.

Each forward pass is looked at itself, as some draw only sometimes: which generators moved, and what changed in the
modules. The second pass begins with all this as it was before the first, and leaves it as it found it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

from torch import nn

from lowvram.core import generators
from lowvram.core.changes import Change, Look, StatisticsFrozen
from lowvram.core.generators import Source, States, global_sources, sources_of, states_of
from lowvram.core.places import Places


class Passes(NamedTuple):
    """The contexts around a forward pass, and around its repetitions."""

    first: First
    again: Again


@final
class Repeatable:
    """A module whose forward passes can be repeated."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places: Places | None = None
        self.sources: list[Source] = []

    def passes(self) -> Passes:
        """The contexts of one forward pass and its repetitions, as torch's checkpoint takes them."""
        if self.places is None or self.places.num_looks == 1:  # the first call may make what it needs
            self.places, self.sources = Places(self.module, self.places), sources_of(self.module)
        first = First(self.places, self.sources)
        return Passes(first, Again(first))


@final
class First(AbstractContextManager[None]):
    """Around a forward pass: finds what it draws and changes.

    Attributes:
        drawn: the generators that it moved, with their states before.
        changes: what it changed in the modules, apart from the statistics of BatchNorms.
        look: what there was before.
    """

    def __init__(self, places: Places, sources: list[Source]) -> None:
        self.places, self.sources = places, sources
        self.before: States = []
        self.look: Look | None = None
        self.drawn: States = []
        self.changes: list[Change] = []

    def __enter__(self) -> None:
        self.look = Look(self.places)
        self.before = states_of([*global_sources(), *self.sources])

    def __exit__(self, *error: Any) -> None:
        before, self.before = self.before, []
        if error[0] is None and self.look is not None:
            self.drawn = generators.moved(before)
            self.changes = self.look.changes()


@final
class Again(AbstractContextManager[None]):
    """Around a repetition of a forward pass. Can be entered again."""

    def __init__(self, first: First) -> None:
        self.first = first
        self.frozen = StatisticsFrozen(first.places.norms)
        self.now: States = []
        self.changes: list[Change] = []

    def __enter__(self) -> None:
        self.now = states_of([source for source, _ in self.first.drawn])
        generators.restore(self.first.drawn)
        self.changes = [] if self.first.look is None else self.first.look.changes_by_anyone()
        for change in self.changes:
            change.undo()
        self.frozen.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.frozen.__exit__(*error)
        for change in reversed(self.changes):
            change.redo()
        self.changes = []
        generators.restore(self.now)
        self.now = []
