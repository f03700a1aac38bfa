"""Compares training on the emulated device, whose streams are randomly late, with training on the CPU.

    EMULATED_LATE=4 python -m tests.emulated_cuda.races CASE NUM_SEEDS [MISTAKE]

Each seed makes the streams late in another way. Prints a JSON list of one number per seed: the largest relative error
of losses and weights. With a mistake (mistakes.py) it ends at the first seed that shows it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, product

import torch
from torch import Tensor

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.rig import Part, Rig
from lowvram.core.shards import whole
from lowvram.core.step import step
from lowvram.data.batch_sizes import SameSize
from lowvram.data.loader import Inline, Loader, Workers
from lowvram.data.source import Samples
from lowvram.data.synthetic import ResolvedSynthetic
from lowvram.knobs.offload import Activations, ActivationsOnDisk
from lowvram.knobs.stepping import AfterBackward, CpuOffload, InBackward, Norm
from lowvram.knobs.weights import StreamedWeights
from tests.emulated_cuda import late
from tests.emulated_cuda.mistakes import MISTAKES
from tests.laboratory import CPU, PROBLEMS, InDouble, knobs_of, relative_error

TOLERANCE = 1e-11  # relative, for fp64 sums in another order
CUDA = torch.device("cuda", 0)
NUM_STEPS, BATCH_SIZE = 3, 4
SAMPLES: dict[str, Samples] = {
    "transformer": ResolvedSynthetic(PROBLEMS["transformer"].spec, 1).open(seed=0).train,
    "resnet_group": ResolvedSynthetic(PROBLEMS["resnet_group"].spec, 1).open(seed=0).train,
}
Choices = Mapping[str, str | Knob]


def nothing(rig: Rig, batch: Part) -> None:
    """Before a step."""


def look_at_the_end(rig: Rig, batch: Part) -> None:
    """Compute only the last parameter's gradient. Activations that are prefetched for the rest of the backward pass are
    never read, so their memory is freed while it is written."""
    part = rig.move(batch)
    loss = rig.criterion(rig.forward(part), part)
    torch.autograd.grad(loss, [*rig.model.parameters()][-1:])


@dataclass(frozen=True)
class Variant:
    """One configuration of a case: on the device with the knob under test, on the CPU with reference knobs."""

    knobs: Choices
    reference: Choices = field(default_factory=dict)
    loader: Loader = field(default_factory=Inline)
    before: Callable[[Rig, Part], None] = nothing  # called before each step

    def trained(self, problem: str, device: torch.device) -> dict[str, Tensor]:
        """Losses and weights after some steps."""
        choices, loader = (self.reference, Inline()) if device == CPU else (self.knobs, self.loader)
        rig = assemble(InDouble(PROBLEMS[problem]), knobs_of(**choices), device)
        losses: list[Tensor] = []
        with closing(loader.batches(SAMPLES[problem], SameSize(BATCH_SIZE), 0, 0, device)) as batches:
            for batch in map(in_double, islice(batches, NUM_STEPS)):
                self.before(rig, batch)
                losses.append(step(rig, batch)[0])
        named = {"loss": torch.stack(losses), **dict(rig.model.named_parameters())}
        return {name: whole(tensor).detach().cpu() for name, tensor in named.items()}


def in_double(batch: Part) -> Part:
    return batch.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def with_each(choices: Choices, common: list[Choices]) -> list[Variant]:
    """A knob with other knobs, which are used on both devices."""
    return [Variant({**choices, **each}, each) for each in common]


TOGETHER: list[Choices] = [
    {},
    {"accum": "x2"},
    {"ckpt": "every2", "optimizer": "sgd"},
    {"accum": "x4", "ckpt": "every1"},
]
MIN_BYTES = 256  # so that most of what tiny models save leaves the device
CLIPS = [None, 0.1]
PARTS: list[Choices] = [{"accum": "none"}, {"accum": "x2"}]
CASES: dict[str, list[Variant]] = {
    "activations": [
        *with_each({"offload": Activations(MIN_BYTES)}, TOGETHER),
        Variant({"offload": Activations(MIN_BYTES), "stepping": "cpu_offload"}),
        Variant({"offload": Activations(MIN_BYTES)}, before=look_at_the_end),
    ],
    "activations_disk": with_each({"offload": ActivationsOnDisk(None, MIN_BYTES)}, TOGETHER),
    "parameters": with_each({"offload": "parameters"}, TOGETHER),
    "in_backward": [
        Variant({"stepping": InBackward(clip, norm), **parts}, {"stepping": AfterBackward(clip), **parts})
        for clip, norm, parts in product(CLIPS, [Norm.host, Norm.two_passes], PARTS)
    ],
    "cpu_offload": [
        Variant({"stepping": CpuOffload(clip, share), **parts}, {"stepping": AfterBackward(clip), **parts})
        for clip, share, parts in product(CLIPS, [1.0, 0.5], PARTS)
    ],
    "stream": [
        *with_each({"weights": "stream"}, TOGETHER),
        Variant({"weights": StreamedWeights(resident=1), "accum": "x2"}, {"accum": "x2"}),
        Variant({"weights": "stream", "stepping": InBackward(0.1)}, {"stepping": AfterBackward(0.1)}),
        Variant({"weights": "stream", "stepping": InBackward(), "offload": Activations(MIN_BYTES)}),
        Variant(
            {"weights": "stream", "stepping": CpuOffload(0.1), **PARTS[1]}, {"stepping": AfterBackward(0.1), **PARTS[1]}
        ),
    ],
    "workers": [Variant(each, each, Workers(2)) for each in TOGETHER],
}


@cache
def on_cpu(case: str, index: int, problem: str) -> dict[str, Tensor]:
    return CASES[case][index].trained(problem, CPU)


def differences(case: str, num_seeds: int) -> Iterator[float]:
    """The largest relative error of each seed. Seeds take the variants and problems in turn."""
    turns = list(product(range(len(CASES[case])), SAMPLES))
    for seed in range(num_seeds):
        index, problem = turns[seed % len(turns)]
        wanted = on_cpu(case, index, problem)
        late.set_seed(seed)
        found = CASES[case][index].trained(problem, CUDA)
        yield max(relative_error({name: found[name]}, {name: wanted[name]}) for name in wanted)


def main(case: str, num_seeds: str, mistake: str = "") -> None:
    found = []
    if mistake:
        MISTAKES[mistake].plant()
    for difference in differences(case, int(num_seeds)):
        found.append(difference if math.isfinite(difference) else 1e9)  # JSON has no nan
        if mistake and found[-1] > TOLERANCE:
            break
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
