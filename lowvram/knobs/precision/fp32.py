"""precision=fp32 and precision=tf32: what CUDA makes of fp32 products, of matrices and in cuDNN.

Set by torch's older switches, which also set the newer ones (`fp32_precision`). If only these are set, whoever reads an
older one gets an error: torch.export, torch.backends.cudnn.flags, and other people's models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lowvram.core.fact import Fact
from lowvram.core.knob import Exactness, Knob, Stage
from lowvram.core.rig import Rig

MATRICES: Any = torch.backends.cuda.matmul
CUDNN: Any = torch.backends.cudnn
NEWER = [MATRICES, CUDNN.conv, CUDNN.rnn]  # each with a precision of its own


@dataclass(frozen=True)
class Fp32(Knob):
    """IEEE single precision, also inside cuDNN (which would use TF32 by default)."""

    stage = Stage.NUMERICS
    product_format = "fp32"

    def apply(self, rig: Rig) -> Rig:
        use_tf32(False)
        return rig


@dataclass(frozen=True)
class Tf32(Knob):
    """fp32 tensors, but matrix products and convolutions on tensor cores with 10 bits of mantissa. Saves time, no
    memory."""

    stage = Stage.NUMERICS
    product_format = "tf32"
    exactness = Exactness.ROUNDING
    band = 5e-3
    needs_always = frozenset({Fact.TF32})

    def apply(self, rig: Rig) -> Rig:
        use_tf32(True)
        return rig


def use_tf32(is_used: bool) -> None:
    """Choose TF32 for all fp32 products on CUDA, or IEEE single precision."""
    MATRICES.allow_tf32 = CUDNN.allow_tf32 = is_used


def uses_tf32(is_convolution: bool) -> bool:
    """Whether fp32 matrix products, or convolutions, would run in TF32."""
    return (CUDNN.conv if is_convolution else MATRICES).fp32_precision == "tf32"


@contextmanager
def tf32_restored() -> Iterator[None]:
    """Afterwards all switches are as before; an older one isn't touched if it couldn't be read."""
    older = [(each, allowed) for each in (MATRICES, CUDNN) if (allowed := allowed_in(each)) is not None]
    newer = [each.fp32_precision for each in NEWER]
    try:
        yield
    finally:
        for each, allowed in older:
            each.allow_tf32 = allowed
        for each, precision in zip(NEWER, newer, strict=True):
            each.fp32_precision = precision


def allowed_in(backend: Any) -> bool | None:
    """An older switch; None if torch refuses to read it, as the newer ones were set to something else."""
    try:
        return backend.allow_tf32
    except RuntimeError:
        return None
