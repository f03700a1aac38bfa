"""What is compared for a point's fidelity: the gradients of a first step and the losses of the first few. A mode that
no configuration names: the parent (lowvram/fidelity/client.py) asks for it in processes that are not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lowvram.core.copies import original
from lowvram.core.knob import Knob, Stage
from lowvram.core.ranks import rank
from lowvram.core.rig import Rig, Update
from lowvram.core.shards import whole
from lowvram.loops.fields import common
from lowvram.loops.session import Session
from lowvram.results.files.durable import unfinished_folder

PIECE_ELEMENTS = 2**22  # that are widened to fp64 at once


@final
@dataclass(frozen=True)
class GradientWatch(Knob):
    """Keeps the gradients that the optimizers are given, whoever steps them and when: summed over parts and ranks, free
    of a loss scale, whole, in fp32 on the host of rank 0."""

    gradients: dict[Tensor, Tensor] = field(default_factory=dict)  # of each parameter of the model
    hooks: list[Any] = field(default_factory=list)

    stage = Stage.OPTIMIZER

    def apply(self, rig: Rig) -> Rig:
        make = rig.make_optimizer

        def make_watched(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = make(parameters)
            self.hooks.append(optimizer.register_step_pre_hook(self.keep))
            return optimizer

        return replace(rig, make_optimizer=make_watched)

    def keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = whole(parameter.grad)  # all ranks must ask
                if rank() == 0:
                    self.gradients[original(parameter)] = gradient.to("cpu", torch.float32, copy=True)

    def end(self) -> None:
        """The first step is over: nothing is kept any more."""
        for hook in self.hooks:
            hook.remove()


@final
@dataclass(frozen=True)
class Fidelity:
    """A few steps of training from the initial weights.

    Args:
        file: where the reference leaves its gradients, and where a point finds them; None: gradients don't matter.
    """

    steps: int
    file: Path | None
    is_reference: bool
    watch: GradientWatch = field(default_factory=GradientWatch)

    @classmethod
    def asked(cls, steps: int, file: str | None, is_reference: bool) -> Self:
        """From a request."""
        return cls(steps, None if file is None else Path(file), is_reference)

    def run(self, session: Session) -> dict[str, Any]:
        """Tells "compared" and "history"."""
        batches = session.batches(0)
        session.begin(0, self.steps)
        loss, update = first_step(session, self.steps, next(batches))
        self.watch.end()
        if rank() == 0:
            self.compare(session, named_gradients(session, self.watch, update))
        losses, num_applied = [loss], 1
        while len(losses) < self.steps:
            session.events("progress", step=len(losses), values={})
            loss, update = session.update(next(batches), num_applied, self.steps)
            losses.append(loss)
            num_applied += update.applied
        batches.close()
        session.events("history", losses=torch.stack(losses).tolist())
        return common(session)

    def compare(self, session: Session, gradients: dict[str, Tensor]) -> None:
        if self.file is None:
            return
        if self.is_reference:
            save_whole(self.file, gradients)
            return
        with safe_open(str(self.file), framework="pt") as wanted:
            names = sorted({*gradients, *wanted.keys()})
            has = set(wanted.keys())
            pairs = ((gradients.get(name), wanted.get_tensor(name) if name in has else None) for name in names)
            session.events("compared", **compared(pairs)._asdict())


def save_whole(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """In a folder first: safetensors writes beside, and leaves a file whose name nobody knows when it is killed."""
    with unfinished_folder(file) as fresh:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(fresh / file.name))
        (fresh / file.name).replace(file)


def first_step(session: Session, num_steps: int, batch: Any) -> tuple[Tensor, Update]:
    """On the first batch, again until it is applied: a loss scale that was too large has changed no weight."""
    while True:
        loss, update = session.update(batch, 0, num_steps)
        if update.applied:
            return loss, update


def named_gradients(session: Session, watch: GradientWatch, update: Update) -> dict[str, Tensor]:
    """By the names of the model, and as they were before they were clipped: that would hide how large they are."""
    clip = session.settings.groups["stepping"].clip
    by = 1.0 if clip is None else max(1.0, (float(update.grad_norm) + 1e-6) / clip)
    names: dict[Tensor, str] = {parameter: name for name, parameter in session.rig.model.named_parameters()}
    return {names[parameter]: gradient.mul_(by) for parameter, gradient in watch.gradients.items()}


class Compared(NamedTuple):
    """Gradients beside those of the reference, all parameters as one vector; null where the reference's is zero."""

    gradient_error: float | None  # norm of the difference, relative to the reference's norm
    gradient_cosine: float | None  # of the angle between them


def compared(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> Compared:
    """Of (found, wanted) for each parameter, of one shape each, on the CPU; None: that one has no gradient, as good as
    zero. Sums are in fp64."""
    difference = found_square = wanted_square = product = 0.0
    for found, wanted in pairs:
        for one, other in pieces(found, wanted):
            difference += float((one - other).square().sum())
            found_square += float(one.square().sum())
            wanted_square += float(other.square().sum())
            product += float((one * other).sum())
    if not wanted_square:
        return Compared(None if difference else 0.0, None)
    lengths = (found_square * wanted_square) ** 0.5
    return Compared((difference / wanted_square) ** 0.5, product / lengths if lengths else None)


def pieces(found: Tensor | None, wanted: Tensor | None) -> Iterable[tuple[Tensor, Tensor]]:
    """Both in fp64, some elements at a time."""
    like = found if found is not None else wanted
    assert like is not None
    flat = [torch.zeros_like(like).flatten() if one is None else one.flatten() for one in (found, wanted)]
    for one, other in zip(*(each.split(PIECE_ELEMENTS) for each in flat), strict=True):
        yield one.double(), other.double()
