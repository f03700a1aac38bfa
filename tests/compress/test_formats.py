"""Each format: that what is loaded computes what was trained, on any number of samples, and how many bytes it takes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compress.formats import onnx
from lowvram.compress.formats.graph import traced
from lowvram.compress.formats.weights import FewBits, distinct, fill, pack_pairs, unpack_pairs
from lowvram.config.errors import BadInput, BadSample, Shortage
from lowvram.config.transforms import ExportFormat
from lowvram.core.assemble import assemble
from lowvram.data.spec import DataSpec, Layout, Modality, TensorLayout
from lowvram.knobs.adapter import NoAdapter
from lowvram.loops.export import load
from lowvram.loops.export.folder import (
    ABOUT,
    check_format,
    check_free,
    export,
    export_as,
    file_bytes,
    format_of,
    refusing,
)
from lowvram.loops.export.format import Format, Trained
from lowvram.loops.export.plain import Origin
from lowvram.models.external import ExternalConfig
from lowvram.results.files import manifest
from lowvram.tasks import Auto, External, Problem
from tests.laboratory import CPU, IMAGES, RESNET, TOKENS, TRANSFORMER, knobs_of, make_batch

TINY: dict[str, Problem] = {
    "transformer": Auto().pose(replace(TRANSFORMER, width=32, num_layers=1), TOKENS),
    "resnet": Auto().pose(replace(RESNET, layers=[1]), IMAGES),
}
# Largest error, relative to the largest output.
ERRORS = {"torch_export": 1e-6, "onnx": 1e-5, "int8": 0.02, "int8_dynamic": 0.05, "int4": 0.2, "pt2e": 0.2}
FEW_BITS = ["int8", "int8_dynamic", "int4"]
GRAPHS = ["torch_export", "onnx", "pt2e"]
PROGRAM = """
import sys, numpy
{imports}
inputs = numpy.load(sys.argv[1])
numpy.save(sys.argv[3], {call})
assert not {{"lowvram", *{without!r}}} & set(sys.modules)
"""
ALONE = {
    "torch_export": ("import torch", "torch.export.load(sys.argv[2]).module()(torch.from_numpy(inputs)).numpy()", []),
    "pt2e": (
        "import torch, torchao.quantization.pt2e.quantize_pt2e",
        "torch.export.load(sys.argv[2]).module()(torch.from_numpy(inputs)).numpy()",
        [],
    ),
    "onnx": (
        "import onnxruntime",
        "onnxruntime.InferenceSession(sys.argv[2]).run(None, {'inputs': inputs})[0]",
        ["torch"],
    ),
}
needs_onnx = pytest.mark.skipif(find_spec("onnxruntime") is None, reason="onnxruntime is not installed")


def named(name: str) -> Format:
    chosen = format_of(ExportFormat[name])
    assert chosen is not None
    return chosen


def exported(folder: Path, name: str, model: str) -> Trained:
    """In the folder `model` there."""
    problem = TINY[model]
    made = assemble(problem, knobs_of(), CPU).model
    with torch.no_grad():
        for parameter in made.parameters():  # else the tiny models' outputs hardly differ from sample to sample
            parameter.mul_(1.5)
    origin = Origin(problem.model, problem.spec, NoAdapter(), 0)
    return export_as(named(name), folder / "model", made, origin, problem, [make_batch(problem.spec, 32).inputs])


def error_of(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
def check_outputs(folder: Path, name: str, model: str) -> None:
    trained = exported(folder, name, model)
    loaded = load(folder / "model", trust={name})
    for num_samples in (1, 7):
        inputs = make_batch(trained.problem.spec, num_samples, seed=num_samples).inputs
        found = named(name).outputs(trained.problem, loaded, inputs)
        assert error_of(found, trained.outputs(inputs)) <= ERRORS[name]


@pytest.mark.parametrize("name", FEW_BITS)
def test_weights_of_few_bits_compute_nearly_the_same(tmp_path: Path, name: str) -> None:
    check_outputs(tmp_path, name, "transformer")


@pytest.mark.parametrize(("name", "model"), [("torch_export", "resnet"), ("pt2e", "resnet")])
def test_a_graph_computes_the_same(tmp_path: Path, name: str, model: str) -> None:
    check_outputs(tmp_path, name, model)


@needs_onnx
def test_onnx_is_refused_before_the_first_step_of_a_model_that_returns_several_tensors() -> None:
    targets = (("kind", TensorLayout((), "int64")), ("sizes", TensorLayout((2,), "float32")))
    spec = DataSpec(Modality.OTHER, 0, (4,), layout=Layout((("", TensorLayout((4,), "float32")),), targets))
    problem = External("tests.yours.TwoLosses").pose(ExternalConfig("tests.yours.TwoHeads"), spec)
    with pytest.raises(
        BadInput, match=r"^export\.format='onnx': must be torch_export or .* this model returns several"
    ):
        check_format(ExportFormat.onnx, 32, problem)
    check_format(ExportFormat.torch_export, 32, problem)
    check_format(ExportFormat.onnx, 32, TINY["resnet"])


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_of_every_model_computes_the_same(tmp_path: Path, name: str, model: str) -> None:
    check_outputs(tmp_path, name, model)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
@torch.no_grad()
def test_a_graph_runs_in_a_process_without_lowvram(tmp_path: Path, name: str) -> None:
    import numpy as np

    trained = exported(tmp_path, name, "resnet")
    inputs = make_batch(trained.problem.spec, 3).inputs
    np.save(tmp_path / "inputs.npy", inputs.numpy())
    (path,) = [path for path in (tmp_path / "model").iterdir() if path.suffix in (".pt2", ".onnx")]
    imports, call, without = ALONE[name]
    program = PROGRAM.format(imports=imports, call=call, without=without)
    files = (tmp_path / "inputs.npy", path, tmp_path / "outputs.npy")
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, *files], cwd=tmp_path, check=True)
    assert error_of(torch.from_numpy(np.load(files[2])), trained.outputs(inputs)) <= ERRORS[name]


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sprung,)


@pytest.mark.parametrize("name", ["torch_export", "pt2e"])
def test_a_graph_runs_no_code_unless_its_format_is_named(tmp_path: Path, name: str) -> None:
    sound, crafted, pickled = tmp_path / "sound.pt2", tmp_path / "model.pt2", io.BytesIO()
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(2, 2),)), sound)
    torch.save(Trap(tmp_path / "sprung"), pickled)
    with zipfile.ZipFile(sound) as before, zipfile.ZipFile(crafted, "w") as after:
        for item in before.namelist():
            after.writestr(item, pickled.getvalue() if "sample_inputs" in item else before.read(item))
    (tmp_path / ABOUT).write_text(json.dumps({"format": name}))
    others = set(GRAPHS) - {name}
    with (
        pytest.warns(UserWarning, match="files.json is missing"),
        pytest.raises(BadInput, match=rf"^format='{name}': .* may run code .*: load\(folder, trust=\{{'{name}'\}}\)"),
    ):
        load(tmp_path, trust=others)
    assert not (tmp_path / "sprung").exists()


def test_a_graph_does_not_say_which_files_it_came_from(tmp_path: Path) -> None:
    exported(tmp_path, "torch_export", "transformer")
    assert str(Path(__file__).parents[2]).encode() not in (tmp_path / "model" / "model.pt2").read_bytes()


def test_four_bits_take_half_a_byte() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    pairs = pack_pairs(codes)
    assert pairs.nbytes * 2 == codes.nbytes
    assert torch.equal(unpack_pairs(pairs), codes)


def test_files_get_smaller(tmp_path: Path) -> None:
    sizes = []
    for name in ("int8", "int4"):
        trained = exported(tmp_path / name, name, "transformer") if not (tmp_path / name).mkdir() else None
        sizes.append(file_bytes(tmp_path / name / "model"))
    assert trained is not None
    plain = sum(tensor.nbytes for tensor in distinct(trained.model).values())
    assert sizes[1] < sizes[0] < plain / 2


@torch.no_grad()
def test_tied_weights_stay_tied_and_are_written_once(tmp_path: Path) -> None:
    trained = exported(tmp_path, "int8", "transformer")
    model = load(tmp_path / "model")
    assert model.head.weight is model.token_embedding.weight
    assert torch.equal(model.head.weight, trained.model.get_parameter("head.weight"))
    assert "head.weight" not in distinct(trained.model)


def test_values_of_another_model_are_refused() -> None:
    small, large = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for model, other in ((small, large), (large, small)):
        with pytest.raises(BadInput, match=r"^folder='1\.weight': must be a tensor of both"):
            fill(model, distinct(other))


@pytest.mark.parametrize("name", FEW_BITS)
def test_a_model_without_such_layers_is_refused_in_one_sentence(name: str) -> None:
    problem = TINY["resnet"]
    model = problem.make_model()
    with pytest.raises(
        BadInput, match=rf"^export\.format='{name}': must be safetensors, torch_export, onnx or pt2e: the model has no"
    ):
        named(name).check(model, problem.structure(model).last_weights)


def test_a_check_draws_no_random_number_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    before, checked = torch.get_rng_state(), list[nn.Module]()
    monkeypatch.setattr(FewBits, "check", lambda self, model, head: checked.append(model))
    check_format(ExportFormat.int8, 32, TINY["transformer"])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.is_meta for parameter in checked[0].parameters())


@pytest.mark.parametrize(
    "name", ["model.onnx.data", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_a_file_of_the_user_in_the_way_is_found_before_the_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    check_free(tmp_path / "model")
    (tmp_path / "model" / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"{name} is in the way"):
        check_free(tmp_path / "model")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(
        BadInput, match=r"^export\.format='onnx': .* onnxscript installed: pip install 'lowvram\[onnx\]'"
    ):
        named("onnx").check(nn.Linear(1, 1), ())


def test_a_model_that_can_not_be_traced_is_refused_in_one_sentence() -> None:
    class Choosy(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens if tokens.sum() > 0 else -tokens

    with pytest.raises(
        BadInput, match=r"^export\.format='torch_export': .*torch can't trace this model \(\w+: [^\n]*$"
    ):
        traced(Choosy(), TINY["transformer"], "torch_export")


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_running_out_of_memory_is_not_said_to_be_the_model(error: type[Exception]) -> None:
    class Large(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            raise error

    with pytest.raises(error):
        traced(Large(), TINY["transformer"], "torch_export")


def test_another_format_replaces_what_was_there(tmp_path: Path) -> None:
    trained = exported(tmp_path, "int8", "transformer")
    origin = Origin(trained.problem.model, trained.problem.spec, NoAdapter(), 0)
    export(tmp_path / "model", trained.model, origin, merge=False)
    assert not (tmp_path / "model" / ABOUT).exists()
    assert torch.equal(load(tmp_path / "model").head.weight, trained.model.get_parameter("head.weight"))


def test_a_format_of_later_versions_is_refused(tmp_path: Path) -> None:
    exported(tmp_path, "int8", "transformer")
    (tmp_path / "model" / ABOUT).write_text(json.dumps({"format": "int1"}))
    (tmp_path / "model" / manifest.NAME).unlink()
    with (
        pytest.warns(UserWarning, match="files.json is missing"),
        pytest.raises(BadInput, match=r"^format='int1': must be one that this version knows \(safetensors, "),
    ):
        load(tmp_path / "model")


def test_a_library_that_fails_on_a_model_is_a_refusal_that_names_the_way_out(tmp_path: Path) -> None:
    """And a disk, a memory or a sample that fails isn't the model's fault."""
    others = (
        OSError(28, "full"),
        MemoryError(),
        RuntimeError("can't start new thread"),
        BadSample("one"),
        Shortage("a"),
    )
    for error in (ValueError("no such operator\n…"), *others):
        is_refused = error not in others
        with pytest.raises(BadInput if is_refused else type(error)) as failed, refusing("int8"):
            raise error
        if is_refused:
            assert "resume=RUN export.format=safetensors" in str(failed.value)
            assert "(ValueError: no such operator)" in str(failed.value)
