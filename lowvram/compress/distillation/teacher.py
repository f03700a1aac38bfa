"""The teacher: a finished run, or a model of transformers. It is frozen, and no part of the model that trains."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.config.errors import BadInput, require
from lowvram.core.assemble import bare_model
from lowvram.core.generators import same_draws_afterwards
from lowvram.core.mesh import tell
from lowvram.core.values import Fill, materialise
from lowvram.data.image_rules import image_rules_of
from lowvram.data.local import looks_local
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.precision.bf16_pure import to_bf16, with_bf16_inputs
from lowvram.loops.export.folder import ABOUT, load
from lowvram.loops.export.plain import APART, Allowed, described_problem, read_json
from lowvram.models.external import ExternalConfig
from lowvram.models.layout import CONFIG
from lowvram.results.files import manifest
from lowvram.results.files.manifest import content_of
from lowvram.tasks import Auto, ModelConfig, Problem

EXPORTED = "model"  # of a run's folder
KEY = "task.teacher"


class TeacherFormat(Enum):
    """The number format of the teacher's weights, in which it computes. The names are what a user types."""

    fp32 = "4 bytes a parameter"
    bf16 = "2 bytes a parameter"


@final
@dataclass(frozen=True)
class Teacher:
    """A model that is asked, and never trained.

    Args:
        name: as the user gave it.
        problem: the teacher's own model, for the student's data.
        trained: the model with its weights, on the CPU; None: `problem` fills them in.
        digest: of the files that hold its weights.
    """

    name: str
    problem: Problem
    trained: Callable[[], nn.Module] | None
    digest: str

    @property
    def description(self) -> str:
        """Everything that defines it, as text."""
        return f"{self.problem.description} {self.digest}"

    def build(self, format: TeacherFormat, device: torch.device) -> nn.Module:
        """The model on the device."""
        model = bare_model(self.problem)
        if format is TeacherFormat.bf16:
            to_bf16(model)
            model.register_forward_pre_hook(with_bf16_inputs, with_kwargs=True)
        model.requires_grad_(False).eval()
        with same_draws_afterwards():  # the student's random numbers are those of a run without a teacher
            materialise(model, self.fill(model), device)
        return model

    def fill(self, model: nn.Module) -> Fill:
        return self.problem.values(model, 0) if self.trained is None else TrainedValues(self.trained)

    def num_classes(self) -> int:
        return width_of_logits(self.problem)


@final
class TrainedValues:
    """Fills tensors with those of a trained model, which is loaded when the first one is asked for."""

    def __init__(self, load_model: Callable[[], nn.Module]) -> None:
        self.load_model, self.loaded = load_model, dict[str, Tensor]()

    def __call__(self, name: str, tensor: Tensor) -> None:
        if not self.loaded:
            model = self.load_model()
            named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            self.loaded.update({name: tensor.detach() for name, tensor in named})
        tensor.copy_(self.loaded.pop(name))


def width_of_logits(problem: Problem) -> int:
    """How many classes the model has logits for, which may be more than the data have."""
    head = problem.structure(bare_model(problem)).head
    return problem.spec.num_classes if head is None else head.out_features


FOUND: dict[str, Teacher] = {}  # by name, student, data, and the state of the teacher's files


def find_teacher(name: str, student: ModelConfig, spec: DataSpec) -> Teacher:
    """The teacher of this name, for the student's data. Its files are read once, unless they change.

    Args:
        name: the folder of a run or of an exported model; or a folder or a name that model=hf takes.

    Raises:
        BadInput: there is no such model, or it can't read these data.
    """
    folder = exported_folder(name)
    with readable(name):
        stamps = [(path.stat().st_mtime_ns, path.stat().st_size) for path in weight_files(folder)]
    key = repr((name, student.description, spec, stamps))
    if key not in FOUND:
        FOUND[key] = teacher_in(folder, name, student, spec)
        tell_pixels(FOUND[key], student)
    return FOUND[key]


def tell_pixels(teacher: Teacher, student: ModelConfig) -> None:
    """Tell if a teacher of images was trained on other numbers for the same pixels than the student reads, as both get
    the student's."""
    spec, read = teacher.problem.spec, image_rules_of(teacher.problem.model)
    if spec.modality is Modality.IMAGES and read.scale != image_rules_of(student).scale:
        told = "reads pixels on another scale than the student's model (preprocessor_config.json), which the data have"
        tell(f"{KEY}={teacher.name}: {told}: images look different to it from those that it was trained on")


def teacher_in(folder: Path | None, name: str, student: ModelConfig, spec: DataSpec) -> Teacher:
    if folder is None:
        require(not looks_local(name), KEY, name, "the folder of a run with its model/, or of a model of transformers")
        return of_transformers(name, Path(name), spec)
    if (folder / APART).is_file():
        allowed = "a run that saved a whole model: with adapters, export.merge=true does"
        raise BadInput(KEY, name, allowed)
    run = folder.parent if folder.name == EXPORTED else "RUN"
    allowed = f"a run that saved plain weights: write its run again with resume={run} export.format=safetensors"
    require(not (folder / ABOUT).is_file(), KEY, name, allowed)
    described = read_json(folder, CONFIG)
    if "data" not in described:
        return of_transformers(name, folder, spec)
    # Code of the user's own runs only if this point names it, too.
    trust = [student.target] if isinstance(student, ExternalConfig) else []
    manifest.check(folder)
    config, own = described_problem(described, Allowed(None, trust))
    same = own.class_names is None or spec.class_names in (None, own.class_names)
    require(same, KEY, name, f"a model of the same classes, in the same order: it knows {own.class_names}")
    posed = pose(name, config, replace(spec, num_classes=own.num_classes, vocab_size=own.vocab_size), own)
    with readable(name):
        return Teacher(name, posed, lambda: load(folder, trust=trust), digest_of(folder))


def of_transformers(name: str, folder: Path, spec: DataSpec) -> Teacher:
    """A model that `model=hf` takes."""
    from lowvram.models.hf import HfConfig, Weights
    from lowvram.models.hf_source import local_files

    where = str(folder)
    try:
        config = HfConfig(name=where, weights=Weights.pretrained)
    except BadInput as error:
        raise BadInput(KEY, name, error.allowed) from None
    files = local_files(where, None)
    # What the hub's cache holds of a model lies in a folder that is named by its revision; its weights come later.
    with readable(name):
        digest = digest_of(folder) if folder.is_dir() else f"{name} {files and files.name}"
    return Teacher(name, pose(name, config, spec), None, digest)


def pose(name: str, config: Any, spec: DataSpec, own: DataSpec | None = None) -> Problem:
    """The teacher's problem. Raises BadInput, with the teacher's name, if the model doesn't read such data."""
    reads = config.modality if own is None else own.modality
    allowed = f"a model that reads {spec.modality.value}, as the student does: this one reads {reads and reads.value}"
    require(reads is None or reads is spec.modality, KEY, name, allowed)
    problem = Auto().pose(config, spec)
    try:
        bare_model(problem)
    except BadInput as error:
        raise BadInput(KEY, name, f"a model for the student's data ({error})") from None
    return problem


def exported_folder(name: str) -> Path | None:
    """Where the files of a local model are; None if there is no such folder."""
    folder = Path(name).expanduser()
    places = ((folder / EXPORTED, CONFIG), (folder, CONFIG), (folder / EXPORTED, APART))
    found = next((place for place, file in places if (place / file).is_file()), None)
    return folder if found is None and folder.is_dir() else found


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raises BadInput, with the teacher's name, if a file with its weights can't be read: a link to nowhere, a disk
    that fails."""
    try:
        yield
    except OSError as error:
        file = "its weights" if error.filename is None else Path(error.filename).name
        raise BadInput(KEY, name, f"a model whose files can be read, and {file} can't: {error.strerror}") from None


def digest_of(folder: Path | None) -> str:
    """A hash of the files with the weights of a folder."""
    return hashlib.sha256("".join(content_of(file).sha256 for file in weight_files(folder)).encode()).hexdigest()


def weight_files(folder: Path | None) -> list[Path]:
    return [] if folder is None else sorted(folder.glob("*.safetensors"))
