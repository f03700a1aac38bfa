"""What the exported file is worth: its loss on the held-out samples, its bytes, and how long a batch takes through it.

Everything here goes through the file as it was loaded again, on the CPU.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput
from lowvram.config.transforms import ExportedWeights
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.knob import weights_per_scale
from lowvram.core.mesh import all_ranks
from lowvram.core.rig import Part
from lowvram.core.states import load_whole, whole_model
from lowvram.data.loader import every_sample
from lowvram.knobs.adapter.parts import Adapter
from lowvram.loops.evaluate import loss_in_evaluation
from lowvram.loops.export.folder import export, export_as, file_bytes, format_of, refusing
from lowvram.loops.export.format import Format, Trained
from lowvram.loops.export.plain import Origin, made_from
from lowvram.loops.session import Session
from lowvram.loops.shard_files import sharded_bytes
from lowvram.loops.spilled import spilled
from lowvram.models.layout import EXPORTED, with_extra_state
from lowvram.tasks import Problem

FEW_BATCHES = 4  # whose activations choose the scales of a graph in 8 bits
MOST_PAIRS, MOST_SECONDS = 20, 5.0  # of the comparison of times; at least `LEAST_PAIRS` are timed
LEAST_PAIRS = 3

Outputs = Callable[[Any], Any]  # inputs of a batch -> outputs for the criterion


def exported_weights(session: Session) -> AbstractContextManager[Any]:
    """Inside it the model has the weights that `export.of` names (`take_best` has loaded the best). Raises BadInput if
    there are none."""
    of, averaged = session.settings.export.of, session.rig.averaged
    if of is ExportedWeights.best and session.rig.evaluating is not nullcontext:
        why = "the best evaluation is one of averages, and export.of=best exports the weights that a snapshot has"
        raise BadInput("export.of", of.name, f"last or ema with ema.evaluate=true: {why}")
    if of is not ExportedWeights.ema:
        return nullcontext()
    if averaged is None:
        raise BadInput("export.of", of.name, "last, or ema with averages of the weights: add ema=device")
    return averaged()


def export_weights(session: Session) -> dict[str, Any]:
    """Write the session's model as it is now, from rank 0; return the row's fields about the file. A collective."""
    with exported_weights(session):
        model = whole_model(session.rig.model, session.rig.task.make_model, keep_whole(session))
        return {} if model is None else export_run(session, model, session.folder / EXPORTED)


def take_best(
    model: nn.Module, saved: Mapping[str, Any] | None, now: Mapping[str, Any], best: int | None, step: int
) -> bool:
    """Load the weights of the best evaluation into the model, if they are all there; returns whether they are, and says
    so if not. A collective: all ranks must call it.

    Args:
        saved: the snapshot of that evaluation; None: there is none.
        now: what a snapshot would have of the model now: more, if weights that were frozen have been changed since.
        best, step: after which that evaluation was made, and the run's last one.
    """
    is_whole = saved is not None and now.keys() <= saved["model"].keys()
    if all_ranks().any(not is_whole) or saved is None:
        why = (
            "no evaluation had a finite value" if best is None else f"the snapshot of step {best} isn't whole any more"
        )
        print(f"export.of=best: {why}, so the weights of step {step} are exported")
        return False
    print(f"export.of=best: the weights of step {best} are exported")
    load_whole(model, saved["model"])
    return True


def keep_whole(session: Session) -> Callable[[Tensor], Tensor]:
    """Where rank 0 keeps a sharded model's whole tensors until they are written: in memory or, above
    snapshot.sharded_above_gib, on the disk."""
    is_large = sharded_bytes(session.rig.model.state_dict()) > session.settings.snapshot.sharded_above_bytes
    return partial(spilled, session.folder) if is_large else Tensor.cpu


def export_run(session: Session, model: nn.Module, folder: Path) -> dict[str, Any]:
    """Write the trained model, and return the row's fields about the file.

    Args:
        model: with whole tensors.
    """
    settings = session.settings
    adapter = next(knob for knob in session.knobs.values() if isinstance(knob, Adapter))
    origin = Origin(session.problem.model, session.data.spec, adapter, settings.root.seed)
    chosen = format_of(settings.export.format, weights_per_scale(session.knobs.values()))
    if chosen is None:
        export(folder, model, origin, settings.export.merge)
        return {"export": {"file_bytes": file_bytes(folder)}}
    fields = written_as(chosen, session, model, origin, folder)
    gc.collect()  # graphs have cycles, which would keep their weights into the steps that are measured next
    return fields


def written_as(chosen: Format, session: Session, model: nn.Module, origin: Origin, folder: Path) -> dict[str, Any]:
    """As `export_run`. The file is loaded without asking, since this process has just written it."""
    batches = [part.inputs for part in islice(held_out(session), FEW_BATCHES)]
    with same_draws_afterwards():  # a model's constructor may draw its first weights
        trained = export_as(chosen, folder, model, origin, session.problem, batches)
        with refusing(chosen.name):
            loaded = chosen.load(folder, lambda: with_extra_state(made_from(origin.config, origin.spec), folder))
        fields = fields_of(session, chosen, trained, loaded)
    return fields | {"export": fields["export"] | {"file_bytes": file_bytes(folder)}}


def held_out(session: Session) -> Iterator[Part]:
    """All held-out samples, on the CPU, in parts no larger than those of training."""
    settings = session.settings
    part_size = math.ceil(settings.train.batch_size / settings.num_parts)
    return every_sample(session.data.eval, part_size, settings.groups["loader"].collate)


@torch.no_grad()
def fields_of(session: Session, chosen: Format, trained: Trained, loaded: nn.Module) -> dict[str, Any]:
    problem = session.problem

    def exported(inputs: Any) -> Any:
        with refusing(chosen.name):  # around the file alone: samples and the criterion aren't the format's
            return chosen.outputs(problem, loaded, inputs)

    latency_ms, fp32_ms = interleaved_ms(exported, trained.outputs, trained.batches[0])
    return {
        "eval": {"loss_exported": mean_loss(problem, exported, held_out(session))},
        "export": {"latency_ms": latency_ms, "latency_fp32_ms": fp32_ms},
    }


def mean_loss(problem: Problem, outputs: Outputs, parts: Iterable[Part]) -> float:
    """Per target, in nats."""
    with loss_in_evaluation(problem):
        of_parts = [(problem.criterion(outputs(part.inputs), part), problem.num_targets(part)) for part in parts]
    return sum(loss.item() for loss, _ in of_parts) / sum(count.double().item() for _, count in of_parts)


def interleaved_ms(first: Outputs, second: Outputs, inputs: Any) -> tuple[float, float]:
    """The median times of both, called in turn, so that other programs slow both alike. Both are called once before."""
    times_s: tuple[list[float], list[float]] = ([], [])
    for outputs in (first, second):
        outputs(inputs)
    started = time.monotonic()
    while len(times_s[0]) < LEAST_PAIRS or (len(times_s[0]) < MOST_PAIRS and time.monotonic() - started < MOST_SECONDS):
        for outputs, of_one in zip((first, second), times_s, strict=True):
            before = time.perf_counter()
            outputs(inputs)
            of_one.append(time.perf_counter() - before)
    return 1e3 * median(times_s[0]), 1e3 * median(times_s[1])
