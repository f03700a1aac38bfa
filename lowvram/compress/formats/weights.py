"""int8, int8_dynamic, int4: safetensors in which the weights of linear layers have few bits, as torchao keeps them.

Embeddings, norms, biases, convolutions and the last layer stay in fp32, as in most published models of few bits: the
last layer often shares its weight with the embedding. Scales and codes are those of training (`lowvram.compress.qat`).
Tensors are named as torchao (and transformers) name those of a state dict that they write to safetensors. For the CPU,
torchao keeps each code of 4 bits in a byte: in the file two codes share one, and loading parts them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lowvram.compat.torchao import flattened, set_codes, unflattened
from lowvram.compress.qat import LARGEST, LARGEST_OF_4, codes_of, divides, scales_of
from lowvram.config.errors import BadInput, require
from lowvram.core.extra_state import hidden
from lowvram.core.layers import inner_linears
from lowvram.core.quiet import quiet
from lowvram.loops.export.format import Format, Trained
from lowvram.models.layout import WEIGHTS
from lowvram.tasks import Problem

CODES = "_qdata"  # ends the names of the codes of weights
SMALLEST = -8  # code of 4 bits

Tensors = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class FewBits(Format):
    """Weights of few bits.

    Args:
        config: makes torchao's configuration.
        largest: code of a weight.
        group: weights of a row that share a scale; None: all of them. Rows that it doesn't divide stay in fp32.
        pack, unpack: of the codes of a weight (rows, columns), for the file.
    """

    name: str
    config: Callable[[], Any]
    largest: int = LARGEST
    group: int | None = None
    pack: Callable[[Tensor], Tensor] = Tensor.contiguous
    unpack: Callable[[Tensor], Tensor] = Tensor.contiguous

    def layers(self, model: nn.Module, last: Collection[Tensor]) -> list[nn.Linear]:
        linears = inner_linears(model, last)
        return linears if self.group is None else [layer for layer in linears if divides(self.group, layer)]

    def check(self, model: nn.Module, last: Collection[Tensor]) -> None:
        rows = "" if self.group is None else f" whose rows can be divided into groups of {self.group} weights"
        others = "safetensors, torch_export, onnx or pt2e"
        allowed = f"{others}: the model has no linear layer{rows}, besides the last, which stays as it is"
        require(bool(self.layers(model, last)), "export.format", self.name, allowed)

    def write(self, trained: Trained, folder: Path) -> None:
        model = deepcopy(trained.model)
        with quiet(), hidden(model):
            self.quantize(self.layers(model, trained.problem.structure(model).last_weights), model)
            tensors, about = flattened(distinct(model))
        packed = {name: self.pack(each) if name.endswith(CODES) else each for name, each in tensors.items()}
        save_file(packed, folder / WEIGHTS, {"format": "pt", **about})

    def quantize(self, layers: list[nn.Linear], model: nn.Module) -> None:
        """Give these layers of the model, in place, torchao's weights of few bits, with the scales and codes of
        training."""
        weights = {layer: layer.weight for layer in layers}
        quantize(model, self.config(), layers)
        for layer, weight in weights.items():
            scale = scales_of(weight, self.largest, self.group)
            set_codes(layer.weight, codes_of(weight, scale, self.largest), scale)

    def load(self, folder: Path, make_plain: Callable[[], nn.Module]) -> nn.Module:
        tensors, about = read(folder / WEIGHTS)
        unpacked = {name: self.unpack(each) if name.endswith(CODES) else each for name, each in tensors.items()}
        with quiet():
            import_module("torchao.quantization")
            model = make_plain()
        with quiet(), hidden(model):
            fill(model, unflattened(unpacked, about))
        return model.eval()

    def outputs(self, problem: Problem, loaded: nn.Module, inputs: Any) -> Any:
        return problem.call(loaded, inputs)


def int8() -> FewBits:
    return FewBits("int8", int8_weights)


def int8_dynamic() -> FewBits:
    """Inputs get a scale for each token, when the layer is called."""
    return FewBits(
        "int8_dynamic", lambda: import_module("torchao.quantization").Int8DynamicActivationInt8WeightConfig()
    )


def int4(group: int) -> FewBits:
    return FewBits("int4", lambda: int4_weights(group), LARGEST_OF_4, group, pack_pairs, unpack_pairs)


def int8_weights() -> Any:
    """torchao's configuration of weights of 8 bits, with one scale for each row."""
    torchao: Any = import_module("torchao.quantization")
    return torchao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=torchao.PerAxis(0))


def int4_weights(group: int) -> Any:
    """torchao's configuration of weights of 4 bits, with one scale for each `group` weights of a row."""
    torchao: Any = import_module("torchao.quantization")
    int4: torch.dtype = torch.int4  # pyright: ignore[reportAttributeAccessIssue]
    return torchao.IntxWeightOnlyConfig(weight_dtype=int4, granularity=torchao.PerGroup(group))


def quantize(model: nn.Module, config: Any, layers: list[nn.Linear]) -> None:
    """torchao's `quantize_` on these layers, in place."""
    chosen = set(layers)
    is_chosen: Callable[[nn.Module, str], bool] = lambda module, name: module in chosen  # noqa: E731
    import_module("torchao.quantization").quantize_(model, config, filter_fn=is_chosen)


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes of -8 to 7, int8 (rows, columns), in pairs: uint8 (rows, columns / 2), the first of a pair in the low four
    bits."""
    low, high = (codes - SMALLEST).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack_pairs(pairs: Tensor) -> Tensor:
    """The inverse of `pack_pairs`."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2).to(torch.int8) + SMALLEST


def distinct(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's state, each under the first of its names."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name].data.contiguous() for name in first.values()}


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, and its metadata."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@torch.no_grad()
def fill(model: nn.Module, values: Tensors) -> None:
    """Give a model the values that `distinct` returned of one. Weights of few bits replace those of the model, the
    others are copied, so that tied ones stay tied.

    Raises:
        BadInput: the values aren't of such a model.
    """
    state = model.state_dict(keep_vars=True)
    given = {id(state[name]) for name in values if name in state}
    if strange := [name for name in values if name not in state] + [n for n in state if id(state[n]) not in given]:
        raise BadInput("folder", strange[0], "a tensor of both the model's configuration and its weights")
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        if type(value) is Tensor:
            state[name].copy_(value)
        else:
            setattr(model.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
