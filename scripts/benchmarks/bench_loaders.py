"""Padded, bucketed and packed batches of the same texts: padding, real tokens per second, and whether losses agree.

    scripts/python scripts/benchmarks/bench_loaders.py [rounds] [to=PAGE.md]

The texts are the docstrings of Python's own library, one a sample. Each contestant trains a model of its own, with the
same initial weights; they take turns, step by step, in one process. Rates are told as a median with its spread over
rounds, and as ratios to the padded batches of the same round: on a shared machine a ratio of neighbours means more.
"""

from __future__ import annotations

import ast
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the fork server; threads that spin disturb each other

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from lowvram.config.identity import ROOT
from lowvram.config.schema import build
from lowvram.core.assemble import assemble
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.batch_sizes import SameSize
from lowvram.data.documents import Documents, as_documents
from lowvram.data.loader import Loader
from lowvram.data.python_source import library_files
from lowvram.data.source import Data
from lowvram.data.tokenizer import Bytes
from lowvram.knobs.optimizer import AdamW
from lowvram.knobs.stepping import AfterBackward
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto, Problem

CPU = torch.device("cpu")
BATCH_SIZE, LENGTH = 32, 512
LOADERS = ("inline", "bucketed", "packed")
WARMUP_STEPS = 2
FROZEN_STEPS = 20


@final
@dataclass
class Contestant:
    """One loader, and what its steps were like."""

    name: str
    data: Data
    problem: Problem
    batches: Iterator[Part]
    losses: list[float] = field(default_factory=list)
    token_counts: list[tuple[int, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        knobs = {"AdamW": AdamW(), "AfterBackward": AfterBackward()}
        self.rig = assemble(self.problem, knobs, CPU)

    def step(self) -> None:
        """A step, with the making of its batch."""
        began = time.perf_counter()
        batch = next(self.batches)
        loss, _ = step(self.rig, batch)
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - began)
        num_tokens, num_places = self.problem.token_counts(batch).tolist()
        self.token_counts.append((num_tokens, num_places))

    def loss(self, batch: Part) -> float:
        """The mean over the targets, at the weights as they are."""
        return (self.problem.criterion(self.rig.forward(batch), batch) / self.problem.num_targets(batch)).item()

    @property
    def padding(self) -> float:
        num_tokens, num_places = map(sum, zip(*self.token_counts, strict=True))
        return 1 - num_tokens / num_places

    def rates(self) -> list[float]:
        """Real tokens per second of each round, which is two steps."""
        tokens = [num_tokens for num_tokens, _ in self.token_counts]
        pairs = range(WARMUP_STEPS, len(tokens), 2)
        return [sum(tokens[each : each + 2]) / sum(self.seconds[each : each + 2]) for each in pairs]


def option(group: str, name: str) -> DictConfig:
    node = OmegaConf.load(ROOT / "conf" / group / f"{name}.yaml")
    assert isinstance(node, DictConfig)
    return node


def contestant(name: str, texts: Data) -> Contestant:
    config = build(option("model", "transformer"), "model")
    assert isinstance(config, TransformerConfig)
    model, loader = replace(config, context=LENGTH), build(option("loader", name), "loader")
    assert isinstance(loader, Loader)
    data = loader.fit(texts, model)
    batches = loader.batches(data.train, SameSize(BATCH_SIZE), 0, 0, CPU)
    return Contestant(name, data, Auto().pose(model, data.spec), batches)


def docstrings() -> Data:
    """Those of Python's own library, as bytes."""
    found = [
        np.frombuffer(f"{text}\n".encode(), np.uint8) for path in library_files().values() for text in within(path)
    ]
    lengths = np.array([len(text) for text in found])
    samples = Documents(lambda text: [found[text]], lengths, LENGTH, pad_id=0)
    return as_documents(samples, samples, Bytes(), "docstrings of Python's library")


def within(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@torch.no_grad()
def largest_difference(texts: Data) -> float:
    """Between the losses of padded and of packed batches, at the same weights."""
    padded, packed = (contestant(name, texts) for name in ("inline", "packed"))
    losses = [[each.loss(next(each.batches)) for _ in range(FROZEN_STEPS)] for each in (padded, packed)]
    return max(abs(one - other) for one, other in zip(*losses, strict=True))


def spread(values: list[float], digits: int) -> str:
    low, *_, high = statistics.quantiles(values, n=20)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def report(texts: Data, found: list[Contestant], rounds: int) -> str:
    padded, packed = found[0], found[2]
    lines = [
        "# Loaders of texts of uneven lengths",
        "",
        f"`scripts/benchmarks/bench_loaders.py {rounds}`, pinned to a core: torch {torch.__version__},",
        f"{torch.get_num_threads()} thread. {texts.description.rpartition(';')[0]};",
        f"batches of {BATCH_SIZE}; the model of `model=transformer` with a context of {LENGTH}, AdamW, fp32.",
        f"{rounds} rounds, in which the loaders take turns: medians over rounds, and 5 to 95 % of them.",
        "",
        "| loader | padding | real tokens/s | against inline |",
        "|---|---:|---:|---:|",
    ]
    for each in found:
        ratios = [mine / theirs for mine, theirs in zip(each.rates(), padded.rates(), strict=True)]
        cells = f"{100 * each.padding:.1f} % | {spread(each.rates(), 0)} | {spread(ratios, 2)}"
        lines.append(f"| `{each.name}` | {cells} |")
    first = max(abs(one - other) for one, other in zip(padded.losses[:10], packed.losses[:10], strict=True))
    lines += [
        "",
        "The batches of `packed` and `inline` hold the same texts. With the initial weights the losses of",
        f"{FROZEN_STEPS} of them differ by at most {largest_difference(texts):.1e}; over the first 10 steps,",
        f"in which each trains a model of its own, by {first:.1e}.",
        "(Later rounding grows, as between any two orders of summing.)",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    words = sys.argv[1:]
    page = next((word.removeprefix("to=") for word in words if word.startswith("to=")), None)
    rounds = next((int(word) for word in words if word.isdigit()), 20)
    texts = docstrings()
    found = [contestant(name, texts) for name in LOADERS]
    for each in found:
        for _ in range(WARMUP_STEPS):
            each.step()
    for _ in range(rounds):
        for each in (*found, *reversed(found)):
            each.step()
    text = report(texts, found, rounds)
    print(text, end="")
    if page:
        Path(page).write_text(text)


if __name__ == "__main__":
    main()
