"""`model/` in a run's folder: the trained model in one of the formats, and `load`, which reads them all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_map_only
from lowvram.config.errors import BadInput, BadSample, Incompatible, Shortage, require
from lowvram.config.texts import first_line
from lowvram.config.transforms import ExportFormat
from lowvram.core.assemble import bare_model
from lowvram.core.troubles import disk_trouble, is_out_of_memory, thread_trouble
from lowvram.loops.export import plain
from lowvram.loops.export.format import Format, Trained
from lowvram.loops.export.plain import APART, Allowed, Origin, read_json
from lowvram.models.layout import CONFIG, EXTRA, WEIGHTS, write_json
from lowvram.results.files import manifest
from lowvram.results.files.durable import unfinished_folder
from lowvram.results.files.other_format import ABOUT
from lowvram.results.files.plausible import check_files
from lowvram.tasks import Problem

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
USUAL = (
    *(CONFIG, WEIGHTS, EXTRA, APART, ABOUT, "adapter_config.json", "adapter_model.safetensors"),
    *("model.pt2", "model.onnx", "model.onnx.data", "model.safetensors.index.json"),
)
FORMATS = "lowvram.compress.formats"  # where the other formats are, by their names; imported when one is asked for
SHARDS = "model-?????-of-?????.safetensors"  # how many there will be isn't known before the weights are written


def format_of(name: ExportFormat, group: int | None = None) -> Format | None:
    """A format; None for safetensors, of which `plain` takes care.

    Args:
        group: weights of a row that share a scale in 4 bits; None: as many as usual.
    """
    if name is ExportFormat.safetensors:
        return None
    return import_module(FORMATS).FORMATS[name](group)


def check_format(name: ExportFormat, group: int | None, problem: Problem) -> None:
    """Raises BadInput if the problem's model can't be written in the format that `format_of` returns. Its weights get
    neither memory nor values, which would be drawn at random."""
    chosen = format_of(name, group)
    if chosen is not None:
        model = bare_model(problem)
        chosen.check(model, problem.structure(model).last_weights)
        outputs = fake_outputs(problem, model)
        if outputs is not None:
            chosen.check_outputs(outputs)


def fake_outputs(problem: Problem, model: nn.Module) -> Any:
    """What a model without memory returns for two samples; None if it can't be called so."""
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), problem.spec.example(2)[0])
    try:
        with torch.no_grad(), torch.device("meta"):
            return problem.call(model.eval(), inputs)
    except Exception:  # of the model's own code, which may need values
        return None


def export(folder: Path, model: nn.Module, origin: Origin, merge: bool) -> None:
    """Write the whole model, or only the adapter's weights, and replace what an earlier call wrote there.

    Args:
        merge: write the whole model even if the adapter could be saved alone.

    Raises:
        FileExistsError: the folder holds a file that lowvram didn't write; nothing was changed.
    """
    with unfinished_folder(folder) as fresh:
        plain.write(fresh, model, origin, merge)
        manifest.put(fresh, folder)


def export_as(
    chosen: Format, folder: Path, model: nn.Module, origin: Origin, problem: Problem, batches: list[Any]
) -> Trained:
    """Write the whole model in a format other than safetensors, and replace what an earlier call wrote there. An
    adapter is merged into it. Returns the plain model in fp32 from which the file was made.

    Args:
        batches: inputs of a few batches, on the CPU: examples for graphs, and to choose the scales of activations.

    Raises:
        BadInput: the model can't be written in this format.
        FileExistsError: the folder holds a file that lowvram didn't write; nothing was changed.
    """
    with unfinished_folder(folder) as fresh:
        plain.write(fresh, model, origin, merge=True)
        trained = Trained(plain.again(fresh, origin).float().eval().requires_grad_(False), problem, batches)
        for path in [path for pattern in WEIGHT_FILES for path in fresh.glob(pattern)]:
            path.unlink()
        with refusing(chosen.name):
            chosen.write(trained, fresh)
        write_json(fresh / ABOUT, {"format": chosen.name})
        manifest.put(fresh, folder)
    return trained


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Inside it a library that can't write, load or call a model in this format is a BadInput that says how to get the
    weights. What isn't the format's fault passes: a sample that can't be read, and a machine that lacks something."""
    try:
        yield
    except (BadInput, BadSample, Shortage):
        raise
    except Exception as error:  # of any library, and of the model's own code
        if disk_trouble(error) or is_out_of_memory(error) or thread_trouble(error):
            raise
        allowed = "another format, such as resume=RUN export.format=safetensors: this model can't be written so"
        raise BadInput("export.format", name, f"{allowed} ({type(error).__name__}: {first_line(error)})") from error


def check_free(folder: Path) -> None:
    """Raise FileExistsError if the folder has a file that lowvram didn't write and that an export may replace."""
    manifest.ours_in(folder, [*USUAL, *(path.name for path in folder.glob(SHARDS))])


def load(folder: str | Path, *, model: Callable[..., Any] | None = None, trust: Collection[str] = ()) -> Any:
    """Load the model from a run's `model` folder, with its trained weights, on the CPU. Runs only code of lowvram,
    torch and transformers, and code that the caller names. A graph of torch may hold pickles, which run code when they
    are read: it is refused unless the caller names its format.

    Weights (safetensors, int8, int8_dynamic, int4) return the plain model; an adapter is merged into it. Graphs
    (torch_export, onnx, pt2e) return a module that takes the inputs of a batch and returns the logits.

    Args:
        model: for model=external, the class or function that makes the model.
        trust: instead of `model`, dotted names of such classes or functions that may be imported if the folder names
            them. Of a graph its format, `torch_export` or `pt2e`, if you trust who made it: it may run code.

    Raises:
        BadInput: the folder can't be read, is damaged, names code that the caller didn't, or has a graph whose format
            the caller didn't name.
    """
    allowed = Allowed(model, frozenset([trust] if isinstance(trust, str) else trust))
    try:
        return loaded(Path(folder), allowed)
    except (BadInput, Incompatible, ImportError, MemoryError):
        raise
    except Exception as error:  # somebody may have written anything there
        what = f"an exported model that can be read: {type(error).__name__}: {first_line(error)}"
        raise BadInput("folder", str(folder), what) from error


def loaded(folder: Path, allowed: Allowed) -> Any:
    """As `load`; raises anything for a folder that wasn't written by lowvram."""
    check_files(folder, "folder")
    manifest.check(folder)
    if not (folder / ABOUT).is_file():
        return plain.load(folder, allowed)
    chosen = format_in(folder)
    way = f"load(folder, trust={{{chosen.name!r}}}), if you trust who made it"
    is_allowed = not chosen.may_run_code or chosen.name in allowed.names
    require(is_allowed, "format", chosen.name, f"named by you, as this graph may run code when it is loaded: {way}")
    return chosen.load(folder, lambda: plain.skeleton(folder, allowed))


def format_in(folder: Path) -> Format:
    """The format of an export that isn't safetensors. Raises BadInput for one that this version doesn't know."""
    name = str(read_json(folder, ABOUT).get("format"))
    known = [each.name for each in ExportFormat]
    chosen = format_of(ExportFormat[name]) if name in known else None
    if chosen is None:
        raise BadInput("format", name, f"one that this version knows ({', '.join(known)}): {folder} has another one")
    return chosen


def file_bytes(folder: Path) -> int:
    """The bytes of an export's weights, without what describes them, such as a tokenizer."""
    kinds = (".safetensors", ".pt2", ".onnx", ".data")
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in kinds)
