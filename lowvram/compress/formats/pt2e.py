"""pt2e: a graph whose linear layers and convolutions multiply in 8 bits, on a CPU ("PyTorch 2 export quantization").

A few batches show the range of each activation, which gets one scale; weights get one for each row or channel, and are
rounded as `qat=int8` rounds them in training. The graph is for x86: compiled by torch.compile, its products run in 8
bits; uncompiled, they are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from lowvram.compress.formats.graph import FILE, Called, save, traced
from lowvram.compress.qat import LARGEST, SMALLEST_SCALE
from lowvram.core.quiet import quiet
from lowvram.loops.export.format import Graph, Trained

PT2E = "torchao.quantization.pt2e"


@final
class Pt2e(Graph):
    """The graph with its scales. It needs torchao beside torch: the operators that round are torchao's."""

    name = "pt2e"
    may_run_code = True  # torch.export.load falls back to unpickling

    def check(self, model: nn.Module, last: Collection[Tensor]) -> None:
        """Raises nothing: only tracing tells whether a model can be traced."""

    def write(self, trained: Trained, folder: Path) -> None:
        problem = trained.problem
        # Strict: else the quantizer takes an activation module that is called twice for one operator.
        program = traced(Called(trained.model, problem), problem, self.name, strict=True)
        with quiet():
            quantized = quantized_graph(program.module(), trained.batches)
        save(traced(quantized, problem, self.name), folder / FILE)

    def load(self, folder: Path, make_plain: Callable[[], nn.Module]) -> nn.Module:
        with quiet():
            import_module(f"{PT2E}.quantize_pt2e")  # it registers the operators
            return torch.export.load(folder / FILE).module()


@torch.no_grad()
def quantized_graph(graph: Any, batches: list[Any]) -> GraphModule:
    """The graph with weights of 8 bits, and with operators that round activations.

    Args:
        batches: inputs that show the range of each activation.
    """
    steps = import_module(f"{PT2E}.quantize_pt2e")
    prepared = steps.prepare_pt2e(graph, quantizer())
    for inputs in batches:
        prepared(inputs)
    converted = steps.convert_pt2e(prepared)
    forget_unused(converted)
    return converted


def quantizer() -> Any:
    """torchao's for x86, with other weights than its default ones: their codes go as far down as up, and their scales
    may be as small as they need to be (by default 2**-12 at least, which a batch norm's scale soon makes too large)."""
    x86 = import_module(f"{PT2E}.quantizer.x86_inductor_quantizer")
    default = x86.get_default_x86_inductor_quantization_config()
    observer = import_module(f"{PT2E}.observer").PerChannelMinMaxObserver.with_args(eps=SMALLEST_SCALE)
    weight = replace(default.weight, observer_or_fake_quant_ctr=observer, quant_min=-LARGEST, quant_max=LARGEST)
    return x86.X86InductorQuantizer().set_global(replace(default, weight=weight))


def forget_unused(graph: GraphModule) -> None:
    """Remove parameters and buffers that the graph doesn't read: the weights in fp32."""
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in (*graph.named_parameters(), *graph.named_buffers()) if name not in used]:
        owner, _, leaf = name.rpartition(".")
        delattr(graph.get_submodule(owner), leaf)
