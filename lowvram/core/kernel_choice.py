"""Which kernels scaled_dot_product_attention may choose, at a forward pass and for its repetition: a model may call its
blocks within `torch.nn.attention.sdpa_kernel`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

from torch.backends import cuda

FLAGS: list[tuple[Callable[[], bool], Callable[[bool], None]]] = [
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
]


@final
class KernelChoice(AbstractContextManager[None]):
    """The present choice: inside it, it holds again. Can be entered again."""

    def __init__(self) -> None:
        self.chosen = now()
        self.outside = self.chosen

    def __enter__(self) -> None:
        self.outside = now()
        self.set(self.outside, self.chosen)

    def __exit__(self, *error: Any) -> None:
        self.set(self.chosen, self.outside)

    def set(self, present: list[bool], wanted: list[bool]) -> None:
        for (_, enable), is_on, is_wanted in zip(FLAGS, present, wanted, strict=True):
            if is_on != is_wanted:
                enable(is_wanted)


def now() -> list[bool]:
    return [is_enabled() for is_enabled, _ in FLAGS]
