"""`debug=memory`: the largest tensors at the peak and where they were made; on CUDA also a snapshot of the allocator.

Uses the ledger's own records, so that the table adds up to `by_kind`. Costs nothing when it is off.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lowvram.compat.torch_autograd import current_node
from lowvram.compat.torch_cuda import allocator_page, allocator_recorded, allocator_snapshot, save_allocator_snapshot
from lowvram.core import ledger as ledger_module
from lowvram.core.ledger import OriginOf
from lowvram.core.peak import Holding, Peak
from lowvram.core.shards import class_name
from lowvram.results.files.durable import write_text
from lowvram.results.row import size_text

NUM_WRITTEN, NUM_PRINTED = 100, 10
FILE_NAME, SNAPSHOT, PAGE = "memory.md", "snapshot.pickle", "snapshot.html"
TORCH = str(Path(torch.__file__).parent)
NOT_THE_MAKER = (TORCH, ledger_module.__file__, __file__)


class TensorReport(ABC):
    """Reports the memory of one step: run the step inside its block, under a ledger with its `origin_of`; then call
    `write`."""

    origin_of: OriginOf | None = None

    @abstractmethod
    def __enter__(self) -> None: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def write(self, peak: Peak) -> None:
        """Print the report and write its files."""


@final
class NoReport(TensorReport):
    """`measure.largest_tensors=false`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, peak: Peak) -> None:
        pass


@dataclass(frozen=True)
class Birth:
    """How a tensor was made."""

    shape: tuple[int, ...]
    dtype: str
    maker: str  # a parameter's name, or the operator that made it
    place: str  # the module and the line of the program; in a backward pass, its node


UNSEEN = Birth((), "", "", "before the step")  # of a storage whose birth wasn't recorded, such as one without bytes


@final
class LargestTensors(TensorReport):
    """`measure.largest_tensors=true`."""

    def __init__(self, model: nn.Module, device: torch.device, folder: Path) -> None:
        self._model, self._device, self._folder = model, device, folder
        self._names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._running: list[str] = []  # modules whose forward pass is under way, the innermost last
        self._undo = ExitStack()
        self.origin_of = self._born

    def __enter__(self) -> None:
        before, after = self._module_begins, self._module_ends
        self._undo.callback(register_module_forward_pre_hook(before).remove)
        self._undo.callback(register_module_forward_hook(after, always_call=True).remove)
        if self._device.type == "cuda":
            self._undo.enter_context(allocator_recorded())
            self._undo.callback(save_snapshot, self._folder)

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _module_begins(self, module: nn.Module, *_: Any) -> None:
        name = self._modules.get(id(module), "")
        self._running.append(f"{name} ({class_name(module)})" if name else class_name(module))

    def _module_ends(self, *_: Any) -> None:
        self._running.pop()

    def _born(self, tensor: Tensor, operator: Any) -> Birth:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if operator is None:
            return Birth(shape, dtype, self._names.get(id(tensor), ""), "before the step")
        return Birth(shape, dtype, str(operator).removeprefix("aten.").partition(".")[0], self._place())

    def _place(self) -> str:
        if self._running:
            return f"{self._running[-1]}, {line_of_program()}"
        node = current_node()
        return f"backward of {node.name().removesuffix('Backward0')}" if node is not None else line_of_program()

    def write(self, peak: Peak) -> None:
        pages = [FILE_NAME]
        write_text(self._folder / FILE_NAME, in_markdown(peak))
        print(f"the largest tensors at the peak of {size_text(peak.peak_bytes)}:")
        for holding in peak.holdings[:NUM_PRINTED]:
            print("  " + "  ".join(word for word in words(holding) if word))
        if self._device.type == "cuda":
            pages += [SNAPSHOT, PAGE]
        print(f"more in {', '.join(shown(self._folder / page) for page in pages)}")


def words(holding: Holding) -> tuple[str, ...]:
    """A row of the table: size, shape, dtype, kind, maker, place."""
    birth: Birth = holding.origin or UNSEEN
    shape = "x".join(map(str, birth.shape)) or "-"
    return size_text(holding.num_bytes), shape, birth.dtype, holding.kind.value, birth.maker, birth.place


def in_markdown(peak: Peak) -> str:
    """A page with the peak by kind, then tensor by tensor."""
    titles = ("size", "shape", "dtype", "kind", "made by", "where")
    rest = peak.holdings[NUM_WRITTEN:]
    lines = [f"# {size_text(peak.peak_bytes)} of live tensors at the peak of a step", ""]
    lines += ["| kind | at the peak | bytes | tensors |", "|---|---:|---:|---:|"]
    for kind, num_bytes in peak.by_kind.items():
        num_tensors = sum(holding.kind is kind for holding in peak.holdings)
        lines.append(f"| {kind.value} | {size_text(num_bytes)} | {num_bytes} | {num_tensors} |")
    lines += ["", "Host memory is no part of the peak. Sizes are those of storages, in multiples of 512 bytes.", ""]
    lines += [f"| {' | '.join(titles)} |", "|---:|---|---|---|---|---|"]
    lines += [f"| {' | '.join(words(holding))} |" for holding in peak.holdings[:NUM_WRITTEN]]
    if rest:
        lines.append(f"| {size_text(sum(holding.num_bytes for holding in rest))} | {len(rest)} smaller ones | | | | |")
    return "\n".join(lines) + "\n"


def line_of_program() -> str:
    """The innermost line that is neither torch's nor the ledger's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_MAKER):
        frame = frame.f_back
    return "" if frame is None else f"{shown(Path(frame.f_code.co_filename))}:{frame.f_lineno}"


def shown(path: Path) -> str:
    """The path relative to the current folder; outside of it, the last three parts."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "/".join(path.parts[-3:])


def save_snapshot(folder: Path) -> None:
    """Save the events of CUDA's allocator over the step, and a page that shows them (its viewer comes from the web)."""
    save_allocator_snapshot(folder / SNAPSHOT)
    write_text(folder / PAGE, allocator_page(allocator_snapshot()))
