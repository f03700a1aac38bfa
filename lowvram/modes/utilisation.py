"""Model FLOPs utilisation: the share of a device's peak rate that the model's own arithmetic reaches.

Chowdhery et al., "PaLM" (2022), appendix B: recomputation is not the model's arithmetic and doesn't count.
"""

from __future__ import annotations

import re

import torch

from lowvram.core.ranks import num_ranks
from lowvram.modes.session import Session
from lowvram.modes.trace import model_flops

TERA = 1e12
# Dense peak rates in TFLOP/s from NVIDIA's data sheets, by what the device's name contains; the first match counts.
# Formats of 16 bits and fewer accumulate in fp32.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "H200": {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
    "H100 PCIe": {"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0},
    "H100": {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9},
    "A100": {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0},
    "RTX 3070": {"fp32": 20.3, "tf32": 20.3, "bf16": 40.6, "fp16": 40.6},
    "T4": {"fp32": 8.1, "fp16": 65.0},
}
MULTIPLIES_IN = {"bf16_pure": "bf16"}  # options that are not called like the format of their products


def mfu(session: Session, samples_per_s: float | None, precision: str) -> float | None:
    """Between 0 and 1; None where the device's peak rate is not known or nothing was timed."""
    if samples_per_s is None or session.rig.device.type != "cuda":
        return None
    peak_tflops = peak_rate(torch.cuda.get_device_name(session.rig.device), precision)
    if peak_tflops is None:
        return None
    return model_flops(session.problem, session.knobs) * samples_per_s / (peak_tflops * TERA * num_ranks())


def peak_rate(device_name: str, precision: str) -> float | None:
    """In TFLOP/s, for the option of `precision` in use."""
    known = (rates for name, rates in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b(?! Laptop)", device_name))
    return next(known, {}).get(MULTIPLIES_IN.get(precision, precision))
