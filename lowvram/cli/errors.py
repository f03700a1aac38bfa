"""Errors in what was typed, each as one sentence. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import traceback
from collections.abc import Iterable

from hydra.errors import OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from lowvram.compat.hydra import args_parser
from lowvram.config.errors import BadInput, Refused
from lowvram.config.secret import text_without_secrets
from lowvram.config.settings import GROUPS, PARENT_ONLY, ROOT_KEYS, SECTIONS
from lowvram.config.texts import LONGEST_REASON, shortened
from lowvram.results.terminal import hydra_quoted

# Names that other tools use -> what to type here.
ELSEWHERE = {
    "lr": "the learning rate is optimizer.lr",
    "learning_rate": "the learning rate is optimizer.lr",
    "momentum": "it is optimizer.momentum with optimizer=sgd",
    "weight_decay": "it is optimizer.weight_decay",
    "epochs": "training is counted in updates: train.steps",
    "num_train_epochs": "training is counted in updates: train.steps",
    "max_steps": "it is train.steps",
    "steps": "it is train.steps",
    "batch_size": "the logical batch is train.batch_size; accum=x4 runs it in 4 parts",
    "per_device_train_batch_size": "the logical batch is train.batch_size; accum=x4 runs it in 4 parts",
    "gradient_accumulation_steps": "choose accum=x2 (… x32): the logical batch stays train.batch_size",
    "accumulate_grad_batches": "choose accum=x2 (… x32): the logical batch stays train.batch_size",
    "auto_find_batch_size": "choose accum=auto: the logical batch stays, its parts shrink until they fit",
    "auto_scale_batch_size": "choose accum=auto: the logical batch stays, its parts shrink until they fit",
    "gradient_checkpointing": "choose ckpt=every1 (or every2 … every4)",
    "activation_checkpointing": "choose ckpt=every1 (or every2 … every4)",
    "bf16": "choose precision=bf16",
    "fp16": "choose precision=fp16",
    "tf32": "choose precision=tf32",
    "amp": "choose precision=bf16 or precision=fp16",
    "mixed_precision": "choose precision=bf16 or precision=fp16",
    "optim": "choose optimizer=adamw or optimizer=sgd",
    "max_grad_norm": "it is stepping.clip",
    "gradient_clip_val": "it is stepping.clip",
    "clip": "it is stepping.clip",
    "lr_scheduler_type": "choose schedule=cosine (or constant, warmup_cosine)",
    "num_workers": "choose loader=workers; their number is loader.num_workers",
    "dataloader_num_workers": "choose loader=workers; their number is loader.num_workers",
    "group_by_length": "choose loader=bucketed",
    "packing": "choose loader=packed",
    "max_length": "it is data.sequence_length",
    "sequence_length": "it is data.sequence_length",
    "image_size": "it is data.image_size",
    "dropout": "it is model.dropout",
    "dataset": "choose data=text data.path=… (or imagefolder, synthetic, …)",
    "gpu": "choose device=cuda",
    "gpus": "choose device=cuda",
    "num_gpus": "choose sharding=ddp or sharding=fsdp; their number is sharding.ranks",
    "devices": "choose sharding=ddp or sharding=fsdp; their number is sharding.ranks",
    "ranks": "choose sharding=ddp or sharding=fsdp; their number is sharding.ranks",
    "world_size": "choose sharding=ddp or sharding=fsdp; their number is sharding.ranks",
    "nproc_per_node": "choose sharding=ddp or sharding=fsdp; their number is sharding.ranks",
    "num_processes": "choose sharding=ddp or sharding=fsdp; their number is sharding.ranks",
    "accelerator": "choose device=cuda or device=cpu",
    "memory": "the memory that a point may use is vram=8GiB",
    "output_dir": "it is paths.outputs",
    "resume_from_checkpoint": "it is resume=last or resume=FOLDER",
}
PRESETS = ("experiment", "sweep", "debug", "local")  # groups whose options are whole configurations
ONE_OF = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")  # flags that exclude each other
UNFIT = "Hydra has no such value for it; `python train.py --cfg hydra` shows what it has"
SNAPSHOT_HINT = "ckpt is activation checkpointing; saved training state is a snapshot: resume=last or resume=FOLDER"


def sentence(error: Exception) -> str:
    """What is wrong and how to mend it, in one sentence."""
    cause = cause_of_ours(error)
    if isinstance(cause, BadInput):
        hint = ELSEWHERE.get(cause.key)  # a root key that nobody knows, forced in with +
        return f"{cause.key}: no such key; {hint}" if hint else str(cause)
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    for pattern, translate in PATTERNS.items():
        if match := re.search(pattern, str(error), re.DOTALL):
            return translate(match)
    text = " ".join(str(error).split("\n    ")[0].split())
    return f"{error.full_key}: {text}" if isinstance(error, OmegaConfBaseException) and error.full_key else text


def unforeseen(error: Exception) -> str:
    """The first line of an error that isn't a mistake in what was typed."""
    text = "".join(traceback.format_exception_only(error)).splitlines()[0]
    return shortened(text_without_secrets(text), LONGEST_REASON)


def sorted_words(words: list[str]) -> list[str]:
    """Hydra's own flags before the overrides: argparse can't read `a=1 -m b=1,2`.

    Raises:
        Refused: an unknown flag, flags that exclude each other, or a group without an option.
    """
    parser = args_parser()
    parser.exit_on_error = False
    try:
        known, unknown = parser.parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
        raise Refused(str(error)) from None
    if unknown:
        raise Refused(unknown_flag(unknown[0]))
    check_flags(known)
    for override in known.overrides:
        check_override(override)
    return [*(word for word in words if word not in known.overrides), *known.overrides]


def check_flags(known: argparse.Namespace) -> None:
    """Raises Refused for flags that Hydra can't combine."""
    typed = [flag for flag in ONE_OF if getattr(known, flag[2:].replace("-", "_"))]
    if len(typed) > 1:
        hint = "; --cfg shows one configuration: type one value for each key" if known.multirun and known.cfg else ""
        raise Refused(f"{' '.join(typed)}: must be typed one without the other{hint}")
    if known.resolve and not known.cfg:
        raise Refused("--resolve: must be typed with --cfg job")


def unknown_flag(word: str) -> str:
    """The sentence for a flag that Hydra doesn't have."""
    key, equals, _ = word.lstrip("-").partition("=")
    hint = ELSEWHERE.get(key.replace("-", "_"))
    if hint is None:
        hint = f"type {word.lstrip('-')}, without dashes" if equals else "--help shows them all"
    return f"{word}: no such flag; {hint}"


def check_override(word: str) -> None:
    """Raises Refused for words where Hydra's own message doesn't name the word."""
    key, _, value = word.partition("=")
    if not key:
        raise Refused(unreadable(word))
    if key in (*GROUPS, *PARENT_ONLY, *PRESETS) and re.fullmatch(r"(null|true|false|[\d.]+)", value, re.IGNORECASE):
        raise Refused(f"{word}: must be an option of the group {key}; without the word it keeps its default")


def cause_of_ours(error: BaseException | None) -> BaseException | None:
    """The BadInput that Hydra or OmegaConf has wrapped, if there is one."""
    while error is not None and not isinstance(error, BadInput):
        error = error.__cause__ or error.__context__
    return error


def unknown_option(match: re.Match[str]) -> str:
    """Hydra could not find a file of a group."""
    path, listed = (
        match[1].removeprefix("hydra/"),
        re.search(r"Available options in '[^']*':(.*?)Config search path", match.string, re.DOTALL),
    )
    group, _, option = path.partition("/")
    options = listed[1].split() if listed else []
    group = f"hydra/{group}" if path != match[1] else group
    if group == "ckpt" and "/" in option:
        return f"{group}={option}: {SNAPSHOT_HINT}"
    known = f"must be one of {', '.join(options)}" if options else f"the group {group} has no such option"
    return f"{group}={option}: {known}{closest(option, options)}"


def unknown_key(match: re.Match[str]) -> str:
    """Hydra could not override a key that isn't there."""
    key = match[1].lstrip("+~")
    last = key.rpartition(".")[2]
    hint = ELSEWHERE.get(last)
    if hint and not ("." in key and key in hint):  # a key that the hint names exists with another option
        return f"{key}: no such key; {hint}"
    section, _, _ = key.rpartition(".")
    if section in SECTIONS:
        return f"{key}: {section} has no such key, it knows {', '.join(SECTIONS[section].__dataclass_fields__)}"
    known = f"{section} has no such key" if section else f"no such key or group{closest(key, [*GROUPS, *ROOT_KEYS])}"
    return f"{key}: {known}; `python train.py --cfg job` shows them all"


def ambiguous(match: re.Match[str]) -> str:
    """A list of values without -m."""
    key, _, value = match[1].partition("=")
    return f"{key}={value}: has several values; add -m to sweep over them, or quote it for Hydra: {quoted(key, value)}"


def unreadable(override: str | None) -> str:
    """A word that Hydra's grammar doesn't know."""
    key, equals, value = (override or "").partition("=")
    if not (key and equals):
        return f"{override}: must be key=value, such as precision=bf16"
    return f"{override}: Hydra can't read this value; quote it: {quoted(key, value)}"


def quoted(key: str, value: str) -> str:
    """An override as it must be typed in a shell, its value quoted for Hydra too."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return shlex.quote(f"{key}={hydra_quoted(value[1:-1] if is_quoted else value)}")


def closest(word: str, choices: Iterable[str]) -> str:
    """A guess at what was meant."""
    matches = difflib.get_close_matches(word, list(choices), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def chosen_twice(match: re.Match[str]) -> str:
    """A group of which two options were typed."""
    return f"{match[1]}: the group has one option; type {match[1]}=… once, without +"


PATTERNS = {
    r"Could not find '([^']+)'": unknown_option,
    r"Could not override '([^']+)'": unknown_key,
    r"Could not delete from config\. '([^']+)'": unknown_key,
    r"Multiple values for (\w+)\.": chosen_twice,
    r"Error merging override ([^\n]+)": lambda match: f"{match[1]}: {UNFIT}",
    r"force-add of config groups is not supported: '\+\+(\w+)": chosen_twice,
    r"Ambiguous value for argument '([^\n]+)'\n": ambiguous,
}
