"""Snapshots: everything that a run needs to go on as if it hadn't been interrupted. Each is one file, or a folder if
its shards are large (`shard_files`), with a hash in its name, and written atomically."""

from __future__ import annotations

import errno
import itertools
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from lowvram.config.errors import CONSTANTS, BadInput, Incompatible
from lowvram.config.schema import present_name
from lowvram.config.secret import REFUSED
from lowvram.config.texts import LONGEST_REASON, shortened
from lowvram.core.mesh import all_ranks, stage_hosts
from lowvram.core.states import gathered
from lowvram.core.troubles import is_out_of_memory
from lowvram.loops.shard_files import (
    FILES,
    Like,
    apart,
    are_sound,
    read_shards,
    remove_folder,
    sharded_bytes,
    write_shards,
)
from lowvram.results.files.durable import (
    flush,
    made_folders,
    remove_leftovers,
    settle,
    settle_folder,
    unfinished,
    unfinished_folder,
)
from lowvram.results.files.late import is_there_in_time
from lowvram.results.files.marker import MARKER
from lowvram.results.files.regular import fingerprint
from lowvram.results.files.run_folder import SNAPSHOT_NAME, STATE, snapshots_in

FORMED_BY = {  # for each part of a snapshot, the groups that determine the names and shapes in it
    "model": ("model", "task", "data", "adapter"),
    "stepper": ("optimizer", "sparsity", "stepping", "precision", "adapter", "depth", "model"),
}
# Groups whose option a run keeps to its end, as the weights show which it was: with another one, the row would say of a
# run what only its last steps did.
KEPT = ("sparsity",)
Check = Callable[[dict[str, Any]], None]
UNREADABLE = (errno.EIO, errno.EINVAL)  # the disk can't read them any more; it is no regular file
FORGED = "no snapshot of lowvram's, whatever its hash says"
STRANGE = (KeyError, TypeError, AttributeError, IndexError, ValueError, EOFError)  # of what is none


@final
class Snapshots:
    """The snapshots of one run, in `folder`. The name of each carries its step and the hash of its bytes.

    Args:
        run: the run's id, which each snapshot carries; None: not known, so snapshots of any run are accepted.
        sharded_above_bytes: of sharded tensors together, above which each rank writes its shards.
        is_spared: of a step, whether its snapshot is kept beside the newest.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        run: str | None = None,
        sharded_above_bytes: float = math.inf,
        is_spared: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.folder, self.keep, self.run = folder, keep, run
        self.sharded_above_bytes = sharded_above_bytes
        self.is_spared = is_spared

    def save_together(self, step: int, state: dict[str, Any], log: Callable[[], dict[str, Any]]) -> Path | None:
        """Save the state of all ranks; returns where on the first one, and None on the others. A collective.

        Args:
            log: what else a snapshot holds, asked on the first rank alone. Raises OSError if the run's folder is gone.
        """
        if not self.is_in_shards(state):
            entire = gathered(state)
            return None if entire is None else self.save(step, entire | log())
        is_first, logged = all_ranks().is_first, dict[str, Any]()
        if is_first:
            logged = log()
            made_folders(self.folder)
            remove_leftovers(self.folder)
        with unfinished_folder(self.folder / f"step_{step:08d}.shards") if is_first else nullcontext() as made:
            beside = Path(next(filter(None, all_ranks().gather(made and str(made)))))
            rest, shards = apart(state)
            hashes = all_ranks().gather(write_shards(beside, shards, all_ranks().rank))  # now all have finished
            entire = gathered(rest)
            return None if entire is None else self.settle_shards(step, beside, entire | logged, hashes)

    def is_in_shards(self, state: dict[str, Any]) -> bool:
        """Whether each rank writes its own shards of such a state. Not in a pipeline, whose ranks have other states."""
        return stage_hosts() is None and sharded_bytes(state) > self.sharded_above_bytes

    def settle_shards(self, step: int, beside: Path, state: dict[str, Any], hashes: list[dict[str, str]]) -> Path:
        """Make a snapshot of a folder in which each rank has written its shards.

        Args:
            hashes: of each rank's files, by their names.

        Raises:
            OSError: a rank has written them where this one doesn't see them.
        """
        files = {name: value for of_rank in hashes for name, value in of_rank.items()}
        for name in files:  # before older snapshots are removed, which may be whole
            if not (beside / name).is_file():
                what = "written by another rank, and not seen by the first: share the folder between their machines"
                raise FileNotFoundError(errno.ENOENT, what, str(self.folder / name))
        with (beside / STATE).open("wb") as file:
            torch.save(state | {"run": self.run, FILES: files}, file)
        flush(beside / STATE)
        path = self.folder / f"step_{step:08d}.{fingerprint(beside / STATE)}.shards"
        settle_folder(beside, path)
        self.forget_older(path)
        return path

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a temporary file, hash it and rename it, all synced to disk; then delete all but the newest `keep`."""
        made_folders(self.folder)
        remove_leftovers(self.folder)
        with unfinished(self.folder / f"step_{step:08d}.pt") as beside:
            with beside.open("wb") as file:
                torch.save(state | {"run": self.run}, file)
            path = self.folder / f"step_{step:08d}.{fingerprint(beside)}.pt"
            settle(beside, path)
        self.forget_older(path)
        return path

    def forget_older(self, newest: Path | None = None) -> None:
        """Delete all but the newest `keep` snapshots and those that are spared.

        Args:
            newest: a snapshot that counts as the newest, whatever its step.
        """
        others = [old for old in snapshots_in(self.folder) if old != newest]
        for old in others[self.keep - (newest is not None) :]:
            if not self.is_spared(step_of(old)):
                remove_folder(old) if old.is_dir() else old.unlink()

    def load(
        self, check: Check = lambda state: None, like: Callable[[], Like] = dict[str, Any]
    ) -> dict[str, Any] | None:
        """The newest sound snapshot, on the CPU; None if there is no snapshot. Damaged ones and those of other runs are
        renamed, with a message.

        A collective: all ranks must call it. The first one chooses the snapshot, and each loads it; of one in shards
        its own ones.

        Args:
            check: raises an error for a state that doesn't fit, before anything is printed or renamed.
            like: how this run's tensors are sharded (`read_shards`).

        Raises:
            BadInput: all of them are damaged, or another run's; or a rank's machine doesn't see the first one's.
        """
        found = self._newest(check) if all_ranks().is_first else None
        return self._loaded(found, check, like)  # the first rank has put aside what it passed over

    def _loaded(
        self, found: tuple[Path, dict[str, Any]] | None, check: Check, like: Callable[[], Like]
    ) -> dict[str, Any] | None:
        """What all ranks load, given what the first one has found, and the others None."""
        name = all_ranks().gather(None if found is None else found[0].name)[0]
        if name is None:
            return None
        path, state = found or self._named(name, check)
        with fitting(self.folder.parent):
            return read_shards(path, state, like()) if path.is_dir() else state

    def has(self, step: int) -> bool:
        """Whether there is a snapshot of this step, sound or not, by the first rank. A collective."""
        return all_ranks().gather(bool(self._of(step)))[0]

    def of_step(self, step: int, like: Callable[[], Like]) -> dict[str, Any] | None:
        """The snapshot of this step, as `load` returns it; None if there is no sound one of this run. A collective."""
        states = ((path, read_state(path)) for path in self._of(step) if is_sound(path)) if all_ranks().is_first else ()
        ours = ((path, state) for path, state in states if isinstance(state, dict) and self._is_ours(state))
        return self._loaded(next(ours, None), lambda _: None, like)

    def _of(self, step: int) -> list[Path]:
        return [path for path in snapshots_in(self.folder) if step_of(path) == step]

    def _named(self, name: str, check: Check) -> tuple[Path, dict[str, Any]]:
        """The snapshot that the first rank has chosen. Another machine may see it late."""
        path, rank = self.folder / name, all_ranks().rank
        state_at = path / STATE if path.suffix == ".shards" else path
        is_there = is_there_in_time(state_at.is_file, [self.folder, path])
        state = read_state(path) if is_there and is_sound(path, with_shards=False) else None
        if not isinstance(state, dict):
            what = "is damaged there" if is_there else "isn't there: share the folder between the machines"
            allowed = f"a folder that all ranks see as the first one does: for rank {rank} {name} {what}"
            raise BadInput("resume", str(self.folder.parent), allowed)
        check(state)
        return path, state

    def _newest(self, check: Check) -> tuple[Path, dict[str, Any]] | None:
        paths = snapshots_in(self.folder)
        named = {path for pattern in ("step_*.pt", "step_*.shards") for path in self.folder.glob(pattern)}
        for path in sorted(named - set(paths)):
            print(
                f"{path} is passed over: it is not a snapshot of this run, for it is no file or has no hash in its name"
            )
        unusable: dict[Path, str] = {}  # and what is wrong with each
        for path in paths:
            state = read_state(path) if is_sound(path) else None
            if state is not None and not isinstance(state, dict):
                unusable[path] = FORGED
                continue
            if state is not None and self._is_ours(state):
                try:
                    check(state)
                except STRANGE as error:
                    if isinstance(error, BadInput | Incompatible):
                        raise
                    unusable[path] = FORGED
                    continue
                put_aside(unusable)
                print(f"continuing from {path}")
                return path, state
            unusable[path] = "damaged (its bytes don't match its hash)" if state is None else "another run's"
        if unusable:
            raise self._no_sound_one(list(unusable.values()))
        return None

    def _is_ours(self, state: dict[str, Any]) -> bool:
        """A snapshot of an early version of lowvram carries no run id, and is accepted."""
        return self.run is None or state.get("run") in (None, self.run)

    def _no_sound_one(self, wrong: list[str]) -> BadInput:
        """The error if no snapshot can be used."""
        allowed = f"a run with a sound snapshot: all {len(wrong)} of this one are damaged, their bytes don't match"
        mend = "start again without resume= (a point of a sweep: remove its folder)"
        if num_foreign := wrong.count("another run's"):
            allowed = (
                f"a run with a sound snapshot of its own: {num_foreign} of {len(wrong)} here are another run's, as"
            )
            allowed += f" {MARKER} beside them says, and the others damaged; remove that file if you put them here"
            return BadInput("resume", str(self.folder.parent), f"{allowed}, or {mend}")
        if num_forged := wrong.count(FORGED):
            allowed = (
                f"a run with a sound snapshot: {num_forged} of {len(wrong)} here are none of lowvram's, and the others"
            )
            return BadInput("resume", str(self.folder.parent), f"{allowed} damaged; {mend}")
        return BadInput("resume", str(self.folder.parent), f"{allowed} their hashes; {mend}")


def put_aside(paths: dict[Path, str]) -> None:
    """Rename snapshots that can't be used, so that they don't count among the newest `keep`.

    Args:
        paths: each with what is wrong with it.
    """
    for path, wrong in paths.items():
        names = (path.with_suffix(f".damaged{number}") for number in itertools.chain([""], itertools.count(2)))
        aside = next(name for name in names if not os.path.lexists(name))  # one of that name may have been put aside
        path.rename(aside)
        print(f"{path} is {wrong}, now {aside.name}: going back to the one before")


def read_state(path: Path) -> Any:
    """What a snapshot holds, on the CPU, in the place of shards tensors without memory; an empty tuple if torch can't
    read it. No code in it is run."""
    try:
        state = torch.load(state_file(path), map_location="cpu", weights_only=True)
    except (*STRANGE, pickle.UnpicklingError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return ()
    return () if state is None else state


def step_of(path: Path) -> int:
    """The step after which a snapshot was saved."""
    match = SNAPSHOT_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def state_file(path: Path) -> Path:
    """The file of a snapshot whose hash is in the snapshot's name."""
    return path / STATE if path.is_dir() else path


def is_sound(path: Path, with_shards: bool = True) -> bool:
    """Whether a snapshot's bytes are those that were saved.

    Args:
        with_shards: whether to read the shards, too.
    """
    match = SNAPSHOT_NAME.fullmatch(path.name)
    try:
        if match is None or fingerprint(state_file(path)) != match[2]:
            return False
        if not (with_shards and path.is_dir()):
            return True
        hashes = read_state(path)[FILES]
        return are_sound(path, hashes)
    except STRANGE:  # it is forged
        return False
    except OSError as error:
        if error.errno in UNREADABLE:
            return False
        raise


def check_form(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a snapshot that no longer fits because the configuration was changed.

    Args:
        now, saved: the states of model and stepper, and under "chosen" a value for every dotted key.

    Raises:
        Incompatible: each key that was changed, and what it must be.
    """
    chosen = now["chosen"]
    was = saved.get("chosen", chosen)  # an early version of lowvram saved none
    check_kept(chosen, was)
    for part, groups in FORMED_BY.items():
        changed = [key for key in chosen if key.partition(".")[0] in groups and was.get(key) != chosen[key]]
        # If a group has another option, naming the option is enough: its fields differ anyway.
        named = [key for key in changed if key.partition(".")[0] not in changed or "." not in key]
        if named and not has_form(saved[part], now[part]):
            changes = "; ".join(f"{key}={word(chosen[key])}: must be {word(was.get(key))}" for key in named)
            raise Incompatible(f"{changes} (as when the snapshot was saved: its {part} doesn't fit what was changed)")


def check_kept(chosen: Mapping[str, Any], was: Mapping[str, Any]) -> None:
    """Raises Incompatible if a group that a run keeps has another option than when the snapshot was saved."""
    for group in KEPT:
        option = was.get(group, chosen.get(group))
        if chosen.get(group) != option:
            allowed = f"must be {option}, with which this run was trained: leave {group} out beside resume="
            raise Incompatible(f"{group}={chosen[group]}: {allowed}")


def differences(now: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The values that have changed since a snapshot was saved, as a user types them; secrets are not compared.

    Args:
        now, saved: values by dotted key, and the option of each group.
    """
    saved = {key: present_name(str(value)) if key.endswith("._target_") else value for key, value in saved.items()}
    shared = [key for key in now if key in saved and REFUSED not in str([now[key], saved[key]])]
    changed = [key for key in shared if now[key] != saved[key]]
    return [f"{key}={word(now[key])} ({word(saved[key])} in the snapshot)" for key in changed]


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Inside it a state that can't be loaded is bad input: the run's code was changed, or lowvram didn't save it."""
    try:
        yield
    except (*STRANGE, RuntimeError) as error:
        if isinstance(error, BadInput | Incompatible) or is_out_of_memory(error):
            raise
        what = shortened(" ".join(str(error).split()), LONGEST_REASON)
        allowed = f"a run whose snapshot fits its model and optimizer: {type(error).__name__}: {what}"
        raise BadInput(
            "resume", str(folder), f"{allowed}; was its code changed, or the file made by somebody else?"
        ) from error


def has_form(saved: Any, fresh: Any) -> bool:
    """Whether a saved state has the names and shapes of a fresh one. Entries that are still empty there match
    anything."""
    if isinstance(fresh, Tensor):
        return isinstance(saved, Tensor) and saved.shape == fresh.shape
    if isinstance(fresh, Mapping) and fresh:
        same_names = isinstance(saved, Mapping) and saved.keys() == fresh.keys()
        return same_names and all(has_form(saved[name], fresh[name]) for name in fresh)
    if isinstance(fresh, list | tuple) and fresh:
        same_length = isinstance(saved, list | tuple) and len(saved) == len(fresh)
        return same_length and all(map(has_form, saved, fresh))
    return saved == fresh if isinstance(fresh, str) else True


def word(value: Any) -> str:
    """A value as a user types it."""
    return CONSTANTS.get(repr(value), str(value))


def my_random_state(states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """This rank's entry of the `generators.saved` of all ranks; None if there were fewer ranks then."""
    return states[all_ranks().rank] if all_ranks().rank < len(states) else None
