"""onnx: a graph of ONNX's operators, with the weights, for any number of samples. onnxruntime runs it without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from lowvram.compress.formats.graph import Called, traced
from lowvram.config.errors import require
from lowvram.core.quiet import quiet
from lowvram.loops.export.format import Graph, Trained

FILE = "model.onnx"
INPUTS, OUTPUT = "inputs", "logits"  # names in the graph; of several inputs, each has its own name
MOST_INSIDE_BYTES = 2**30  # of weights in the file itself; with more they lie beside it, as such a file ends at 2 GiB
ONE_TENSOR = (
    "torch_export or safetensors, such as resume=RUN export.format=torch_export: here a graph of ONNX returns one"
    " tensor, and this model returns several, or one in a dictionary or a tuple"
)
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@final
class Onnx(Graph):
    """torch's exporter writes it, from the graph that torch.export has traced."""

    name = "onnx"

    def check(self, model: nn.Module, last: Collection[Tensor]) -> None:
        check_installed()

    def check_outputs(self, outputs: Any) -> None:
        require(isinstance(outputs, Tensor), "export.format", self.name, ONE_TENSOR)

    def write(self, trained: Trained, folder: Path) -> None:
        check_installed()
        program = traced(Called(trained.model, trained.problem), trained.problem, self.name)
        is_one = program.call_spec.out_spec is not None and program.call_spec.out_spec.is_leaf()
        require(is_one, "export.format", self.name, ONE_TENSOR)
        inputs, _ = trained.problem.spec.example(1)
        names = list(inputs) if isinstance(inputs, Mapping) else [INPUTS]
        num_bytes = sum(tensor.nbytes for tensor in trained.model.state_dict().values())
        with quiet(), torch.no_grad():
            onnx: Any = torch.onnx.export(program, dynamo=True, input_names=names, output_names=[OUTPUT], verbose=False)
            onnx.save(folder / FILE, external_data=num_bytes > MOST_INSIDE_BYTES)

    def load(self, folder: Path, make_plain: Callable[[], nn.Module]) -> nn.Module:
        check_installed()
        return OnnxModel(folder / FILE)


@final
class OnnxModel(nn.Module):
    """A graph in onnxruntime, on the CPU, with as many threads as torch uses."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        runtime: Any = import_module("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def forward(self, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        named = inputs if isinstance(inputs, Mapping) else {INPUTS: inputs}
        (logits,) = self.session.run([OUTPUT], {name: tensor.numpy() for name, tensor in named.items()})
        return torch.from_numpy(logits)


def check_installed() -> None:
    """Raises BadInput if a package is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    needed = f"another format, or {', '.join(missing)} installed: pip install 'lowvram[onnx]'"
    require(not missing, "export.format", "onnx", needed)
