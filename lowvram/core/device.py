"""The device of a point, and the facts that it lacks."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import final

import torch

from lowvram.config.errors import BadInput
from lowvram.core.fact import Fact


def choose_device(text: str) -> torch.device:
    """The device that `device=text` names: `auto` is CUDA if there is a card, else the CPU. A CUDA device always has an
    index (`cuda` is `cuda:0`), as torch's memory limits and statistics need one.

    Raises:
        BadInput: there is no such device; or there is a card that this torch can't use (it never silently takes the
            CPU instead).
    """
    if text == "cpu" or (text == "auto" and not torch.cuda.is_available() and not has_nvidia_card()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} sees no CUDA device on this machine"
        raise BadInput(
            "device", text, f"usable: {why}; install a CUDA build of torch and its driver, or say device=cpu"
        )
    device = torch.device("cuda:0" if text in ("auto", "cuda") else text)
    if device.index >= torch.cuda.device_count():
        raise BadInput(
            "device",
            text,
            f"one of the {torch.cuda.device_count()} visible CUDA devices, counted from cuda:0",
        )
    return device


def visible_cards(text: str) -> list[str]:
    """The cards that `device=text` may be, as CUDA_VISIBLE_DEVICES names them; none for the CPU. Raises as
    `choose_device`."""
    device = choose_device(text)
    if device.type != "cuda":
        return []
    listed = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = listed or list(map(str, range(torch.cuda.device_count())))
    return [names[device.index]] if ":" in text else names[: torch.cuda.device_count()]


def has_nvidia_card() -> bool:
    """Whether the NVIDIA driver is present and CUDA_VISIBLE_DEVICES doesn't hide every card. Loads no CUDA library."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    is_wsl_card = Path("/usr/lib/wsl/lib/libcuda.so.1").exists()
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists() or is_wsl_card


@final
@dataclass(frozen=True)
class Card:
    """An NVIDIA card: one of this machine, or one that a plan is for."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int | None = None  # None: not known


def card_of(device: torch.device) -> Card:
    """The card of this machine behind a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return Card(properties.name, (properties.major, properties.minor), properties.multi_processor_count)


def absent_facts(device: torch.device, num_ranks: int = 1) -> dict[Fact, str]:
    """The facts that a device of this machine and its ranks lack, each with what the user can do about it."""
    card = card_of(device) if device.type == "cuda" else None
    absent = absent_from(card, num_ranks, str(device) if card else "the CPU")
    if card and find_spec("triton") is None:
        why = "Triton isn't installed, which torch for CUDA brings on Linux: pip install triton"
        absent |= dict.fromkeys([Fact.C_COMPILER, Fact.KERNEL_COMPILER], why)
    if not any(shutil.which(name) for name in compilers(device)):
        why = f"none of {', '.join(compilers(device))} was found: install g++ and gcc, or set CXX or CC"
        absent |= dict.fromkeys([Fact.C_COMPILER, *([Fact.KERNEL_COMPILER] if card else [])], why)
    return absent


def absent_from(card: Card | None, num_ranks: int, what_it_is: str) -> dict[Fact, str]:
    """The facts that a card (None: a CPU) and its ranks lack, each with what the user can do about it.

    Args:
        what_it_is: the device's name in the messages: "it is ... here".
    """
    absent = _absent_with_ranks(num_ranks)
    if card is not None:
        absent[Fact.CPU] = f"it is {what_it_is} here"
        return absent | _absent_on_card(card)
    absent[Fact.CUDA] = "it is the CPU here"
    absent[Fact.TF32] = "it is the CPU here: use precision=fp32 or precision=bf16"
    absent[Fact.FP8] = "it is the CPU here: use precision=bf16"
    return absent


def compilers(device: torch.device) -> list[str]:
    """The compilers of which torch.compile needs one: for Triton a C compiler, for inductor on a CPU a C++ compiler."""
    return c_compilers() if device.type == "cuda" else [os.environ.get("CXX", "g++")]


def c_compilers() -> list[str]:
    return [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]


def c_compiler() -> str | None:
    """The path of the first C compiler that is installed."""
    return next((found for name in c_compilers() if (found := shutil.which(name))), None)


def _absent_with_ranks(num_ranks: int) -> dict[Fact, str]:
    if num_ranks > 1:
        return {Fact.ONE_RANK: f"it has {num_ranks}: choose sharding=ddp or sharding=fsdp, or say sharding.ranks=1"}
    return {Fact.MANY_RANKS: "it has one: say sharding.ranks=2 (or more), or sharding=none"}


def _absent_on_card(card: Card) -> dict[Fact, str]:
    absent: dict[Fact, str] = {}
    major, minor = card.capability
    has = f"{card.name} has compute capability {major}.{minor}, it takes"
    if card.capability < (8, 0):
        absent[Fact.TF32] = f"{has} 8.0: use precision=fp32"
        # As torch.cuda.is_bf16_supported(including_emulation=False): by default it is True on a T4, too.
        absent[Fact.BF16] = f"{card.name} only emulates it: use precision=fp16"
    if card.capability < (8, 9):
        absent[Fact.FP8] = f"{has} 8.9: use precision={'bf16' if card.capability >= (8, 0) else 'fp16'}"
    return absent
