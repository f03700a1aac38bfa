"""Model FLOPs utilisation: the share of a device's peak rate that the model's own arithmetic reaches.

Chowdhery et al., "PaLM" (2022), appendix B: recomputation is not the model's arithmetic and doesn't count.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob, Stage
from lowvram.core.mesh import all_ranks
from lowvram.core.recomputed import nothing_recomputed
from lowvram.core.step import step
from lowvram.loops.session import Session
from lowvram.planning.devices import find_device
from lowvram.planning.trace.fake import CantPlan, example, fake_tensors
from lowvram.tasks import Problem

CPU = torch.device("cpu")
NUM_SAMPLES = 2  # that are traced: over a single one, some batch norms have a single value to normalise


def mfu(session: Session, samples_per_s: float | None) -> float | None:
    """Between 0 and 1; None if the device's peak rate isn't known, nothing was timed, or the model can't be traced.

    Args:
        samples_per_s: as `whole_samples_per_s` returns it.
    """
    if samples_per_s is None or session.rig.device.type != "cuda":
        return None
    peak_flops_per_s = peak_rate(
        torch.cuda.get_device_name(session.rig.device), session.settings.groups["precision"].product_format
    )
    if peak_flops_per_s is None:
        return None
    try:
        flops = model_flops(session.problem, session.knobs)
    except CantPlan:
        return None
    return flops * samples_per_s / (peak_flops_per_s * all_ranks().size)


def whole_samples_per_s(session: Session, throughput: Mapping[str, float]) -> float | None:
    """Samples per second. Of texts: tokens per second, divided by the length of a sample without padding."""
    if "tokens_per_s" in throughput:
        return throughput["tokens_per_s"] / session.data.spec.shape[0]
    return throughput.get("samples_per_s")


def peak_rate(device_name: str, product_format: str | None) -> float | None:
    """The peak FLOP/s of matrix products in a number format; None if it isn't known."""
    device = find_device(device_name)
    return None if device is None else device.peak_flops_per_s.get(product_format or "")


def model_flops(problem: Problem, knobs: dict[str, Knob]) -> int:
    """Floating-point operations of forward and backward for one sample, without any recomputation."""
    needed = {name: knob for name, knob in knobs.items() if knob.stage in (Stage.OPTIMIZER, Stage.STEPPING)}
    plain = sdpa_kernel(SDPBackend.MATH)  # the counter doesn't know the CPU's fused attention
    with fake_tensors() as known, plain, nothing_recomputed(), FlopCounterMode(display=False) as counter:
        batch = problem.as_loaded(example(problem.spec, NUM_SAMPLES, known))
        step(assemble(problem, needed, CPU), batch)
    return counter.get_total_flops() // NUM_SAMPLES
