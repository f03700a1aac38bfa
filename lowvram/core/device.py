"""The device of a point, and the facts that it lacks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from lowvram.config import BadInput
from lowvram.core.knob import Fact
from lowvram.core.ranks import num_ranks


def choose_device(text: str) -> torch.device:
    """`auto` is CUDA where there is a card, else the CPU. A card that this torch can't use is an error, never a
    silent run on the CPU."""
    if text == "cpu" or (text == "auto" and not torch.cuda.is_available() and not nvidia_card_here()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        why = f"torch {torch.__version__} sees no CUDA device on this machine"
        raise BadInput(
            "device", text, f"usable: {why}; install a CUDA build of torch and its driver, or say device=cpu"
        )
    device = torch.device("cuda" if text == "auto" else text)
    if (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(
            "device",
            text,
            f"one of the {torch.cuda.device_count()} visible CUDA devices, counted from cuda:0",
        )
    return device


def nvidia_card_here() -> bool:
    """Whether an NVIDIA card is meant to be used, as its driver tells; asks no CUDA library."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    is_wsl_card = Path("/usr/lib/wsl/lib/libcuda.so.1").exists()
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists() or is_wsl_card


def absent_facts(device: torch.device) -> dict[Fact, str]:
    """The facts that this machine lacks, each with what the user can do about it."""
    absent = _absent_with_ranks(num_ranks())
    if device.type == "cuda":
        absent[Fact.CPU] = f"it is {device} here"
        absent |= _absent_on_card(device)
    else:
        absent[Fact.CUDA] = "it is the CPU here"
        absent[Fact.TF32] = "it is the CPU here: use precision=fp32 or precision=bf16"
        absent[Fact.FP8] = "it is the CPU here: use precision=bf16"
    if not any(shutil.which(name) for name in compilers(device)):
        absent[Fact.C_COMPILER] = (
            f"none of {', '.join(compilers(device))} was found: install g++ and gcc, or set CXX or CC"
        )
    return absent


def compilers(device: torch.device) -> list[str]:
    """What torch.compile calls: Triton a C compiler, inductor on a CPU a C++ compiler."""
    if device.type == "cuda":
        return [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang", "cc"]
    return [os.environ.get("CXX", "g++")]


def _absent_with_ranks(num_ranks: int) -> dict[Fact, str]:
    if num_ranks > 1:
        return {Fact.ONE_RANK: f"it has {num_ranks}: choose sharding=ddp or sharding=fsdp, or say sharding.ranks=1"}
    return {Fact.MANY_RANKS: "it has one: say sharding.ranks=2 (or more), or sharding=none"}


def _absent_on_card(device: torch.device) -> dict[Fact, str]:
    absent: dict[Fact, str] = {}
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        absent[Fact.TF32] = (
            f"{name} has compute capability {capability[0]}.{capability[1]}, it takes 8.0: use precision=fp32"
        )
    if capability < (8, 9):
        instead = "bf16" if capability >= (8, 0) else "fp16"
        absent[Fact.FP8] = (
            f"{name} has compute capability {capability[0]}.{capability[1]}, it takes 8.9: use precision={instead}"
        )
    with torch.cuda.device(device):
        if not torch.cuda.is_bf16_supported(including_emulation=False):  # the default says True on a T4
            absent[Fact.BF16] = f"{name} only emulates it: use precision=fp16"
    return absent
