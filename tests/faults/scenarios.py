"""Programs that trials disturb: tiny, and of every kind."""

from __future__ import annotations

from dataclasses import dataclass

from tests.calls import TINY

TRAINING = (*TINY, "device=cpu", "train.steps=6", "train.eval_every=3", "snapshot.every_steps=2")
MEASURING = (*TINY, "device=cpu", "mode=measure", "measure.warmup_steps=1", "measure.steps=2")
RUN, SWEEP = "outputs/run", "outputs/sweep"
SHORT = (*TRAINING, "train.steps=3")
SWEPT = ("-m", *SHORT, "seed=0,1", f"hydra.sweep.dir={SWEEP}")
SEARCHING = (*MEASURING, "mode=search", "search.groups=[ckpt,accum]", "vram=20MiB", "search.probes=2")
PLANNING = (*MEASURING, "mode=plan")
FAITHFUL = (*MEASURING, "measure.fidelity=true", "measure.fidelity_steps=2")
FLAVOURS = {  # of a training run: other optimizers, other ways to hold and save what they hold
    "": (),
    "dropout": ("model.dropout=0.2", "seed=3"),
    "sgd": ("optimizer=sgd", "stepping=in_backward", "ckpt=every1"),
    "parts": ("accum=x2", "schedule=warmup_cosine", "snapshot.keep=1"),
    "every": ("snapshot.every_steps=1", "train.log_every=2", "train.eval_every=2"),
    "lean": ("precision=bf16_pure", "optimizer=adafactor"),
}


@dataclass(frozen=True)
class Scenario:
    """A command, and how to go on with it."""

    name: str
    words: tuple[str, ...]
    folder: str  # that it writes in
    before: tuple[str, ...] | None = None  # a command that was there earlier
    is_timed: bool = False  # which points it makes depends on how fast they are
    resumes: bool = False  # a run that was disturbed goes on with resume=, a sweep with the same words


def training(name: str, words: tuple[str, ...]) -> Scenario:
    return Scenario(f"train {name}".strip(), (*TRAINING, *words, f"hydra.run.dir={RUN}"), RUN, resumes=True)


def resuming(name: str, words: tuple[str, ...]) -> Scenario:
    """A finished run of four steps gets more."""
    before = (*TRAINING, *words, "train.steps=4", f"hydra.run.dir={RUN}")
    return Scenario(f"resume {name}".strip(), (f"resume={RUN}", "train.steps=8"), RUN, before, resumes=True)


def swept(name: str, *words: str) -> Scenario:
    return Scenario(name, ("-m", *words, f"hydra.sweep.dir={SWEEP}"), SWEEP)


ALL = [
    *(training(name, words) for name, words in FLAVOURS.items()),
    *(resuming(name, words) for name, words in FLAVOURS.items()),
    Scenario("sweep", SWEPT, SWEEP),
    swept("sweep of one", *TRAINING),
    swept("measure", *MEASURING, "ckpt=none,every1"),
    swept("fidelity", *FAITHFUL),
    swept("reruns", *MEASURING, "measure.reruns=1", "measure.steps=4", "name=stall@4"),
    swept("auto", *TRAINING, "train.batch_size=128", "data.sequence_length=128", "vram=34MiB", "accum=auto"),
    Scenario("search", ("-m", *SEARCHING, f"hydra.sweep.dir={SWEEP}"), SWEEP, is_timed=True),
    swept("plan", *PLANNING),
]
READING = [  # programs that read what an earlier one has left, for flips.py alone
    Scenario("sweep again", ("-m", *SHORT, "seed=0,1,2", f"hydra.sweep.dir={SWEEP}"), SWEEP, SWEPT),
    Scenario("load", ("@load", f"{RUN}/model"), RUN, (*TRAINING, f"hydra.run.dir={RUN}")),
    Scenario("table", ("@table", SWEEP), SWEEP, SWEPT),
    Scenario("plan again", (*PLANNING, "hydra.run.dir=outputs/again"), "cache", (*PLANNING, f"hydra.run.dir={RUN}")),
    Scenario(
        "fidelity again",
        ("-m", *FAITHFUL, "ckpt=none,every1", f"hydra.sweep.dir={SWEEP}"),
        SWEEP,
        ("-m", *FAITHFUL, "ckpt=none", f"hydra.sweep.dir={SWEEP}"),
    ),
]
BY_NAME = {scenario.name: scenario for scenario in (*ALL, *READING)}
