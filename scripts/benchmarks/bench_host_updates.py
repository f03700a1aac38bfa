"""How long one thread of the host takes for an update of weights that stay there, per parameter, and how many bytes.

    OMP_NUM_THREADS=1 scripts/python scripts/benchmarks/bench_host_updates.py [ROUNDS]

As with weights=stream. Each round updates each case's 16,777,216 parameters once, one case after the other, and the
processor's time counts, so that a machine that others use, too, makes little difference: medians and their range. The
first row is torch's own fused AdamW. The table is Markdown on standard output. Some five minutes, most of them for
compilers.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowvram.compat.torch_trees import tree_leaves
from lowvram.core import host
from lowvram.core.rounding import Rounding, Split, Stochastic
from lowvram.knobs.optimizer import AdamW, AdamW4bit, AdamW8bit, AdamWCompanded, Moments, SGDCompanded
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy
from lowvram.knobs.optimizer.groups import OptimizerKnob

NUM_ROWS, WIDTH = 4096, 4096
NUM_ROUNDS = 7
FORMATS: dict[str, tuple[torch.dtype, Rounding | None]] = {
    "fp32": (torch.float32, None),
    "bf16_split": (torch.bfloat16, Split(8)),
    "bf16_split, 16 bits": (torch.bfloat16, Split(16)),
    "bf16_pure": (torch.bfloat16, Stochastic()),
}
OPTIMIZERS = {
    "adamw": AdamW(),
    "adamw, moments=bf16": AdamW(moments=Moments.bf16),
    "adamw_companded": AdamWCompanded(),
    "sgd_companded": SGDCompanded(),
    "adamw_8bit": AdamW8bit(),
    "adamw_4bit": AdamW4bit(),
}
FEW = ("adamw_8bit", "adamw_4bit")  # whose compilers take long: two formats of weights


class Case(NamedTuple):
    name: str
    weight: nn.Parameter
    optimizer: torch.optim.Optimizer

    def num_bytes(self) -> int:
        """Of the weight, its gradient and its state."""
        held = [self.weight, self.weight.grad, *tree_leaves(list(self.optimizer.state.values()))]
        return sum(part.nbytes() for each in held if isinstance(each, Tensor) for part in host.storages(each))


def case_of(name: str, knob: OptimizerKnob | None, dtype: torch.dtype, rounding: Rounding | None) -> Case:
    weight = nn.Parameter(torch.randn(NUM_ROWS, WIDTH).to(dtype))
    weight.grad = torch.randn(NUM_ROWS, WIDTH).to(dtype)
    if knob is None:
        return Case(name, weight, torch.optim.AdamW([weight], fused=True))
    return Case(name, weight, knob.make([weight], RoundingPolicy(rounding)))


def cases() -> list[Case]:
    found = [case_of("torch's fused AdamW, weights in fp32", None, torch.float32, None)]
    for name, knob in OPTIMIZERS.items():
        for format, (dtype, rounding) in FORMATS.items():
            if name not in FEW or format in ("fp32", "bf16_pure"):
                found.append(case_of(f"`optimizer={name}`, weights in {format}", knob, dtype, rounding))
    return found


def taken_ns(case: Case) -> float:
    before = time.process_time()
    case.optimizer.step()
    return 1e9 * (time.process_time() - before) / case.weight.numel()


def main(num_rounds: int = NUM_ROUNDS) -> None:
    all_cases = cases()
    for case in all_cases:
        case.optimizer.step()
    rounds = [[taken_ns(case) for case in all_cases] for _ in range(num_rounds)]
    print(f"{torch.get_num_threads()} thread, torch {torch.__version__}\n")
    print("| update | bytes per parameter | ns per parameter |\n|---|---:|---:|")
    for case, times in zip(all_cases, zip(*rounds, strict=True), strict=True):
        size = case.num_bytes() / case.weight.numel()
        print(f"| {case.name} | {size:.1f} | {median(times):.1f} ({min(times):.1f} to {max(times):.1f}) |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
