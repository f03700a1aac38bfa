"""Compiled points run to their end in an ordinary child process on the emulated device. Triton's kernels write zeros
there (compiled.py), so no value is asserted, only the way through the program, and the memory against the plan and
another point. precision=fp8, which isn't compiled, has values: test_options.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lowvram.results.columns import value_at
from lowvram.results.row import Row
from tests.calls import TINY, Outcome, history, read_row
from tests.laboratory import IS_EMULATED

Call = Callable[..., Outcome]
pytestmark = [pytest.mark.emulated, pytest.mark.skipif(not IS_EMULATED, reason="not the emulated device")]
MEASURED = ("mode=measure", "measure.warmup_steps=1", "measure.steps=2", "device=cuda")
PLAIN = str.maketrans("= ", "__")  # for the name of a folder
AS_PLANNED = 0.2  # plans are those of the same point without a compiler
MANY_WEIGHTS = ("model.width=256",)
MANY_ACTIVATIONS = ("model.num_layers=2", "data.sequence_length=128", "train.batch_size=16")
PEAK, STATE = "memory.steady_peak_bytes", "memory.by_kind.optimizer"  # steady: once everything is compiled
POINTS: dict[str, tuple[tuple[str, ...], tuple[str, str] | None]] = {  # and what is less than at another point
    "compile=blocks": (MANY_ACTIVATIONS, None),
    "compile=model": (MANY_ACTIVATIONS, None),
    "compile=torchscript": (MANY_ACTIVATIONS, None),
    "compile=blocks ckpt=compiler": (MANY_ACTIVATIONS, (PEAK, "compile=blocks")),
    "model.window=20 model.local_kernel=flex": (MANY_ACTIVATIONS, None),
    "optimizer=adamw_8bit": (MANY_WEIGHTS, (STATE, "optimizer=adamw")),
    "optimizer=adamw_4bit": (MANY_WEIGHTS, (STATE, "optimizer=adamw")),
    "precision=fp8": (
        MANY_ACTIVATIONS,
        None,
    ),  # not compiled: scales without values end in gradients that are not finite
}


def measured(call: Call, words: tuple[str, ...], options: str) -> Row:
    outcome = call(*TINY, *MEASURED, *words, *options.split(), f"hydra.run.dir={options.translate(PLAIN)}")
    assert outcome.code == 0, outcome.said()
    assert sum("loss/train" in line for line in history(outcome.folder)) == 3  # one of them warm-up
    return read_row(outcome.folder)


def figure(row: Row, path: str) -> float:
    value = value_at(row, path)
    assert value is not None
    return value


@pytest.mark.parametrize("options", POINTS)
def test_a_compiled_point_runs_to_its_end(
    call: Call, options: str, record_property: Callable[[str, object], None]
) -> None:
    words, less = POINTS[options]
    row = measured(call, words, options)
    assert row["status"] == "ok"
    assert row["memory"]["source"] == "cuda_allocator"
    assert figure(row, PEAK) == pytest.approx(row["plan"]["allocated_bytes"], rel=AS_PLANNED)
    if less is not None:
        path, other = less
        assert figure(row, path) < figure(measured(call, words, other), path)
    record_property("points", 1)
