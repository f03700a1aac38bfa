"""Which teachers there are, and which are refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lowvram.compress.distillation.task import Distill
from lowvram.compress.distillation.teacher import TeacherFormat, find_teacher
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality, pairs_layout
from lowvram.knobs.adapter import NoAdapter
from lowvram.loops.export.folder import export
from lowvram.loops.export.plain import Origin
from lowvram.models.hf import HfConfig, Weights
from lowvram.tasks import Auto, Problem
from tests.hugging import tiny, with_weights
from tests.laboratory import CPU, IMAGES, PROBLEMS, RESNET, TOKENS, TRANSFORMER, knobs_of, make_batch

WORDS = DataSpec(Modality.TOKENS, 300, (8,))


def exported(problem: Problem, folder: Path) -> str:
    """A run's folder with the weights of this problem, as they start with seed 1."""
    model = assemble(problem, knobs_of(), CPU, 1).model
    export(folder / "model", model, Origin(problem.model, problem.spec, NoAdapter(), 1), merge=False)
    return str(folder)


@pytest.mark.parametrize("model", ["transformer", "resnet"])
def test_a_run_teaches_with_its_weights(model: str, tmp_path: Path) -> None:
    problem = PROBLEMS[model]
    name = exported(problem, tmp_path)
    for where in (name, f"{name}/model"):
        teacher = find_teacher(where, problem.model, problem.spec).build(TeacherFormat.fp32, CPU)
        wanted = assemble(problem, knobs_of(), CPU, 1).model.state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in teacher.state_dict().items())
        assert not teacher.training


def test_other_weights_are_another_teacher(tmp_path: Path) -> None:
    problem = PROBLEMS["transformer"]
    found = find_teacher(exported(problem, tmp_path), problem.model, problem.spec)
    model = assemble(problem, knobs_of(), CPU, 2).model
    export(tmp_path / "model", model, Origin(problem.model, problem.spec, NoAdapter(), 1), merge=False)
    assert find_teacher(str(tmp_path), problem.model, problem.spec).digest != found.digest


def test_weights_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """A link to nowhere, a link to itself, a folder, and a pipe, on which a reader would wait."""
    problem, name = PROBLEMS["transformer"], exported(PROBLEMS["transformer"], tmp_path)
    weights = tmp_path / "model" / "model.safetensors"
    links = (lambda: weights.symlink_to("gone"), lambda: weights.symlink_to(weights))
    for put in (*links, weights.mkdir, lambda: os.mkfifo(weights)):
        weights.rmdir() if weights.is_dir() else weights.unlink()
        put()
        with pytest.raises(BadInput, match=r"model\.safetensors"):
            find_teacher(name, problem.model, problem.spec)


def test_random_numbers_are_those_of_a_run_without_a_teacher() -> None:
    teacher = find_teacher(with_weights("gpt2"), HfConfig(name=tiny("gpt2")), WORDS)
    before = torch.get_rng_state()
    teacher.build(TeacherFormat.fp32, CPU)
    assert torch.equal(torch.get_rng_state(), before)


PAIRS = DataSpec(Modality.PAIRS, 300, (8,), layout=pairs_layout(8, 6))
MASKED = DataSpec(Modality.MASKED_TOKENS, 300, (8,))
VIT = DataSpec(Modality.IMAGES, 5, (3, 16, 16))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "spec", "logits"),
    [
        ("t5:pairs", PAIRS, "chunked"),
        ("vit", VIT, "full"),
        pytest.param("gpt2", WORDS, "chunked", marks=pytest.mark.slow),
        pytest.param("gpt2", WORDS, "full", marks=pytest.mark.slow),
        pytest.param("bert:masked", MASKED, "chunked", marks=pytest.mark.slow),
        pytest.param("bert:masked", MASKED, "full", marks=pytest.mark.slow),
        pytest.param("t5:pairs", PAIRS, "full", marks=pytest.mark.slow),
        pytest.param("vit", VIT, "chunked", marks=pytest.mark.slow),
    ],
)
def test_models_of_transformers_teach_and_learn(kind: str, spec: DataSpec, logits: str) -> None:
    student = HfConfig(name=tiny(kind), weights=Weights.random)
    problem = Distill(teacher=with_weights(kind), alpha=1.0, temperature=1.0).pose(student, spec)
    rig = assemble(problem, knobs_of(logits=logits), CPU, seed=7)  # other weights than the teacher begins with
    rig.stepper.set_lr(1e-2)
    batch = make_batch(spec, 6)
    losses = [step(rig, batch)[0].item() for _ in range(8)]
    assert losses[-1] < losses[0]


def test_a_model_of_transformers_teaches_one_of_ours() -> None:
    problem = Distill(teacher=with_weights("gpt2")).pose(TRANSFORMER, WORDS)
    loss, _ = step(assemble(problem, knobs_of(), CPU), make_batch(WORDS, 4))
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("teacher", "student", "spec", "what"),
    [
        ("transformer", TRANSFORMER, replace(TOKENS, num_classes=12), r"the same vocabulary.*, 12: it has 11"),
        ("transformer", RESNET, IMAGES, "a model that reads images, as the student does: this one reads tokens"),
        ("transformer", replace(TRANSFORMER, context=9), replace(TOKENS, shape=(9,)), "data.sequence_length=9"),
        ("resnet", RESNET, replace(IMAGES, num_classes=6), r"as many classes.*, 6: it has 5"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(
    teacher: str, student: object, spec: DataSpec, what: str, tmp_path: Path
) -> None:
    name = exported(PROBLEMS[teacher], tmp_path)
    with pytest.raises(BadInput, match=rf"task\.teacher=.*{what}"):
        Distill(teacher=name).pose(student, spec)  # pyright: ignore[reportArgumentType]


def test_classes_in_another_order_are_refused(tmp_path: Path) -> None:
    spec = replace(IMAGES, class_names=tuple("abcde"))
    name = exported(Auto().pose(RESNET, spec), tmp_path)
    with pytest.raises(BadInput, match="the same classes, in the same order"):
        Distill(teacher=name).pose(RESNET, replace(spec, class_names=tuple("edcba")))


def test_a_teacher_that_reads_pixels_on_another_scale_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = shutil.copytree(with_weights("vit"), tmp_path / "vit")
    (where / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor", "size": 16}')
    teacher, spec = HfConfig(str(where)), DataSpec(Modality.IMAGES, 5, (3, 16, 16))
    for student, is_told in ((HfConfig(tiny("vit")), True), (teacher, False)):
        find_teacher(str(where), student, spec)
        assert ("reads pixels on another scale" in capsys.readouterr().out) == is_told


def without_model(folder: Path) -> None:
    folder.mkdir()


def with_adapter(folder: Path) -> None:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "lowvram.json").write_text("{}")


def with_few_bits(folder: Path) -> None:
    folder.mkdir()
    exported(PROBLEMS["transformer"], folder)
    (folder / "model" / "export.json").write_text('{"format": "int8"}')


def with_other_bytes(folder: Path) -> None:
    folder.mkdir()
    exported(PROBLEMS["transformer"], folder)
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda folder: None, "the folder of a run with its model/, or of a model of transformers"),
        (without_model, "config.json"),
        (with_adapter, "export.merge=true"),
        (with_few_bits, r"^task\.teacher=.*resume=\S+/run export\.format=safetensors$"),
        (with_other_bytes, "model.safetensors is damaged"),
    ],
    ids=["nothing", "no model", "an adapter", "another format", "damaged"],
)
def test_a_folder_without_a_whole_model_is_refused(make: Callable[[Path], None], what: str, tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(BadInput, match=what):
        Distill(teacher=str(tmp_path / "run")).pose(TRANSFORMER, TOKENS)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"alpha": -0.1}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
        ({"temperature": 0.0}, "temperature"),
        ({"top": 0}, "top"),
        ({"teacher": None}, "teacher"),
    ],
)
def test_a_value_out_of_range_is_refused(values: dict[str, float], key: str) -> None:
    with pytest.raises(BadInput, match=rf"task\.{key}="):
        Distill(**{"teacher": "somewhere", **values})  # pyright: ignore[reportArgumentType]
