"""The devices that can be planned for, with their memory and rates, from conf/data_sheets. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from lowvram.config.defaults import CONF
from lowvram.config.errors import BadInput, require
from lowvram.config.schema import build_as, checked_values

KEY = "plan.device"
FOLDER = CONF / "data_sheets"
AMPERE, ADA = (8, 0), (8, 9)  # compute capabilities


@dataclass(frozen=True)
class DeviceSpec:
    """A device by its data sheet. null: not known, or there is none. FLOP rates are peaks without sparsity."""

    names: list[str] = field(default_factory=list)  # as its driver calls it (torch.cuda.get_device_name)
    compute_capability: str | None = None  # of CUDA, such as "8.6"; null: no CUDA device
    multiprocessors: int | None = None  # the buffers of reduction kernels depend on it; null: not known
    memory_bytes: int | None = None  # the total that its driver reports, including what the CUDA context will take
    bandwidth_bytes_per_s: float | None = None  # of its memory
    pcie_bytes_per_s: float | None = None  # to the host, one way
    link_bytes_per_s: float | None = None  # to the cards of other ranks, one way
    fp32_flops_per_s: float | None = None
    tf32_flops_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    fp16_flops_per_s: float | None = None
    fp8_flops_per_s: float | None = None
    error_median: float | None = None  # relative error of plans for it, from scripts/benchmarks/plan_accuracy.py
    error_p95: float | None = None
    error_where: str | None = None

    def __post_init__(self) -> None:
        is_version = self.compute_capability is None or re.fullmatch(r"\d+\.\d", self.compute_capability) is not None
        allowed = 'null or a version in quotes, such as "8.6"'
        require(is_version, f"{KEY}.compute_capability", self.compute_capability, allowed)
        known = [value is not None for value in (self.error_median, self.error_p95, self.error_where)]
        require(len(set(known)) == 1, f"{KEY}.error_median", self.error_median, "known with error_p95 and error_where")
        for name, value in vars(self).items():
            if name.endswith(("_bytes", "_per_s")):
                require(value is None or value > 0, f"{KEY}.{name}", value, "null (not known) or more than 0")

    @property
    def capability(self) -> tuple[int, int] | None:
        """Such as (8, 6)."""
        if self.compute_capability is None:
            return None
        major, _, minor = self.compute_capability.partition(".")
        return int(major), int(minor)

    @property
    def error(self) -> dict[str, Any] | None:
        """The relative error of plans for it, and where that was measured; None: not known."""
        if self.error_median is None:
            return None
        return {"median": self.error_median, "p95": self.error_p95, "where": self.error_where}

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None

    @property
    def has_tf32(self) -> bool:
        return self._has(AMPERE)

    @property
    def has_bf16(self) -> bool:
        """Whether its hardware computes in bf16; older cards emulate it."""
        return self._has(AMPERE)

    @property
    def has_flash_attention(self) -> bool:
        """Whether torch's flash attention runs on it. Elsewhere memory-efficient attention needs as little memory."""
        return self._has(AMPERE)

    @property
    def has_fp8(self) -> bool:
        return self._has(ADA)

    @property
    def peak_flops_per_s(self) -> dict[str, float | None]:
        """Peak FLOP/s of matrix products, by the number format of the inputs; 16- and 8-bit ones accumulate in fp32."""
        return {
            "fp32": self.fp32_flops_per_s,
            "tf32": self.tf32_flops_per_s,
            "bf16": self.bf16_flops_per_s,
            "fp16": self.fp16_flops_per_s,
            "fp8": self.fp8_flops_per_s,
        }

    def _has(self, least: tuple[int, int]) -> bool:
        return self.capability is not None and self.capability >= least


def device_names() -> list[str]:
    """The devices in conf/data_sheets."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def load_device(name: str) -> DeviceSpec:
    """A device of conf/data_sheets by its name, or one of the user's by the path of its YAML.

    Raises:
        BadInput: there is no such device, or its file has a wrong key or value.
    """
    path = FOLDER / f"{name}.yaml" if name in device_names() else Path(name)
    is_there = path.suffix in (".yaml", ".yml") and path.is_file()
    require(is_there, KEY, name, f"one of {', '.join(device_names())}, or the path of a YAML file like theirs")
    return _load(path)


def find_device(driver_name: str) -> DeviceSpec | None:
    """The device of conf/data_sheets with this driver name; None if there is none."""
    return _by_driver_name().get(driver_name)


@cache
def _by_driver_name() -> dict[str, DeviceSpec]:
    specs = [load_device(name) for name in device_names()]
    return {name: spec for spec in specs for name in spec.names}


def _load(path: Path) -> DeviceSpec:
    try:
        node = OmegaConf.load(path)
    except YAMLError as error:
        reason = str(error).splitlines()[0]
        raise BadInput(KEY, str(path), f"a YAML file that can be read ({reason})") from None
    if not isinstance(node, DictConfig):
        raise BadInput(KEY, str(path), f"a YAML file of the keys {', '.join(DeviceSpec.__dataclass_fields__)}")
    return build_as(DeviceSpec, checked_values(node, KEY), KEY)
