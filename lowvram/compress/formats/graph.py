"""torch_export: a graph of torch's operators, with the weights, for any number of samples. It is loaded by
`torch.export.load` alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lowvram.compat.torch_trees import tree_map
from lowvram.config.errors import BadInput
from lowvram.core.quiet import quiet
from lowvram.loops.export.format import Graph, Trained
from lowvram.tasks import Problem

FILE = "model.pt2"


@final
class TorchExport(Graph):
    """The graph as it was traced."""

    name = "torch_export"
    may_run_code = True  # torch.export.load falls back to unpickling

    def check(self, model: nn.Module, last: Collection[Tensor]) -> None:
        """Raises nothing: only tracing tells whether a model can be traced."""

    def write(self, trained: Trained, folder: Path) -> None:
        program = traced(Called(trained.model, trained.problem), trained.problem, self.name)
        save(program, folder / FILE)

    def load(self, folder: Path, make_plain: Callable[[], nn.Module]) -> nn.Module:
        with quiet():
            return torch.export.load(folder / FILE).module()


@final
class Called(nn.Module):
    """A model, called as its problem calls it: on the inputs of a batch; returns the logits."""

    def __init__(self, model: nn.Module, problem: Problem) -> None:
        super().__init__()
        self.model = model
        self.call = problem.call

    def forward(self, inputs: Tensor | dict[str, Tensor]) -> Any:
        return self.call(self.model, inputs)


def traced(module: nn.Module, problem: Problem, name: str, strict: bool = False) -> ExportedProgram:
    """The graph of a module that is called on the inputs of a batch. The number of samples isn't fixed, nor, where
    batches have many shapes, the length of their texts.

    Args:
        strict: whether Python's bytecode is analysed: the graph then tells which module each operator belongs to.

    Raises:
        BadInput: torch can't trace it.
        MemoryError, torch.OutOfMemoryError: there is no room for it.
    """
    inputs, _ = problem.spec.example(2)
    free = {0: Dim.DYNAMIC} if problem.spec.has_few_shapes else {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    dims = tree_map(lambda tensor: {dim: free[dim] for dim in free if dim < tensor.dim()}, inputs)
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(module, (inputs,), dynamic_shapes=(dims,), strict=strict)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any code that the model has
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        allowed = f"another format, such as resume=RUN export.format=safetensors: torch can't trace this model ({why})"
        raise BadInput("export.format", name, allowed) from None
    forget_sources(program)
    return program


def forget_sources(program: ExportedProgram) -> None:
    """Leave out of the file which lines of which files each operator came from."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)


def save(program: ExportedProgram, path: Path) -> None:
    with quiet():
        torch.export.save(program, path)
