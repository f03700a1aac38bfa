"""Forward passes that run a second time as they ran first.

Each forward pass is looked at itself, as some draw only sometimes: which generators moved, and what changed in the
modules. The second pass begins with all this as it was before the first, and leaves it as it found it. In the first
steps what the passes save is compared, too (`Witness`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.backends import cuda

from lowvram.compat.torch_autograd import version_of
from lowvram.compat.torch_modes import is_in_dispatch_mode
from lowvram.compat.torch_modules import own_buffers, own_parameters
from lowvram.config.errors import Incompatible
from lowvram.core import generators
from lowvram.core.changes import Change, Look, OfEntry, StatisticsFrozen
from lowvram.core.generators import OfTorch, Source, States, global_sources, sources_of, states_of
from lowvram.core.places import Places
from lowvram.core.saved import is_saved_exactly
from lowvram.core.witness import Witness

NUM_CHECKED = 3  # rounds of a forward pass and its repetition
NUM_CHECKED_AGAIN = 2  # more of them, when a forward pass changes or draws what none did before


class Passes(NamedTuple):
    """The contexts around a forward pass, and around its repetitions."""

    first: First
    again: Again


@final
class Repeatable:
    """A module whose forward passes can be repeated.

    Args:
        is_checked: autograd is to save in a repetition what it saved in the first pass. That is compared in the first
            steps, and later when a forward pass does what none did before.
    """

    def __init__(self, module: nn.Module, is_checked: bool = False) -> None:
        self.module, self.is_checked = module, is_checked
        self.places: Places | None = None
        self.sources: list[Source] = []
        self.with_parameters: list[nn.Module] = []
        self.num_unchecked, self.is_round_over = NUM_CHECKED if is_checked else 0, False
        self.deeds: set[str] = set()  # what passes have changed, and from what they drew
        self.hides_draws = False  # some draw, and set the generator back
        self.are_versions_kept = True  # of weights: they tell whether somebody has written to them

    def passes(self) -> Passes:
        """The contexts of one forward pass and its repetitions, as torch's checkpoint takes them."""
        if self.is_round_over:
            self.num_unchecked, self.is_round_over = max(0, self.num_unchecked - 1), False
        if self.places is None or self.places.num_looks == 1:  # the first call may make what it needs
            self.places, self.sources = Places(self.module, self.places), sources_of(self.module)
            self.with_parameters = [each for each in self.module.modules() if own_parameters(each)]
        self.places.is_watching_norms = self.is_checking
        first = First(self, self.places)
        return Passes(first, Again(first))

    @property
    def is_checking(self) -> bool:
        """Whether the next forward pass is compared with its repetition: not where a trace or a ledger follows it, nor
        where its inputs are kept in fewer bits."""
        return self.num_unchecked > 0 and not is_in_dispatch_mode() and is_saved_exactly()

    def witness(self) -> Witness | None:
        """Of the next forward pass; None if it isn't checked."""
        if self.places is None or not self.is_checking:
            return None
        return Witness(type(self.module).__name__, self.places.norms)

    def note(self, deeds: Iterable[str]) -> None:
        """Note what a forward pass has done: what is new is checked."""
        new = set(deeds) - self.deeds
        if new and self.is_checked:
            self.deeds |= new
            self.num_unchecked = max(self.num_unchecked, NUM_CHECKED_AGAIN)


@final
class First(AbstractContextManager[None]):
    """Around a forward pass: finds what it draws and changes.

    Attributes:
        drawn: the generators that it moved, with their states before.
        changes: what it changed in the modules, apart from the statistics of BatchNorms.
        look: what there was before.
    """

    def __init__(self, owner: Repeatable, places: Places) -> None:
        self.owner, self.places = owner, places
        self.before: States = []
        self.look: Look | None = None
        self.drawn: States = []
        self.changes: list[Change] = []
        self.frozen = places.frozen_norms
        self.weights: Weights | None = None
        self.kernels = KernelChoice()
        self.witness: Witness | None = None
        self.inner = ExitStack()

    def __enter__(self) -> None:
        self.look = Look(self.places)
        self.before = states_of([*global_sources(), *self.owner.sources])
        if self.owner.is_checked:
            self.weights, self.witness = Weights(self.owner.with_parameters), self.owner.witness()
        if self.witness is not None:
            self.inner.enter_context(self.witness.of_first())

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        before, self.before = self.before, []
        if error[0] is None and self.look is not None:
            self.drawn = generators.moved(before)
            self.changes = self.look.changes()
            self.learn(before)
            self.owner.note([*(each.what for each in self.changes), *(source.name for source, _ in self.drawn)])

    def learn(self, before: States) -> None:
        """See how the pass used generators and BatchNorms."""
        owner, witness = self.owner, self.witness
        moved = {id(source) for source, _ in self.drawn}
        if witness is not None and witness.operators.draws and not any(is_torchs(each) for each, _ in self.drawn):
            owner.hides_draws = True
        if owner.hides_draws:
            self.drawn += [(each, state) for each, state in before if is_torchs(each) and id(each) not in moved]


def is_torchs(source: Source) -> bool:
    return isinstance(source, OfTorch)


@final
class Again(AbstractContextManager[None]):
    """Around a repetition of a forward pass. Can be entered again."""

    def __init__(self, first: First) -> None:
        self.first = first
        self.frozen = StatisticsFrozen(first.frozen)
        self.now: States = []
        self.changes: list[Change] = []
        self.inner = ExitStack()

    def __enter__(self) -> None:
        """Raises Incompatible: it can't run as the first pass did."""
        first = self.first
        self.check_weights()
        self.now = states_of([source for source, _ in first.drawn])
        generators.restore(first.drawn)
        self.changes = [] if first.look is None else first.look.changes_by_anyone()
        if first.witness is not None:
            first.owner.is_round_over |= first.witness.is_any_known
            self.learn(first.witness)
        for change in self.changes:
            change.undo()
        self.frozen.__enter__()
        if first.weights is not None:
            first.weights.put_back()
        self.inner.enter_context(first.kernels)
        if first.witness is not None:
            self.inner.enter_context(first.witness.of_repetition())

    def __exit__(self, *error: Any) -> None:
        try:
            self.inner.__exit__(*error)
        finally:
            self.leave(*error)

    def leave(self, *error: Any) -> None:
        """Have everything as it was before the repetition."""
        if self.first.weights is not None:
            self.first.weights.take_away()
        self.frozen.__exit__(*error)
        for change in reversed(self.changes):
            change.redo()
        self.changes = []
        generators.restore(self.now)
        self.now = []

    def learn(self, witness: Witness) -> None:
        """See whose statistics have changed among the BatchNorms that were used otherwise than by themselves: they are
        put back from now on."""
        entries = (each for each in self.changes if isinstance(each, OfEntry) and each.is_different())
        changed = {id(each.owner) for each in entries}
        norms = (each for each in witness.operators.used_otherwise() if id(own_buffers(each)) in changed)
        self.first.places.used_otherwise |= set(map(id, norms))

    def check_weights(self) -> None:
        """See whether anybody has written to the module's weights since the forward pass. Some knobs do, to have them
        in another place: what is computed with them is then the same, as the first steps have shown.

        Raises:
            Incompatible: somebody has.
        """
        first = self.first
        written = None if first.weights is None else first.weights.written()
        if written is None:
            return
        if first.witness is not None:
            first.owner.are_versions_kept = False
        elif first.owner.are_versions_kept:
            raise Incompatible(
                f"{written} in {type(first.owner.module).__name__} was changed in place after its forward pass began,"
                " so that the block can't be computed again as it was (choose ckpt=none)"
            )


FLAGS: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
]


@final
class KernelChoice(AbstractContextManager[None]):
    """The present choice: inside it, it holds again. Can be entered again."""

    def __init__(self) -> None:
        self.chosen = now()
        self.outside = self.chosen

    def __enter__(self) -> None:
        self.outside = now()
        self.set(self.outside, self.chosen)

    def __exit__(self, *error: Any) -> None:
        self.set(self.chosen, self.outside)

    def set(self, present: list[bool], wanted: list[bool]) -> None:
        for (_, enable), is_on, is_wanted in zip(FLAGS, present, wanted, strict=True):
            if is_on != is_wanted:
                enable(is_wanted)


def now() -> list[bool]:
    return [is_enabled() for is_enabled, _ in FLAGS]


class Weight(NamedTuple):
    """A weight at a forward pass."""

    what: str  # for messages: "Linear.weight"
    owner: MutableMapping[str, Tensor | None]
    name: str
    tensor: Tensor
    requires_grad: bool
    version: int


@final
class Weights:
    """Those of modules, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.weights = [
            Weight(type(module).__name__, own, name, weight, weight.requires_grad, version_of(weight))
            for module in modules
            for own in [own_parameters(module)]
            for name, weight in own.items()
            if weight is not None and not weight.is_inference()
        ]
        self.now: list[tuple[Weight, Tensor | None, bool]] = []

    def put_back(self) -> None:
        """Have the modules hold them again, and train those that trained. Keeps what is there now."""
        self.now = []
        for each in self.weights:
            present = each.owner.get(each.name)
            if present is not each.tensor or each.tensor.requires_grad != each.requires_grad:
                self.now.append((each, present, each.tensor.requires_grad))
                each.owner[each.name] = each.tensor
                if each.tensor.is_leaf:
                    each.tensor.requires_grad_(each.requires_grad)

    def take_away(self) -> None:
        """The inverse of `put_back`."""
        for each, present, requires_grad in reversed(self.now):
            each.owner[each.name] = present
            if each.tensor.is_leaf:
                each.tensor.requires_grad_(requires_grad)
        self.now = []

    def written(self) -> str | None:
        """One that was written to since, by its name."""
        weights = (each for each in self.weights if version_of(each.tensor) != each.version)
        return next((f"{each.what}.{each.name}" for each in weights), None)
