"""Programs that trials disturb: tiny, and of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

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


OWN = "tests.faults.own"
OWN_CODE = (
    *("model=external", f"model.target={OWN}.Net", "data=external", f"data.target={OWN}.points", "data.eval_samples=4"),
    *("task=external", f"task.target={OWN}.Smoothed", "optimizer=external", f"optimizer.target={OWN}.Momentum"),
    *(f"callbacks=[{OWN}.Diary]", f"eval.metrics=[{OWN}.surest]", "train.batch_size=4", "logger=none", "device=cpu"),
    *("train.steps=6", "train.eval_every=3", "snapshot.every_steps=2"),
)
PICTURES = (
    *("model=resnet", "model.layers=[1,1]", "model.width=8", "data=imagefolder", "data.path=pictures"),
    *("data.image_size=8", "data.eval_samples=4", "train.batch_size=4", "train.steps=4", "snapshot.every_steps=2"),
    *("loader.cache=disk", "measure.reruns=0", "logger=none", "device=cpu"),
)
OFFLINE = ("logger=wandb",)  # offline, as tests know no key
GRAPHS = ("torch_export", "pt2e")
THEN = "@then"  # between the words of several commands
TAUGHT = "outputs/taught"
TEACHER = (*SHORT, "hydra.run.dir=outputs/teacher")
TEACHING = (*SHORT, "mode=teach", "task=distill", "task.teacher=outputs/teacher", "task.top=4")


@dataclass(frozen=True)
class Scenario:
    """A command, and how to go on with it."""

    name: str
    words: tuple[str, ...]
    folder: str  # that it writes in
    before: tuple[str, ...] | None = None  # a command that was there earlier, or several
    is_timed: bool = False  # which points it makes depends on how fast they are
    resumes: bool = False  # a run that was disturbed goes on with resume=, a sweep with the same words
    num_programs: int = 1  # that torchrun starts, each a rank


def training(name: str, words: tuple[str, ...]) -> Scenario:
    return Scenario(f"train {name}".strip(), (*TRAINING, *words, f"hydra.run.dir={RUN}"), RUN, resumes=True)


def own(name: str, *words: str) -> Scenario:
    """A training run of code that isn't lowvram's."""
    return Scenario(name, (*OWN_CODE, *words, f"hydra.run.dir={RUN}"), RUN, resumes=True)


def exporting(option: str) -> Scenario:
    return training(option, (f"export.format={option}", "train.steps=2", "qat=int8" if option == "int8" else "seed=0"))


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
    own("own"),
    own("own drawing", f"model.target={OWN}.Drawing"),
    own("own freezing", f"model.target={OWN}.Freezing"),
    own("own torch", "optimizer.target=torch.optim.NAdam", f"callbacks=[{OWN}.Diary]", "ckpt=every1"),
    training("tensorboard", ("logger=tensorboard",)),
    training("wandb", OFFLINE),
    Scenario("images", (*PICTURES, f"hydra.run.dir={RUN}"), RUN, ("@pictures", "pictures"), resumes=True),
    exporting("int8"),
    exporting("int4"),
    exporting("int8_dynamic"),
    Scenario("teach", (*TEACHING, f"hydra.run.dir={RUN}"), RUN, TEACHER, resumes=True),
    Scenario(
        "prune", (*SHORT, "mode=prune", "prune.run=outputs/teacher", f"hydra.run.dir={RUN}"), RUN, TEACHER, resumes=True
    ),
    Scenario(
        "grow", (*SHORT, "mode=grow", "grow.run=outputs/teacher", f"hydra.run.dir={RUN}"), RUN, TEACHER, resumes=True
    ),
]
READING = [  # programs that read what an earlier one has left, for flips.py alone
    Scenario(
        "resume wandb", (f"resume={RUN}", "train.steps=8"), RUN, training("wandb", (*OFFLINE, "train.steps=4")).words
    ),
    *(
        Scenario(f"load {option}", ("@load", f"{RUN}/model", option), RUN, exporting(option).words)
        for option in GRAPHS
        if option != "pt2e" or find_spec("torchao")
    ),
    Scenario("resume own", (f"resume={RUN}", "train.steps=8"), RUN, own("own").words, resumes=True),
    Scenario("load int8", ("@load", f"{RUN}/model"), RUN, exporting("int8").words),
    Scenario("load int4", ("@load", f"{RUN}/model"), RUN, exporting("int4").words),
    Scenario(
        "images again",
        (*PICTURES, "hydra.run.dir=outputs/again"),
        "cache/images",
        ("@pictures", "pictures", THEN, *PICTURES, f"hydra.run.dir={RUN}"),
    ),
    Scenario(
        "learn",
        (*SHORT, "task=distill", f"task.cache={TAUGHT}", "hydra.run.dir=outputs/learnt"),
        TAUGHT,
        (*TEACHER, THEN, *TEACHING, f"hydra.run.dir={TAUGHT}"),
    ),
    Scenario("sweep again", ("-m", *SHORT, "seed=0,1,2", f"hydra.sweep.dir={SWEEP}"), SWEEP, SWEPT),
    Scenario("load", ("@load", f"{RUN}/model"), RUN, (*TRAINING, f"hydra.run.dir={RUN}")),
    Scenario("table", ("@table", SWEEP), SWEEP, SWEPT),
    Scenario(
        "plan again", (*PLANNING, "hydra.run.dir=outputs/again"), "cache/traces", (*PLANNING, f"hydra.run.dir={RUN}")
    ),
    Scenario(
        "fidelity again",
        ("-m", *FAITHFUL, "ckpt=none,every1", f"hydra.sweep.dir={SWEEP}"),
        SWEEP,
        ("-m", *FAITHFUL, "ckpt=none", f"hydra.sweep.dir={SWEEP}"),
    ),
]
CHOOSING = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "optimized_metric=loss.eval")
if find_spec("optuna"):
    ALL.append(swept("optuna", *SHORT, *CHOOSING, "ckpt=none,every1"))
DDP, FSDP = ("sharding=ddp", "sharding.ranks=2"), ("sharding=fsdp", "sharding.ranks=2")
RANKS = [
    training("ddp", DDP),
    training("fsdp", (*FSDP, "model.dropout=0.2")),
    training("fsdp shards", (*FSDP, "snapshot.sharded_above_gib=0")),
    training("ddp parts", (*DDP, "accum=x2", "snapshot.every_steps=1")),
    training("fsdp lean", (*FSDP, "optimizer=sgd", "ckpt=every1", "snapshot.keep=1")),
    resuming("ddp", DDP),
    resuming("fsdp", FSDP),
    Scenario("sweep ranks", ("-m", *SHORT, "sharding=ddp,fsdp", "sharding.ranks=2", f"hydra.sweep.dir={SWEEP}"), SWEEP),
    replace(training("torchrun ddp", ("sharding=ddp",)), num_programs=2),
    replace(training("torchrun fsdp", ("sharding=fsdp",)), num_programs=2),
]
BY_NAME = {scenario.name: scenario for scenario in (*ALL, *READING, *RANKS)}
