"""A point's id and name, and its provenance: code, versions and device. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import platform
import secrets
import subprocess
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lowvram.config.defaults import ROOT
from lowvram.config.not_identity import (
    NEUTRAL_OF_LATER_GROUPS,
    NEUTRAL_OF_LATER_KEYS,
    NOT_IDENTITY,
    NOT_IDENTITY_IF_NULL,
    ORDERED,
)
from lowvram.config.plugins import is_unused, plugins, versions_of
from lowvram.config.schema import MOVED
from lowvram.config.secret import words_without_secrets
from lowvram.config.settings import ROOT_KEYS, check_name
from lowvram.config.version import __version__


def register_resolvers() -> None:
    """Register OmegaConf's resolvers `${point_id:}` and `${run_name:}`, which the configuration uses."""
    OmegaConf.register_new_resolver("point_id", point_id, replace=True)
    OmegaConf.register_new_resolver("run_name", run_name, replace=True)


def point_id(*, _root_: DictConfig) -> str:
    """16 hex digits, a hash of what determines the result: the configuration, the device and the versions."""
    config = {str(key): identity_of(str(key), _root_[key]) for key in _root_ if counts(str(key), _root_[key])}
    where: dict[str, Any] = {"lowvram": __version__, "torch": installed_version("torch"), "device": device_in_ids()}
    if plugins():
        config = {key: value for key, value in config.items() if not is_unused(key, value)}
        where |= {"plugins": used} if (used := versions_of(config)) else {}
    text = json.dumps([config, where], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def counts(key: str, value: Any) -> bool:
    """Whether this key of the configuration is part of a point's identity."""
    if value is None and key in NOT_IDENTITY_IF_NULL:
        return False
    if key in NEUTRAL_OF_LATER_KEYS and value == NEUTRAL_OF_LATER_KEYS[key]:
        return False
    if key in NEUTRAL_OF_LATER_GROUPS and isinstance(value, DictConfig):
        return value["_target_"] != NEUTRAL_OF_LATER_GROUPS[key]
    return key not in NOT_IDENTITY


def identity_of(key: str, node: Any) -> Any:
    """The part of a root key's value that can change a result."""
    value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node
    if not isinstance(value, dict):
        return value
    kept = {name: each for name, each in value.items() if counts(f"{key}.{name}", each)}
    ordered = {name: each for name, each in kept.items() if f"{key}.{name}" in ORDERED and isinstance(each, dict)}
    kept |= {name: [*each.items()] for name, each in ordered.items()}
    return kept | {name: first_name(str(each)) for name, each in kept.items() if name == "_target_"}


def first_name(target: str) -> str:
    """The dotted name that a class had first: ids stay when it moves."""
    return next((old + target.removeprefix(new) for old, new in MOVED.items() if target.startswith(f"{new}.")), target)


def run_name(*, _root_: DictConfig) -> str:
    """Time of day, something random (two runs may start in one second), and the name that the user gave."""
    name = _root_.get("name")
    check_name(name)
    return f"{started()}-{name}" if name else started()


@cache
def started() -> str:
    return f"{time.strftime('%H-%M-%S')}-{secrets.token_hex(2)}"


@cache
def installed_version(package: str) -> str:
    return version(package)


def device_in_ids() -> str:
    """The device that ids of points name: this machine's, unless `name_device` was told another."""
    return _named[0] if _named else device_name()


def name_device(name: str | None) -> None:
    """Have ids name this device, for points that a queue runs: which device will run them isn't known, and machines
    that submit, run and collect them must find the same ids. None: that of this machine again."""
    _named[:] = [] if name is None else [name]


_named: list[str] = []


@cache
def device_name() -> str:
    """The NVIDIA card as its driver calls it, else the processor."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        return line_after(path, "Model:")
    return line_after(Path("/proc/cpuinfo"), "model name") or platform.machine()


def line_after(path: Path, label: str) -> str:
    """The rest of the first line that starts with `label`."""
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(label):
            return line[len(label) :].strip(" \t:")
    return ""


@cache
def driver_version() -> str | None:
    """The version of the NVIDIA kernel module; None if there is none."""
    return line_after(Path("/proc/driver/nvidia/version"), "NVRM version:") or None


def provenance(seed: int, command: str) -> dict[str, Any]:
    """What was run, and on what; the child adds what only torch knows."""
    sha, is_dirty = git_state()
    return {
        "git_sha": sha,
        "dirty": is_dirty,
        "lowvram": __version__,
        "torch": installed_version("torch"),
        "device_name": device_name(),
        "driver": driver_version(),
        "seed": seed,
        "python": platform.python_version(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": command,
    }


@cache
def git_state() -> tuple[str | None, bool | None]:
    """The commit of this checkout and whether it was changed since; (None, None) for an installed package."""
    if not (ROOT / ".git").exists():
        return None, None
    sha, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return sha or None, None if changes is None else bool(changes)


def git(*words: str) -> str | None:
    """What git prints; None if it fails. git takes no lock here, which it would leave behind if it were killed."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(ROOT), *words],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def point_name(words: list[str], swept: list[str]) -> str:
    """The swept values, such as "bf16-every2-lr0.01", for people; never used as a folder's name."""
    values = {word.partition("=")[0]: word.partition("=")[2] for word in words_without_secrets(words)}
    named = [(key, values[key]) for key in swept if key in values]
    return "-".join(
        f"{key.rpartition('.')[2]}{value}" if "." in key or key in ROOT_KEYS else value for key, value in named
    )
