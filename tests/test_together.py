"""Knobs that nobody else has working together: real points, against the same point with the plain loop in their place.

All other pairs: scripts/pages/compatibility.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.calls import TINY, TINY_RESNET, Outcome, history

MODELS = {"transformer": TINY, "resnet": (*TINY_RESNET, "model.norm=group")}
STEPS = ("train.steps=6", "train.batch_size=8")
SAME = 1e-5  # relative: other orders of sums, after six steps of AdamW in fp32
HALF = 2e-2  # weights or products of 16 bits
FEW_BITS = 2e-2  # states of 8 or 4 bits

CLIP, PARTS, AGAIN, CHUNKED = "stepping.clip=0.5", "accum=x4", "ckpt=every1", "logits=chunked"
FP16 = "precision=fp16 precision.init_scale=1048576"  # the first steps overflow
SCHEDULE = "schedule=warmup_cosine"
ALL = f"{CLIP} {PARTS} {AGAIN} {CHUNKED} {FP16} {SCHEDULE}"
EACH = (CLIP, PARTS, FP16, SCHEDULE, AGAIN, CHUNKED, ALL)
TWO = "sharding=fsdp sharding.ranks=2"

CASES: list[tuple[str, str, float]] = [  # what is tried, what it replaces nothing of, relative tolerance of losses
    *(("stepping=in_backward", words, SAME) for words in EACH),
    *(("stepping=in_backward stepping.norm=two_passes", words, SAME) for words in (CLIP, FP16)),
    *(("stepping=cpu_offload", words, SAME) for words in EACH),
    *((f"optimizer=adamw_{bits}bit", words, FEW_BITS) for bits in (8, 4) for words in (PARTS, AGAIN)),
    *((f"optimizer=adamw_{bits}bit name=Compiled", PARTS, FEW_BITS) for bits in (8, 4)),
    ("logits=chunked", "precision=bf16 model.tied_embeddings=true", 2e-3),
    ("offload=activations", "ckpt=every2", 0.0),
    ("compile=blocks", f"ckpt=every2 {PARTS}", 1e-4),  # in one: each graph takes seconds to compile
    ("compile=blocks", "precision=bf16", 5e-3),
    *((TWO, words, 1e-4) for words in (PARTS, "ckpt=every2", CLIP, CHUNKED)),
    (f"{TWO} stepping=in_backward", CLIP, 1e-4),
    (TWO, "precision=bf16", 5e-3),
    *(("precision=bf16_pure", words, HALF) for words in ("optimizer=adamw", "optimizer=sgd optimizer.lr=0.01")),
    ("precision=bf16_pure optimizer=adamw_8bit", "", HALF),
    *((f"precision=bf16_pure stepping={stepping}", "", HALF) for stepping in ("in_backward", "cpu_offload")),
]

_plain: dict[tuple[str, ...], Outcome] = {}  # what several are compared with


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tried", "both", "tolerance"), CASES)
def test_together_they_train_as_the_plain_loop_does(
    tried: str, both: str, tolerance: float, model: str, call: Callable[..., Outcome]
) -> None:
    if model == "resnet" and "tied" in both:
        both = both.split()[0]
    words = (*MODELS[model], *STEPS, *both.split())
    plain = _plain[words] = _plain.get(words) or call(*words)
    found = call(*words, *tried.split())
    assert (plain.code, found.code) == (0, 0), found.said()
    assert found.row["precision"] == plain.row["precision"]  # the scale, and how many steps it skipped
    for name in ("loss/train", "loss/eval"):
        assert values(found, name) == pytest.approx(values(plain, name), rel=tolerance, abs=0)
    assert both != FP16 or plain.row["precision"]["skipped_steps"] > 0


def values(outcome: Outcome, name: str) -> list[float]:
    """All that a run has logged under one name."""
    return [line[name] for line in history(outcome.folder) if name in line]
