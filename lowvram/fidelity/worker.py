"""The mode of the processes of a comparison: it records the gradients of the first step and the losses of the first few
steps. It isn't an option of `mode`: the parent (lowvram/fidelity/client.py) requests it.
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
from lowvram.core.generators import global_sources, restore, sources_of, states_of
from lowvram.core.knob import Knob, Stage
from lowvram.core.mesh import all_ranks
from lowvram.core.rig import Rig
from lowvram.core.shards import whole
from lowvram.core.stepper import Update
from lowvram.loops.fields import common
from lowvram.loops.session import Session
from lowvram.results.files.durable import unfinished_folder

PIECE_ELEMENTS = 2**22  # converted to fp64 at a time


@final
@dataclass(frozen=True)
class KeepGradients(Knob):
    """Copies the gradients that each optimizer step uses: summed over parts and ranks, without a loss scale, unsharded,
    in fp32, on the host of rank 0."""

    gradients: dict[Tensor, Tensor] = field(default_factory=dict)  # by parameter of the model
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
                gradient = whole(parameter.grad, parameter)  # a collective, so on all ranks
                if all_ranks().is_first:
                    self.gradients[original(parameter)] = gradient.to("cpu", torch.float32, copy=True)

    def end(self) -> None:
        """Stop copying gradients."""
        for hook in self.hooks:
            hook.remove()


@final
@dataclass(frozen=True)
class Fidelity:
    """A few steps of training from the initial weights.

    Args:
        file: where the reference writes its gradients, and the point reads them; None: only losses are compared.
    """

    steps: int
    file: Path | None
    is_reference: bool
    watch: KeepGradients = field(default_factory=KeepGradients)

    @classmethod
    def asked(cls, steps: int, file: str | None, is_reference: bool) -> Self:
        """From the entries of a request."""
        return cls(steps, None if file is None else Path(file), is_reference)

    def run(self, session: Session) -> dict[str, Any]:
        """Train for a few steps; send the events "compared" (unless a reference) and "history"."""
        batches = session.batches(0)
        session.begin(0, self.steps)
        loss, update = first_step(session, self.steps, next(batches))
        self.watch.end()
        if all_ranks().is_first:
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
    """Write into a temporary folder first: if killed, safetensors leaves a partial file of unknown name beside
    `file`."""
    with unfinished_folder(file) as fresh:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(fresh / file.name))
        (fresh / file.name).replace(file)


def first_step(session: Session, num_steps: int, batch: Any) -> tuple[Tensor, Update]:
    """One step on the first batch, repeated until it is applied: with too large a loss scale it changed no weight. Each
    time it draws what the reference's only one draws."""
    before = states_of([*global_sources(), *sources_of(session.rig.model)])
    while True:
        loss, update = session.update(batch, 0, num_steps)
        if update.applied:
            return loss, update
        restore(before)


def named_gradients(session: Session, watch: KeepGradients, update: Update) -> dict[str, Tensor]:
    """The gradients by parameter name. Clipping, which would hide an error of their size, is undone."""
    clips = [clip for knob in session.knobs.values() if (clip := knob.clips_at()) is not None]
    by = max([1.0, *((float(update.grad_norm) + 1e-6) / clip for clip in clips)])
    names = session.rig.names_of_updated
    return {names[parameter]: gradient.mul_(by) for parameter, gradient in watch.gradients.items()}


class Compared(NamedTuple):
    """The gradients against the reference's, all parameters as one vector; None if the reference's are zero."""

    gradient_error: float | None  # norm of the difference, relative to the reference's norm
    gradient_cosine: float | None  # cosine of the angle between the two vectors


def compared(pairs: Iterable[tuple[Tensor | None, Tensor | None]]) -> Compared:
    """Compare (gradient, reference) of each parameter, on the CPU; None counts as zero. Sums are in fp64."""
    difference = square = reference_square = product = 0.0
    for gradient, reference in pairs:
        for values, wanted in pieces(gradient, reference):
            difference += float((values - wanted).square().sum())
            square += float(values.square().sum())
            reference_square += float(wanted.square().sum())
            product += float((values * wanted).sum())
    if not reference_square:
        return Compared(None if difference else 0.0, None)
    lengths = (square * reference_square) ** 0.5
    return Compared((difference / reference_square) ** 0.5, product / lengths if lengths else None)


def pieces(gradient: Tensor | None, reference: Tensor | None) -> Iterable[tuple[Tensor, Tensor]]:
    """Both in fp64, some elements at a time. At least one is a tensor; None counts as zero."""
    like = gradient if gradient is not None else reference
    assert like is not None
    both = [torch.zeros_like(like) if tensor is None else tensor for tensor in (gradient, reference)]
    for values, wanted in zip(*(tensor.flatten().split(PIECE_ELEMENTS) for tensor in both), strict=True):
        yield values.double(), wanted.double()
