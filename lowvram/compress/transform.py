"""What the modes have in common that make another model from a trained one: mode=prune and mode=grow. Nothing is
trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput, Incompatible, require
from lowvram.config.registry import neutral_options
from lowvram.config.transforms import ExportFormat
from lowvram.core.assemble import assemble
from lowvram.core.mesh import all_ranks
from lowvram.core.rig import Rig
from lowvram.core.values import first_names, own_tensors
from lowvram.knobs.adapter import NoAdapter
from lowvram.loops import fields
from lowvram.loops.evaluate import Evaluation, evaluate
from lowvram.loops.export.folder import check_free, export, file_bytes
from lowvram.loops.export.plain import Origin
from lowvram.loops.profiling.post_run import run_peaks
from lowvram.loops.session import Session
from lowvram.models.layout import EXPORTED, dtypes_in
from lowvram.models.remade import Remade, Trained

M = TypeVar("M", bound=Remade)
FEW = 2  # samples that show whether another model computes the same
ALLOWED = ("accum", "allocator")  # groups that change neither the weights nor how the model is called


def transformed(
    session: Session, what: str, models: tuple[Remade, Any], values: Callable[[], Mapping[str, Tensor]]
) -> fields.Fields:
    """Write the new model into the session's folder, evaluate the old one and the new one; returns the row's fields.

    Args:
        what: the section of the row for the figures of both.
        models: the configurations of both, the old one first.
        values: makes the tensors of the new one, by name. They are written in the number formats that they have.
    """
    old, new = models
    before = evaluate(session)
    model, tensors = new.make(session.data.spec), values()
    model.load_state_dict(tensors)
    change_formats(model, tensors)
    made_from = Origin(new, session.data.spec, NoAdapter(), session.settings.root.seed)
    export(session.folder / EXPORTED, model, made_from, merge=True)
    written = new.written_in(session.folder / EXPORTED)
    next_session = going_on(session, written)
    after = evaluate(next_session)
    figures = [about(session.rig, old, before, "before"), about(next_session.rig, written, after, "after")]
    return fields.merged(
        fields.common(next_session),
        {"loss": {"eval": after.loss}, "eval": after.scores, "memory": run_peaks(session)},
        {"export": {"file_bytes": file_bytes(session.folder / EXPORTED)}},
        *({what: each} for each in figures),
    )


def trained_tensors(session: Session, old: Remade) -> dict[str, Tensor]:
    """The tensors of the old model, by name, in the number formats of its file: those of a run with precision=bf16_pure
    are mostly bf16. The session's model has them in fp32, with the values of the file, so that nothing is rounded."""
    formats = dtypes_in(old.weight_files())
    tensors: dict[str, Tensor] = session.rig.model.state_dict()
    floats = {dtype for dtype in formats.values() if dtype.is_floating_point}

    def format_of(name: str, tensor: Tensor) -> torch.dtype:
        of_a_base = name.partition(".")[2]  # a model of transformers that was saved without a head
        # Files may have names that transformers changes as it reads them, such as those of ViT and of experts.
        others = next(iter(floats)) if len(floats) == 1 and tensor.is_floating_point() else tensor.dtype
        return formats.get(name, formats.get(of_a_base, others))

    return {name: tensor.to(format_of(name, tensor)) for name, tensor in tensors.items()}


def change_formats(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give each tensor of the model the number format of the one of its name; tied ones stay tied."""
    names, changed = first_names(model), dict[Tensor, Tensor]()
    for module in model.modules():
        for name, tensor in own_tensors(module):
            if tensor not in changed:
                wanted = tensors.get(names[tensor], tensor).dtype
                values = tensor.detach().to(wanted)
                changed[tensor] = nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values
            setattr(module, name, changed[tensor])


def trained_model(session: Session, mode: str, run: str | None, kind: type[M], options: str) -> M:
    """The configuration of the model that another one is made from.

    Args:
        mode: the mode's name.
        run: the value `run` of its section.
        kind: the class of the configurations that it can change.
        options: the options of `model` that have such configurations.

    Raises:
        BadInput: a run would be replaced; no trained model is given, it is of another kind, or the new one would be
            written in another format.
        Incompatible: a knob has changed the model, or may have.
    """
    model = session.problem.model
    allowed = "train: a run that makes another model writes into a folder of its own, and can't be resumed"
    require(not session.is_resumed, "mode", mode, allowed)
    if not isinstance(model, kind):
        allowed = f"{options} with mode={mode}, which doesn't know what belongs together in other models"
        raise BadInput("model", type(model).__name__, allowed)
    trained = model.trained_folder()
    if run is None:
        require(trained is not None, f"{mode}.run", run, "the folder of a finished run, or of an exported model")
    is_read = trained is not None and run is not None and is_in(trained, Path(run).expanduser())
    allowed = f"typed on the command line beside mode={mode}: from a preset, or with modes of a sweep, it isn't read"
    require(is_read or run is None, f"{mode}.run", run, allowed)
    require(
        all_ranks().size == 1, "sharding.ranks", all_ranks().size, f"1 with mode={mode}, which computes in one process"
    )
    check_plain(session, mode)
    allowed = f"safetensors with mode={mode}: the run that trains the new model on may write another format"
    written = session.settings.export.format
    require(written is ExportFormat.safetensors, "export.format", written.name, allowed)
    check_free(session.folder / EXPORTED)
    return model


def trained_of(session: Session) -> Trained:
    """The session's model, and what it reads."""
    return Trained(session.rig.model, session.data.spec, partial(few_inputs, session))


def few_inputs(session: Session) -> Any:
    """The inputs of a few samples of the first batch, on the CPU."""
    batches = session.batches(0)
    try:
        return next(batches).map(lambda tensor: tensor[:FEW].cpu()).inputs
    finally:
        batches.close()


def is_in(trained: Path, run: Path) -> bool:
    """Whether the folder of a trained model is this one, or that of this run. A relative one begins where the command
    was typed, which may be elsewhere than here."""
    names = run.parts
    return not names or any(folder.parts[-len(names) :] == names for folder in (trained, trained.parent))


def check_plain(session: Session, mode: str) -> None:
    """Raises Incompatible unless the session's model is the trained one as its file has it: knobs round weights, set
    them to zero, move them away, freeze them, or call the model otherwise."""
    chosen = {group: option for group, _, option in (name.partition("=") for name in session.knobs)}
    neutral = {group: option for group, option in neutral_options().items() if group not in ALLOWED}
    others = {group: option for group, option in neutral.items() if chosen.get(group, option) != option}
    if others:
        typed = ", ".join(f"{group}={chosen[group]}" for group in others)
        remedy = " ".join(f"{group}={option}" for group, option in others.items())
        raise Incompatible(f"{typed}: mode={mode} takes the model as its file has it, so it needs {remedy}")


def going_on(session: Session, model: Any) -> Session:
    """The session in which the new model would train on. It reads what was written."""
    settings = replace(session.settings, groups={**session.settings.groups, "model": model})
    problem = settings.groups["task"].pose(model, session.data.spec)
    rig = assemble(problem, session.knobs, session.rig.device, settings.root.seed)
    return replace(session, settings=settings, problem=problem, rig=rig)


def about(rig: Rig, model: Remade, evaluation: Evaluation, when: str) -> fields.Fields:
    """The figures of the model before, or after, it was changed."""
    return {
        f"parameters_{when}": sum(parameter.numel() for parameter in rig.model.parameters()),
        f"file_{when}_bytes": sum(path.stat().st_size for path in model.weight_files()),
        f"loss_{when}": evaluation.loss,
    }
