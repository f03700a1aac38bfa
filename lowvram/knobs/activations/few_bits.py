"""activations: whether what the forward pass saves for the backward pass is kept in few bits.

Chen et al., "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training" (2021); Liu et al.,
"GACT: Activation Compressed Training for Generic Network Architectures" (2022).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compat.torch_autograd import base_of
from lowvram.config.errors import require
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob, Neutral, Stage
from lowvram.core.mesh import target_ranks
from lowvram.core.rig import Rig
from lowvram.core.rounding import MOST_SEEDS
from lowvram.core.saved import Copy, Keeper, Saved, forward_with
from lowvram.core.seeds import seed_of
from lowvram.core.stepper import Stepper, StepperAround, Update
from lowvram.knobs.activations.codes import empty_codes, read_codes, write_codes


@dataclass(frozen=True)
class Full(Neutral):
    """Saved tensors are kept as they are."""

    stage = Stage.NUMERICS


@dataclass(frozen=True)
class FewBits(Knob):
    """Saved activations are kept as codes of `bits` bits, rounded at random, and read back when the backward pass needs
    them. The forward pass computes the same numbers; gradients are right on average."""

    bits: int = 8
    min_bytes: int = 4096
    seed: int = 0

    stage = Stage.NUMERICS
    exactness = Exactness.LOSSY
    saves = Kind.ACTIVATIONS
    needs_always = frozenset({Fact.EVERY_OPERATOR, Fact.KERNEL_COMPILER})  # the latter for one kernel per tensor
    breaks_always = frozenset({Fact.COMPILED, Fact.EXACT_ACTIVATIONS, Fact.UNDOABLE_STEPS})

    def __post_init__(self) -> None:
        require(self.bits in BANDS, "activations.bits", self.bits, "8, 4 or 2")
        require(self.min_bytes >= 1, "activations.min_bytes", self.min_bytes, "at least 1")

    @property
    def band(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return BANDS[self.bits]

    def apply(self, rig: Rig) -> Rig:
        stepper = CountingStepper(rig.stepper, self.seed)
        keeper = InFewBits(rig.model, rig.device, self.min_bytes, self.bits, stepper.next_seed)
        return replace(forward_with(rig, keeper), stepper=stepper)


BANDS = {8: 2e-2, 4: 0.3, 2: 1.0}  # by bits


@final
class CountingStepper(StepperAround):
    """Counts the steps, so that each tensor is rounded by other random numbers, and by the same ones after a
    resumption."""

    def __init__(self, inner: Stepper, seed: int) -> None:
        super().__init__(inner)
        self.seed, self.num_steps, self.num_drawn = seed, 0, 0

    def begin(self, num_parts: int, divisor: Tensor | float = 1.0) -> None:
        self.num_drawn = 0
        self.inner.begin(num_parts, divisor)

    def update(self) -> Update:
        update = self.inner.update()
        self.num_steps += 1  # afterwards: an update that fails is no step
        return update

    def next_seed(self) -> int:
        """Depends on the seed, the rank, the step, and how many tensors this step has rounded."""
        self.num_drawn += 1
        return seed_of(f"{self.seed}:{target_ranks().rank}:{self.num_steps + 1}:{self.num_drawn}") % MOST_SEEDS

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.num_steps = state["num_steps"]


@final
class InFewBits(Keeper):
    """Keeps saved activations as codes."""

    is_exact = False

    def __init__(
        self, model: nn.Module, device: torch.device, min_bytes: int, bits: int, next_seed: Callable[[], int]
    ) -> None:
        super().__init__(model, device, min_bytes)
        self._bits, self._next_seed = bits, next_seed

    def is_apt(self, tensor: Tensor) -> bool:
        """Whether it is an activation. What needs no gradient may be a mask, a table of angles, or the logarithm of a
        sum of exponentials, in which an error would grow."""
        whole = tensor if base_of(tensor) is None else base_of(tensor)
        assert whole is not None
        is_filled = whole.numel() * whole.dtype.itemsize == tensor.untyped_storage().nbytes()  # without gaps
        is_wide = tensor.dtype.is_floating_point and 8 * tensor.dtype.itemsize > self._bits
        return tensor.requires_grad and is_filled and is_wide

    def copy(self, storage: torch.UntypedStorage, flat: Tensor) -> Copy:
        codes = empty_codes(len(flat), self._bits, flat.device)
        write_codes(*codes, flat, self._bits, self._next_seed())
        return Codes(
            weakref.ref(storage), [self.hand_on(each) for each in codes], flat.new_empty(0), len(flat), self._bits
        )


@final
@dataclass(eq=False)
class Codes(Copy):
    """The codes of one storage."""

    source: weakref.ref[torch.UntypedStorage]
    codes: list[Saved]
    like: Tensor  # an empty tensor of its dtype and device
    numel: int
    bits: int
    num_readers: int = 0  # saved tensors that are views of the storage
    num_reads: int = 0
    here: Tensor | None = None  # (numel,) the storage as read back, until all readers have read it

    def view(self, tensor: Tensor) -> Saved:
        self.num_readers += 1
        return CodesView(self, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def read(self) -> Tensor:
        """The storage (numel,). It is shared by the readers that follow one another, such as queries, keys and values
        of one projection."""
        flat = self.here
        if flat is None:
            flat = self.like.new_empty(self.numel)
            read_codes(flat, *(each.read() for each in self.codes), self.bits)
        self.num_reads += 1
        self.here = flat if self.num_reads % self.num_readers else None
        return flat


@final
@dataclass(eq=False)
class CodesView(Saved):
    """A saved tensor whose storage is kept as codes."""

    whole: Codes
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def read(self) -> Tensor:
        return self.whole.read().as_strided(self.size, self.stride, self.offset)
