"""Trains whole configurations on the emulated device, for comparison with the plain loop on the CPU, within the
tolerances of scripts/pages/compatibility.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowvram.config.registry import Option
from lowvram.core.knob import Knob
from lowvram.core.mesh import data_ranks
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.adapter import Freeze
from lowvram.knobs.precision import Fp16
from lowvram.knobs.sharding import PipelineParallel
from lowvram.models.resnet import NormKind, ResNetConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto
from scripts.pages.pairs import Row
from tests.laboratory import KNOBS, compiler_as_before, knobs_of, train

CUDA = torch.device("cuda")
SIZES = [64, 64]  # samples of each step
TRANSFORMER = TransformerConfig(num_layers=2, width=32, num_heads=2, context=16)
RESNET = ResNetConfig(layers=[1, 1], width=16, norm=NormKind.group, image_size=16)
TASKS = {
    "transformer": Auto().pose(TRANSFORMER, DataSpec(Modality.TOKENS, 256, (16,))),
    "resnet": Auto().pose(RESNET, DataSpec(Modality.IMAGES, 16, (3, 16, 16))),
}
CHANGED: dict[Option, Knob] = {  # as `compatibility.EXTRA`
    ("precision", "fp16"): Fp16(init_scale=1024.0),
    ("sharding", "pipeline"): PipelineParallel(schedule="gpipe"),
    ("adapter", "freeze"): Freeze(train=["blocks", "head"]),
}
History = list[float]  # loss and gradient norm of each step


def history(row: Row, problem: str, device: torch.device) -> History:
    """Train a problem of `TASKS` with the options of `row`."""
    chosen: dict[str, Knob] = {option[0]: CHANGED.get(option, KNOBS[option]) for option in row}
    with unfused():
        trained = train(TASKS[problem], knobs_of(**chosen), SIZES, device=device)
    assert all(update.applied for update in trained.updates)
    pairs = zip(trained.losses, (update.grad_norm for update in trained.updates), strict=True)
    return [float(value) for pair in pairs for value in pair]


@contextmanager
def unfused() -> Iterator[None]:
    """Inside it TorchScript fuses no operators: fused kernels would write no values on the emulated device."""
    before = torch._C._jit_set_fusion_strategy([("DYNAMIC", 0)])
    try:
        yield
    finally:
        torch._C._jit_set_fusion_strategy(before)


def history_on_rank(row: Row, problem: str) -> History:
    """The same on one of two ranks."""
    assert data_ranks().size == 2
    with run_op_by_op():
        return history(row, problem, CUDA)


@contextmanager
def run_op_by_op() -> Iterator[None]:
    """Inside it nothing is compiled; afterwards the compiler's settings are restored."""
    with compiler_as_before(), torch.compiler.set_stance("force_eager"):
        yield
