"""mode=prune as a loop: what it keeps, writes and tells; and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lowvram.compress.importance import Wanda
from lowvram.compress.prune import Prune
from lowvram.config.errors import BadInput, Incompatible
from lowvram.config.registry import neutral_options, ready_options
from lowvram.config.transforms import ExportFormat, ImportanceKind, PruneSettings
from lowvram.core.assemble import assemble
from lowvram.knobs.adapter import NoAdapter
from lowvram.knobs.precision.bf16_pure import to_bf16
from lowvram.loops.export.folder import export, load
from lowvram.loops.export.plain import Origin
from lowvram.loops.session import Session
from lowvram.models.builtin import OwnModel
from lowvram.models.external import ExternalConfig
from lowvram.models.layout import dtypes_in
from lowvram.tasks import Auto, Problem
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch
from tests.loops.sessions import PRUNE, session_in

MODELS = ("transformer", "resnet")


def of_problem(session: Session, problem: Problem) -> Session:
    groups = {**session.settings.groups, "model": problem.model}
    rig = assemble(problem, session.knobs, CPU)
    return replace(session, problem=problem, rig=rig, settings=replace(session.settings, groups=groups))


def trained(folder: Path, name: str, *, in_16_bits: bool = False, **options: Any) -> Session:
    """A session that starts with the weights of an exported model, whose values are all random.

    Args:
        in_16_bits: the exported model is one of precision=bf16_pure.
    """
    session = session_in(folder, name, **options)
    config = session.problem.model
    assert isinstance(config, OwnModel)
    with torch.no_grad():
        for tensor in session.rig.model.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    if in_16_bits:
        to_bf16(session.rig.model)
    export(folder / "before", session.rig.model, Origin(config, session.data.spec, NoAdapter(), 0), merge=True)
    return of_problem(session, Auto().pose(replace(config, init=str(folder / "before")), session.data.spec))


def settings(**changes: Any) -> PruneSettings:
    return replace(PRUNE, **changes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ImportanceKind)
def test_a_smaller_model_is_written(tmp_path: Path, name: str, kind: ImportanceKind) -> None:
    session = trained(tmp_path, name, prune=settings(importance=kind))
    before = {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()}
    fields = Prune().run(session)
    figures, model = fields["pruning"], load(tmp_path / "model")
    assert figures["parameters_before"] == sum(each.numel() for each in session.rig.model.parameters())
    assert figures["parameters_after"] == sum(each.numel() for each in model.parameters())
    assert figures["parameters_after"] == fields["model"]["parameters"] < figures["parameters_before"]
    for when, folder in (("before", "before"), ("after", "model")):
        size = (tmp_path / folder / "model.safetensors").stat().st_size
        assert figures[f"file_{when}_bytes"] == size
    assert figures["file_after_bytes"] < figures["file_before_bytes"]
    assert figures["loss_after"] == fields["loss"]["eval"] != figures["loss_before"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "before").iterdir()} == before
    assert not list(tmp_path.glob(".*"))  # what is written beside is gone


def test_nothing_leaves_at_a_ratio_of_0(tmp_path: Path) -> None:
    session = trained(tmp_path, "transformer", prune=settings(ratio=0.0))
    figures = Prune().run(session)["pruning"]
    assert figures["loss_after"] == figures["loss_before"]
    assert figures["parameters_after"] == figures["parameters_before"]
    whole, kept = (load(tmp_path / folder).state_dict() for folder in ("before", "model"))
    assert all(torch.equal(whole[name], kept[name]) for name in whole)


def test_the_seed_and_the_run_alone_decide_what_leaves(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        Prune().run(trained(tmp_path / folder, "transformer", prune=settings(importance=ImportanceKind.taylor)))
    one, two = (load(tmp_path / folder / "model").state_dict() for folder in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^prune\.run=null: must be the folder of a finished run"):
        Prune().run(session_in(tmp_path, "transformer"))
    with pytest.raises(BadInput, match=r"^model\.norm='group': must be batch or frozen"):
        Prune().run(trained(tmp_path, "resnet_group"))
    with pytest.raises(BadInput, match=r"^prune\.ratio=0\.1: must be larger, or prune\.round_to=64 smaller"):
        Prune().run(trained(tmp_path, "transformer", prune=settings(ratio=0.1, round_to=64)))
    foreign = Auto().pose(ExternalConfig("torch.nn.Identity"), PROBLEMS["resnet"].spec)
    with pytest.raises(BadInput, match=r"^model='ExternalConfig': must be transformer, resnet or hf with mode=prune"):
        Prune().run(replace(session_in(tmp_path, "resnet"), problem=foreign))
    with pytest.raises(BadInput, match=r"^export\.format='onnx': must be safetensors with mode=prune"):
        Prune().run(trained(tmp_path, "transformer", export=ExportFormat.onnx))
    unread = session_in(tmp_path, "transformer", prune=settings(run="outputs/run"))
    with pytest.raises(BadInput, match=r"^prune\.run='outputs/run': must be typed on the command line beside mode="):
        Prune().run(unread)
    assert not (tmp_path / "model").exists()


def test_knobs_that_change_the_model_are_refused(tmp_path: Path) -> None:
    plain = trained(tmp_path, "transformer")
    for group in neutral_options().keys() - {"accum", "allocator"}:
        for option in set(ready_options(group)) - {neutral_options()[group]}:
            named = replace(plain, knobs=knobs_of(**{group: option}))
            with pytest.raises(Incompatible, match=rf"\b{group}={option}\b.*: mode=prune takes the model as its file"):
                Prune().run(named)
    several = replace(plain, knobs=knobs_of(sparsity="set", precision="bf16_pure", accum="x2"))
    with pytest.raises(Incompatible, match=r"so it needs precision=fp32 sparsity=none$"):
        Prune().run(several)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("kind", ImportanceKind)
def test_a_batch_in_parts_is_pruned_alike(tmp_path: Path, kind: ImportanceKind) -> None:
    for folder, option in (("one", "none"), ("two", "x2")):
        (tmp_path / folder).mkdir()
        choices: dict[str, Any] = {"accum": option}
        Prune().run(trained(tmp_path / folder, "transformer", prune=settings(importance=kind), choices=choices))
    one, two = (load(tmp_path / folder / "model").state_dict() for folder in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_is_written_are_values_of_the_file(tmp_path: Path) -> None:
    Prune().run(trained(tmp_path, "transformer"))
    before, after = (load(tmp_path / folder).state_dict() for folder in ("before", "model"))
    assert all(set(after[name].flatten().tolist()) <= set(before[name].flatten().tolist()) for name in after)


@pytest.mark.parametrize("name", MODELS)
def test_the_file_has_the_number_formats_of_the_old_one(tmp_path: Path, name: str) -> None:
    """Of a run with precision=bf16_pure: bf16, but for running statistics. Nothing is rounded."""
    session = trained(tmp_path, name, in_16_bits=True)
    figures = Prune().run(session)["pruning"]
    before, after = (dtypes_in([tmp_path / folder / "model.safetensors"]) for folder in ("before", "model"))
    assert after == before
    assert torch.bfloat16 in before.values()
    assert (torch.float32 in before.values()) is (name == "resnet")
    assert figures["file_after_bytes"] < figures["file_before_bytes"]
    whole, kept = (load(tmp_path / folder).state_dict() for folder in ("before", "model"))
    assert all(set(kept[name].flatten().tolist()) <= set(whole[name].flatten().tolist()) for name in kept)
    tied = "token_embedding.weight"
    assert name == "resnet" or not {tied, "head.weight"} <= set(tensors_in(tmp_path / "model" / "model.safetensors"))


def tensors_in(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def test_wanda_needs_activations(tmp_path: Path) -> None:
    session = trained(tmp_path, "transformer")
    config = session.problem.model
    assert isinstance(config, OwnModel)
    rig = replace(session.rig, forward=lambda part: None)  # as a compiled model, which calls no hooks
    with pytest.raises(RuntimeError, match=r"^wanda has seen no activations of blocks\.0\."):
        Wanda().scores(rig, config.inner_widths(), [make_batch(session.data.spec, 2)])


@pytest.mark.parametrize("ratio", [1.0, -0.1, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(BadInput, match=r"^prune\.ratio=.*: must be at least 0 and less than 1"):
        settings(ratio=ratio)
    with pytest.raises(BadInput, match=r"^prune\.batches=0"):
        settings(batches=0)
    with pytest.raises(BadInput, match=r"^prune\.round_to=0"):
        settings(round_to=0)
