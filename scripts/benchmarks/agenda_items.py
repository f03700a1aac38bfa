"""What only a card can tell, most valuable first: the items of `scripts/gpu_check agenda`.

Each item is a sweep of points, a probe (card_probes.py) or tests. `trial` items are the same with small models: for an
emulated card, and to try the agenda itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

COMMON = ("logger=none", "data=synthetic", "data.eval_samples=1", "mode=measure", "measure.reruns=0")
SHORT = ("measure.warmup_steps=1", "measure.steps=2")
LONG = ("measure.warmup_steps=2", "measure.steps=8", "measure.max_seconds=6")
OFFLOADS = {
    "none": "",
    "activations": "offload=activations",
    "activations in flight 1": "offload=activations offload.in_flight=1",
    "parameters": "offload=parameters",
    "cpu_offload": "stepping=cpu_offload",
}
SWITCHES = {
    "fp32": "",
    "precision": "precision=bf16",
    "ckpt": "precision=bf16 ckpt=every1",
    "logits": "precision=bf16 ckpt=every1 logits=tiled",
    "stepping": "precision=bf16 ckpt=every1 logits=tiled stepping=in_backward",
    "few bits": "accum=x8 precision=bf16_pure ckpt=every1 logits=tiled stepping=in_backward stepping.sums=int8 "
    "optimizer=adamw_4bit",
}

ORDER = (
    *("nine", "smallest", "smallest_resnet", "sum_kernels", "sum_steps", "context", "cudnn", "offload", "nccl"),
    *("switches", "sum_values", "flex", "flex_values", "tests"),
)


class Kind(Enum):
    """How an item is run. The values stand in the file of results."""

    POINTS = "points"  # words of train.py; each point's row is kept
    PROBE = "probe"  # the name of a probe; each line that it prints is kept
    TESTS = "tests"  # paths for pytest; the outcome of each test marked gpu is kept


@dataclass(frozen=True)
class Item:
    """One entry of the agenda.

    Args:
        limit_s: after which it is ended; what it has found by then is kept, and it runs again next time.
    """

    name: str
    about: str
    kind: Kind
    words: tuple[str, ...]
    limit_s: int


def items(is_trial: bool) -> list[Item]:
    """All of them, in their order.

    Args:
        is_trial: with models that an emulated card runs in seconds.
    """
    named = {item.name: item for item in (*points(is_trial), *probes_and_tests(is_trial))}
    return [named[name] for name in ORDER]


def points(is_trial: bool) -> list[Item]:
    small = (
        "model=transformer",
        "model.width=32",
        "model.num_heads=2",
        "model.num_layers=2",
        "data.sequence_length=16",
    )
    gpt2 = small if is_trial else ("model=gpt2", "data.sequence_length=1024")
    medium = small if is_trial else ("model=gpt2_medium", "data.sequence_length=1024")
    resnet = ("model=resnet", "data.image_size=16") if is_trial else ("model=resnet50", "data.image_size=224")
    steps = SHORT if is_trial else LONG
    eight = "train.batch_size=8"
    images = f"train.batch_size={128 if is_trial else 256}"
    grid = ("precision=fp32,bf16,fp16", "ckpt=none,every2,every1")
    of = Kind.POINTS
    return [
        Item("nine", "precision by ckpt: GPT-2, 8 x 1,024 tokens", of, (*COMMON, *steps, *gpt2, eight, *grid), 180),
        Item(
            "smallest",
            "sweep=smallest: GPT-2 medium, 32 x 1,024 tokens",
            of,
            ("sweep=smallest", *COMMON, *SHORT, *medium, "train.batch_size=32"),
            300,
        ),
        Item(
            "smallest_resnet",
            "sweep=smallest_resnet: ResNet-50, 256 images of 224 px",
            of,
            ("sweep=smallest_resnet", *COMMON, *SHORT, *resnet, images),
            240,
        ),
        Item(
            "switches",
            "one switch after another: GPT-2 medium, 8 x 1,024 tokens",
            of,
            (*COMMON, *SHORT, *medium, eight, listed(SWITCHES)),
            120,
        ),
        Item(
            "offload",
            "do copies overlap with the computation? GPT-2 medium, 8 x 1,024 tokens, bf16",
            of,
            (*COMMON, *SHORT, *medium, eight, "precision=bf16", listed(OFFLOADS)),
            120,
        ),
    ]


def listed(named: Mapping[str, str]) -> str:
    """The word of a sweep over these points."""
    points = ", ".join(f"{name}: '{words}'" for name, words in named.items())
    return f"hydra.sweeper.points={{{points}}}"


def probes_and_tests(is_trial: bool) -> list[Item]:
    size = ("trial",) if is_trial else ()
    sums = ("tests/knobs/test_stepping_sum_kernels.py", "tests/knobs/test_stepping_device_sums.py")
    everything = "tests/core/test_device.py" if is_trial else "tests"
    return [
        Item("sum_kernels", "kernels for sums of gradients: time", Kind.PROBE, ("sum_kernels", *size), 60),
        Item("sum_values", "kernels for sums of gradients: values", Kind.TESTS, sums, 90),
        Item("sum_steps", "steps with sums in few bits beside after_backward", Kind.PROBE, ("sum_steps", *size), 120),
        Item("context", "what a process takes beside its tensors", Kind.PROBE, ("context",), 40),
        Item("cudnn", "workspaces of cuDNN: convolutions of a ResNet-50", Kind.PROBE, ("cudnn", *size), 60),
        Item("nccl", "NCCL with one rank", Kind.PROBE, ("nccl", *size), 40),
        Item("flex_values", "FlexAttention: values", Kind.TESTS, ("tests/models/test_flex_attention.py",), 120),
        Item("flex", "FlexAttention beside blocks: time and memory", Kind.PROBE, ("flex", *size), 120),
        Item("tests", "all tests marked gpu", Kind.TESTS, (everything,), 400),
    ]
