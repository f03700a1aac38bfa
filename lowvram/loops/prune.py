"""mode=prune: a smaller model from a trained one. Whole units leave, so that the tensors are really smaller. Nothing is
trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, final

from torch import Tensor

from lowvram.config.errors import BadInput, Incompatible, require
from lowvram.config.registry import neutral_options
from lowvram.config.settings import ExportFormat, PruneSettings
from lowvram.core.assemble import assemble
from lowvram.core.ranks import num_ranks
from lowvram.core.rig import Part, Rig
from lowvram.data.loader import TimedBatches
from lowvram.export.folder import check_free, export, file_bytes
from lowvram.export.plain import Origin
from lowvram.knobs.adapter import NoAdapter
from lowvram.loops import fields
from lowvram.loops.evaluate import Evaluation, evaluate
from lowvram.loops.importance import IMPORTANCES
from lowvram.loops.profiling.post_run import run_peaks
from lowvram.loops.session import Session
from lowvram.models.builtin import OwnModel
from lowvram.models.layout import EXPORTED, plain, weights_in
from lowvram.models.widths import sliced

ALLOWED = ("accum", "allocator")  # groups that change neither the weights nor how the model is called


@final
@dataclass(frozen=True)
class Prune:
    """conf/mode/prune.yaml"""

    def run(self, session: Session) -> dict[str, Any]:
        large = trained_model(session)
        check_free(session.folder / EXPORTED)
        small = smaller(large, session.settings.prune)
        session.begin(0, session.settings.prune.batches)
        before = evaluate(session)
        model = small.make(session.data.spec)
        model.load_state_dict(kept_values(session, large, small))
        made_from = Origin(small, session.data.spec, NoAdapter(), session.settings.root.seed)
        export(session.folder / EXPORTED, model, made_from, merge=True)
        print(f"pruned by {session.settings.prune.importance.name}: {changes(large, small)}")
        written = replace(small, init=str(session.folder / EXPORTED))
        pruned = going_on(session, written)
        after = evaluate(pruned)
        figures = [about(session.rig, large.init, before, "before"), about(pruned.rig, written.init, after, "after")]
        return fields.merged(
            fields.common(pruned),
            {"loss": {"eval": after.loss}, "eval": after.scores, "memory": run_peaks(session)},
            {"export": {"file_bytes": file_bytes(session.folder / EXPORTED)}},
            *({"pruning": each} for each in figures),
        )


def trained_model(session: Session) -> OwnModel:
    """The configuration of the model to be pruned.

    Raises:
        BadInput: a run would be replaced; no trained model is given, it isn't one of lowvram's, or it would be written
            in another format.
        Incompatible: a knob has changed the model, or may have.
    """
    model, settings = session.problem.model, session.settings.prune
    allowed = "train: a run that prunes writes into a folder of its own, and can't be resumed"
    require(not session.is_resumed, "mode", "prune", allowed)
    if not isinstance(model, OwnModel):
        allowed = "transformer or resnet with mode=prune, which doesn't know what belongs together in other models"
        raise BadInput("model", type(model).__name__, allowed)
    allowed = "the folder of a finished run, or of an exported model"
    if settings.run is not None:
        allowed = "typed on the command line beside mode=prune: from a preset, or with modes of a sweep, it isn't read"
    require(model.init is not None, "prune.run", settings.run, allowed)
    require(num_ranks() == 1, "sharding.ranks", num_ranks(), "1 with mode=prune, which computes in one process")
    check_plain(session)
    allowed = "safetensors with mode=prune: the run that trains the pruned model on may write another format"
    written = session.settings.export.format
    require(written is ExportFormat.safetensors, "export.format", written.name, allowed)
    return model


def check_plain(session: Session) -> None:
    """Raises Incompatible unless the session's model is the trained one as its file has it: knobs round weights, set
    them to zero, move them away, freeze them, or call the model otherwise."""
    chosen = {group: option for group, _, option in (name.partition("=") for name in session.knobs)}
    neutral = {group: option for group, option in neutral_options().items() if group not in ALLOWED}
    others = {group: option for group, option in neutral.items() if chosen.get(group, option) != option}
    if others:
        typed = ", ".join(f"{group}={chosen[group]}" for group in others)
        remedy = " ".join(f"{group}={option}" for group, option in others.items())
        raise Incompatible(f"{typed}: mode=prune takes the model as its file has it, so it needs {remedy}")


def smaller(large: OwnModel, settings: PruneSettings) -> OwnModel:
    """The configuration of the pruned model. Raises BadInput if it would be as large as before."""
    small = large.pruned(settings.ratio, settings.round_to)
    sizes = zip(large.inner_widths(), small.inner_widths(), strict=True)
    is_smaller = settings.ratio == 0 or any(after.num_units < before.num_units for before, after in sizes)
    allowed = f"larger, or prune.round_to={settings.round_to} smaller: this leaves all widths of the model as they are"
    require(is_smaller, "prune.ratio", settings.ratio, allowed)
    return small


def kept_values(session: Session, large: OwnModel, small: OwnModel) -> dict[str, Tensor]:
    """The trained tensors without the least important units of each width."""
    settings, batches, widths = session.settings.prune, session.batches(0), large.inner_widths()
    session.rig.model.eval()
    try:
        counted = counting(session, batches, settings.batches)
        scores = IMPORTANCES[settings.importance].scores(session.rig, widths, counted)
    finally:
        batches.close()
    numbers = (width.num_units for width in small.inner_widths())
    kept = [score.topk(number).indices for score, number in zip(scores, numbers, strict=True)]
    return sliced(session.rig.model.state_dict(), widths, kept)


def counting(session: Session, batches: TimedBatches, num_batches: int) -> Iterator[Part]:
    """The first batches; each counts as a step once it was used."""
    for number, batch in enumerate(islice(batches, num_batches), start=1):
        yield batch
        session.events("progress", step=number, values={})


def going_on(session: Session, model: OwnModel) -> Session:
    """The session in which the pruned model would train on. It reads what was written."""
    settings = replace(session.settings, groups={**session.settings.groups, "model": model})
    problem = settings.groups["task"].pose(model, session.data.spec)
    rig = assemble(problem, session.knobs, session.rig.device, settings.root.seed)
    return replace(session, settings=settings, problem=problem, rig=rig)


def changes(large: OwnModel, small: OwnModel) -> str:
    """The fields in which two configurations differ, as they are typed."""
    before, after = plain(large), plain(small)
    changed = [f"model.{name}={value}" for name, value in after.items() if name != "init" and value != before[name]]
    return " ".join(changed) or "no unit left"


def about(rig: Rig, weights: str | None, evaluation: Evaluation, when: str) -> fields.Fields:
    """The figures of the model before, or after, it was pruned."""
    return {
        f"parameters_{when}": sum(parameter.numel() for parameter in rig.model.parameters()),
        f"file_{when}_bytes": weights_in(str(weights)).stat().st_size,
        f"loss_{when}": evaluation.loss,
    }
