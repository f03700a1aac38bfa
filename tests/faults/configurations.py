"""Random configurations of all groups' options, and mistakes in them: no traceback, the exit code of the contract, a
row or one sentence."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from lowvram.results.row import Status
from tests.calls import TINY, TINY_RESNET
from tests.cli.test_bad_input import MISTAKES
from tests.faults.hostile_words import HOSTILE
from tests.faults.lab import Ended, Lab, Trial, tail
from tests.faults.scenarios import OWN_CODE, RUN, Scenario
from tests.faults.telling import Draw, Told

BEFORE_STEPS = re.compile(r"data: |note: |planned to need |run: started, ")
NOTHING = Scenario("nothing", (), RUN)
RARE = 0.08  # options that start more processes, or compile
USUAL = 0.12
SHARES = {
    "compile": RARE,
    "sharding": RARE,
    "task": RARE,
    "debug": RARE,
    "logger": RARE,
    "loader": USUAL,
    "sparsity": USUAL,
}
# Groups that a configuration chooses otherwise (the base, the mode), or that start whole lists of points: those are
# only composed.
OTHERWISE = ("model", "data", "mode", "paths", "local", "hydra")
COMPOSED = ("experiment", "sweep")
WITH = {  # words beside an option
    "sharding": ("sharding.ranks=1", "sharding.ranks=2"),
    "workers": ("loader.num_workers=1",),
    "adapter": ("adapter.every=1", "adapter.rank=2"),
    "sparsity": ("sparsity.every=1",),
}
FORMATS = ("safetensors", "int8", "int8_dynamic", "int4", "torch_export", "pt2e", "onnx")
NUMBERS = (0, 1, 2, 3, -1, 0.5, 1.0, 0.0, "null", "x", "[1]", "true")
VALUES: dict[str, Sequence[object]] = {
    "train.batch_size": (4, 8, 1, 6),
    "train.steps": (1, 2, 3),
    "train.eval_every": ("null", 1, 2),
    "train.log_every": (1, 2, 5),
    "snapshot.every_steps": ("null", 1, 2),
    "snapshot.keep": (1, 2),
    "measure.steps": (1, 2),
    "measure.warmup_steps": (0, 1),
    "measure.reruns": (0, 1),
    "measure.largest_tensors": ("true", "false"),
    "stepping.clip": (1.0, 0.001),
    "optimizer.lr": (0.1, 1e-9, 1e4),
    "optimizer.weight_decay": (0.0, 0.5),
    "data.eval_samples": (1, 4, 7),
    "export.merge": ("true", "false"),
    "vram": ("null", "3MiB", "12MiB", "40MiB", "1GiB"),
    "seed": (0, 1, 4294967295),
    "timeout_s": ("null", 0.05, 60),
    "name": ("null", "M1ne"),
    "device": ("cpu", "auto"),
    "plan.skip": ("true", "false"),
    "plan.host": ("null", "1MiB", "32GiB"),
}
OF_THE_MODEL = {
    TINY: {
        "model.num_layers": (1, 2, 3),
        "model.dropout": (0.0, 0.5),
        "model.tied_embeddings": ("true", "false"),
        "model.num_kv_heads": ("null", 1, 2),
        "model.embedding_width": ("null", 8),
        "model.positions": ("learned", "rotary"),
        "data.sequence_length": (1, 8, 16, 129),
    },
    TINY_RESNET: {
        "model.norm": ("batch", "group", "frozen"),
        "model.block": ("basic", "bottleneck"),
        "model.channels_last": ("true", "false"),
        "model.dropout": (0.0, 0.5),
        "data.image_size": (8, 16, 17),
    },
}


def trial(lab: Lab, draw: Draw) -> Told:
    random, number = draw.random, draw.number
    words = configuration(random)
    wanted: Sequence[str] | None = None
    if number % 4 == 3:
        table = mistakes()
        mistake, wanted = table[draw.in_turn(number // 4, len(table)) - 1]
        if random.random() < 0.5 and "--cfg" not in words:
            words, wanted = [*without_groups_of(mistake, words), *mistake], ()  # of two mistakes the other may be told
        else:
            words = [*around(mistake), *mistake]
    trial = lab.trial(NOTHING, is_planted=False)
    ended = lab.run([*words, *([] if wanted is not None else [f"hydra.run.dir={RUN}"])], trial.work)
    told = Told(shlex.join(words), [*ended.problems, *trial.held(), *trial.foreign.changed()])
    told.problems += (
        unlike_contract(trial, ended, "--cfg" in words) if wanted is None else unlike_refusal(trial, ended, wanted)
    )
    told.about += f" -> {ended.code}"
    return told


@cache
def mistakes() -> list[tuple[tuple[str, ...], Sequence[str]]]:
    """Words that are refused, and what is said of them."""
    everyday = [(tuple(words.split(" ")), parts) for words, parts in MISTAKES.items()]
    return [*everyday, *HOSTILE.items()]


def without_groups_of(mistake: tuple[str, ...], words: Sequence[str]) -> list[str]:
    """Without options that know the key of a mistake: ckpt=every1 has the `every` that ckpt=none hasn't. Nor with a
    time limit, which may be up before a mistake is found."""
    words = [word for word in words if not word.startswith("timeout_s=")]
    known = {word.partition(".")[0] for word in mistake} & set(groups())
    return [word for word in words if word.partition("=")[0].partition(".")[0] not in known]


def around(mistake: tuple[str, ...]) -> Sequence[str]:
    """The words beside a mistake: none for another model or other data, which don't know the values of those."""
    is_other = mistake in HOSTILE and any(word.startswith(("model=", "data=")) for word in mistake)
    return () if is_other else TINY


@cache
def groups() -> dict[str, Sequence[str]]:
    """Every group in conf/ from which a configuration draws, with the options that need no value."""
    from lowvram.config.defaults import CONF
    from lowvram.config.registry import ready_options

    named = re.findall(r"^  - (?:optional )?(\w+):", (CONF / "config.yaml").read_text(), re.MULTILINE)
    return {group: options for group in named if group not in OTHERWISE and (options := ready_options(group))}


def configuration(random: Random) -> list[str]:
    """Words of a point that is quickly made."""
    base = random.choice((TINY, TINY, TINY_RESNET, OWN_CODE))
    words = [*base, f"mode={random.choice(('train', 'train', 'measure', 'plan'))}"]
    for group, options in groups().items():
        if group not in COMPOSED and random.random() < SHARES.get(group, USUAL):
            option = random.choice([each for each in options if each != "wandb" and each != "both"])
            words.append(f"{group}={option}")
            words += [one for one in WITH.get(group, WITH.get(option, ())) if fits(one, group, option, random)]
            if random.random() < RARE and (keys := numbers_in(group, option)):
                words.append(f"{group}.{random.choice(keys)}={random.choice(NUMBERS)}")
    if random.random() < RARE:
        words.append(f"export.format={random.choice(FORMATS)}")
    values = {**VALUES, **OF_THE_MODEL.get(base, {})}
    for key in random.sample(sorted(values), random.randint(0, 6)):
        words.append(f"{key}={random.choice(values[key])}")
    if random.random() < RARE:
        group = random.choice(COMPOSED)
        words = [f"{group}={random.choice(groups()[group])}", "--cfg", "job"]
    return words


def fits(word: str, group: str, option: str, random: Random) -> bool:
    """Whether an option has the field of a word, by a toss of a coin."""
    from lowvram.config.registry import node_of

    return random.random() < 0.5 and word.partition("=")[0].partition(".")[2] in node_of(group, option)


@cache
def numbers_in(group: str, option: str) -> list[str]:
    """The fields of an option that hold a number, or nothing yet."""
    from lowvram.config.registry import node_of

    fields = node_of(group, option).items()
    return sorted(str(key) for key, value in fields if value is None or isinstance(value, int | float))


def unlike_contract(trial: Trial, ended: Ended, is_composed: bool) -> list[str]:
    """What is wrong with the end of a configuration: docs/command_line.md."""
    folder = trial.work / RUN
    if is_composed:
        return [f"exit code {ended.code}: {tail(ended.said)}"] if ended.code or folder.exists() else []
    if ended.code == 3:
        return refused(folder, ended)
    row = row_of(folder)
    if row is None:
        return [f"exit code {ended.code} without a row: {tail(ended.said)}"]
    status = Status(row["status"])
    problems = [] if status.exit_single == ended.code else [f"exit code {ended.code} for {status.value}"]
    may_crash = row["config"]["vram"] is not None  # docs/reliability.md: native code that gets no memory
    if status == Status.ERROR and not (may_crash and row["reason"].startswith("the process died of SIG")):
        problems.append(f"an error: {row['reason']}")
    return problems


def row_of(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    return json.loads(path.read_text()) if path.exists() else None


def refused(folder: Path, ended: Ended) -> list[str]:
    problems = [f"refused, and {folder.name} is there"] if folder.exists() else []
    # What is known only in the first step, as how many samples a layer has, is told after these.
    lines = [line for line in ended.said.splitlines() if line and not BEFORE_STEPS.match(line)]
    return problems if len(lines) == 1 else [*problems, f"no one sentence: {tail(ended.said)}"]


def unlike_refusal(trial: Trial, ended: Ended, wanted: Sequence[str]) -> list[str]:
    """What is wrong with the answer to a mistake."""
    if ended.code != 3:
        return [f"exit code {ended.code}, not refused: {tail(ended.said)}"]
    at, problems = 0, refused(trial.work / "outputs" / "run", ended)
    for part in wanted:
        at = ended.said.find(part, at)
        if at < 0:
            return [*problems, f"{part!r} isn't said: {tail(ended.said)}"]
    return problems
