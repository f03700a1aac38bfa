"""Our step against a hand-written PyTorch loop: same model, batch and knobs, interleaved in one process.

    scripts/python scripts/benchmarks/bench_step.py [rounds]

Prints the ratio of times (ours / by hand) as a median with its spread over rounds. A time alone means nothing on a
shared machine; a ratio of neighbours does.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the fork server; threads that spin disturb each other

import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowvram.config.identity import ROOT
from lowvram.config.schema import build
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.accum import Parts
from lowvram.knobs.ckpt import RecomputeEvery
from lowvram.knobs.optimizer import AdamW
from lowvram.knobs.precision import Bf16, Fp32
from lowvram.knobs.stepping import AfterBackward
from lowvram.tasks import Auto, Problem

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One model with one set of knobs, for both contestants."""

    name: str
    model: str
    spec: DataSpec
    batch_size: int
    bf16: bool = False
    parts: int = 1
    every: int | None = None
    clip: float | None = None

    def problem(self) -> Problem:
        model = build(DictConfig(OmegaConf.load(ROOT / "conf" / "model" / f"{self.model}.yaml")), "model")
        return Auto().pose(model, self.spec)

    def knobs(self) -> dict[str, Knob]:
        knobs: list[Knob] = [Bf16() if self.bf16 else Fp32(), AdamW(), AfterBackward(clip=self.clip)]
        knobs += [Parts(self.parts)] if self.parts > 1 else []
        knobs += [RecomputeEvery(self.every)] if self.every else []
        return {type(knob).__name__: knob for knob in knobs}

    def batch(self) -> Part:
        shape, classes = (self.batch_size, *self.spec.shape), self.spec.num_classes
        if self.spec.modality is Modality.TOKENS:
            return Part(torch.randint(classes, shape), torch.randint(classes, shape))
        return Part(torch.randn(shape), torch.randint(classes, shape[:1]))


def tokens(length: int) -> DataSpec:
    return DataSpec(Modality.TOKENS, 256, (length,))


IMAGES = DataSpec(Modality.IMAGES, 42, (3, 64, 64))
CASES = (
    Case("transformer", "transformer", tokens(128), 8),
    Case("transformer, bf16, x4, clip", "transformer", tokens(128), 8, bf16=True, parts=4, clip=1.0),
    Case("transformer, every1", "transformer", tokens(128), 8, every=1),
    Case("resnet", "resnet", IMAGES, 8),
    Case("resnet, x2, clip", "resnet", IMAGES, 8, parts=2, clip=1.0),
)


def by_hand(case: Case, batch: Part) -> Callable[[], Tensor]:
    """What one would write without any framework."""
    model = plain_model(case)
    decay = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    keep = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": keep, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    pieces = list(zip(batch.inputs.chunk(case.parts), batch.targets.chunk(case.parts), strict=True))

    def one_step() -> Tensor:
        total = torch.zeros(())
        for inputs, targets in pieces:
            with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                loss = F.cross_entropy(model(inputs).flatten(0, -2).float(), targets.flatten()) / case.parts
            loss.backward()
            total += loss.detach()
        if case.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return one_step


def plain_model(case: Case) -> nn.Module:
    """The same model with the same weights, with blocks recomputed the way the tutorials do."""
    model = assemble(case.problem(), {"AdamW": AdamW(), "AfterBackward": AfterBackward()}, CPU).model
    for block in case.problem().structure(model).blocks[:: case.every] if case.every else ():
        inner = block.forward
        block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    return model


def ours(case: Case, batch: Part) -> Callable[[], Tensor]:
    rig: Rig = assemble(case.problem(), case.knobs(), CPU)
    return lambda: step(rig, batch)[0]


def time_ms(one_step: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    one_step()
    return 1e3 * (time.perf_counter() - began)


def compare(case: Case, rounds: int) -> str:
    """One line: both medians, and the ratio over rounds that go ours, hand, hand, ours."""
    torch.manual_seed(0)
    batch = case.batch()
    mine, hand = ours(case, batch), by_hand(case, batch)
    differences = [abs(mine().item() - hand().item()) for _ in range(3)]
    pairs = []
    for _ in range(rounds):
        first, second, third, fourth = time_ms(mine), time_ms(hand), time_ms(hand), time_ms(mine)
        pairs.append((first + fourth, second + third))
    low, *_, high = statistics.quantiles((a / b for a, b in pairs), n=20)
    middle = statistics.median(a / b for a, b in pairs)
    ours_ms, hand_ms = (statistics.median(pair[i] for pair in pairs) / 2 for i in (0, 1))
    times = f"{ours_ms:7.2f} {hand_ms:7.2f} ms   ratio {middle:.3f} (p05 {low:.3f}, p95 {high:.3f})"
    return f"{case.name:30} {times}   loss differs by {max(differences):.1e}"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds of ours, hand, hand, ours")
    print(f"{'':30} {'ours':>7} {'hand':>7}")
    for case in CASES:
        print(compare(case, rounds), flush=True)


if __name__ == "__main__":
    main()
