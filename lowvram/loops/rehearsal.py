"""train.rehearse=true: steps of the heaviest batch before training, so that memory runs out in the first minute or not
at all. They are taken by a model of their own, which is gone when training begins."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lowvram.config.errors import require
from lowvram.config.settings import KNOB_GROUPS, Settings
from lowvram.core import generators
from lowvram.core.knob import is_compiled
from lowvram.core.ledger import ledger
from lowvram.core.mesh import all_ranks
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step
from lowvram.data.batch_sizes import SameSize
from lowvram.data.heaviest import heaviest
from lowvram.data.source import Data
from lowvram.loops.session import Events, parts_of
from lowvram.loops.train import Train
from lowvram.results.row import size_text


def is_rehearsed(settings: Settings) -> bool:
    return settings.train.rehearse and isinstance(settings.groups["mode"], Train)


def rehearse(
    make_rig: Callable[[], Rig], data: Data, settings: Settings, plan: Mapping[str, Any] | None, events: Events
) -> tuple[Rig, dict[str, Any]]:
    """Take the steps, say what they took, and leave no trace of them, neither in random generators (the model's own
    included) nor in the device's memory. A collective.

    Returns:
        The rig to train, made anew, and the row's fields.

    Raises:
        BadInput: to make the model draws from a generator of its own, so that it would be another one now.
    """
    before, rig = generators.saved(), make_rig()
    own = generators.states_of(generators.sources_of(rig.model))
    events("rehearsal", **parts_of(settings))
    peak_bytes = peak_of(rig, data, settings)
    generators.restore(generators.moved(own))
    del rig
    torch.compiler.reset()  # compiled code keeps its model
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    generators.load(before)
    if all_ranks().size > 1:
        (peak_bytes,) = all_ranks().largest([peak_bytes])
    planned = (plan or {}).get("allocated_bytes")
    taken = f"took {size_text(peak_bytes)} at its peak" if peak_bytes else "fits"
    print(f"rehearsed: a step of the heaviest batch {taken}{f', planned {size_text(planned)}' if planned else ''}")
    rig = make_rig()
    allowed = "false for this model: making it draws from a generator of its own, and the second one would be another"
    require(not generators.moved(own), "train.rehearse", True, allowed)
    return rig, {"memory": {"rehearsed_peak_bytes": peak_bytes or None}}


def peak_of(rig: Rig, data: Data, settings: Settings) -> int:
    """The peak of steps of the heaviest batch, with each choice of blocks that may be the heaviest, in bytes: of a
    card's allocator, or on a CPU of the tensors; 0 where compiled code hides these."""
    batch, is_counted = heaviest_batch(rig, data, settings), rig.device.type != "cuda"
    is_counted &= not is_compiled(settings.groups[group] for group in KNOB_GROUPS)
    peak_bytes = 0
    for fix in rig.heaviest or [lambda: None]:
        fix()
        step(rig, batch)  # makes the optimizer's state
        if is_counted:
            with ledger(rig.model, rig.stepper, batch.tensors(), rig.device, teacher=rig.teacher) as peak:
                step(rig, batch)
            peak_bytes = max(peak_bytes, peak.peak_bytes)
        else:
            step(rig, batch)
    return torch.cuda.max_memory_allocated() if rig.device.type == "cuda" else peak_bytes


def heaviest_batch(rig: Rig, data: Data, settings: Settings) -> Part:
    """This rank's slice of the logical batch that takes the most memory."""
    size = settings.train.batch_size
    loader, samples = settings.groups["loader"], heaviest(data.train, size)
    batches = loader.batches(samples, SameSize(size), settings.root.seed, 0, rig.device)
    try:
        return next(batches)
    finally:
        batches.close()
