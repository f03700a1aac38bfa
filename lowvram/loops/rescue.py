"""After an error in a step: a snapshot of the last whole step, so that no work is lost.

A step that has failed may have left the random numbers elsewhere, so those from before it are kept.

Of several ranks one may fail while the others wait for it, until it is gone: nothing can be sent between them any more.
So each leaves what only it has in a file of the run's folder, a post, and ends; whoever finds the posts of all others
writes the snapshot. A post's name is that of a leftover, which is removed if it stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowvram.compat.torch_trees import tree_leaves, tree_map_only
from lowvram.config.texts import first_line
from lowvram.core import generators
from lowvram.core.kept_apart import is_kept_apart, saved_apart
from lowvram.core.mesh import all_ranks
from lowvram.core.shards import distinct, in_own_order, joined, local, reshard
from lowvram.core.untouched import Untouched
from lowvram.loops.session import NonFinite
from lowvram.loops.shard_files import apart, write_shards
from lowvram.loops.snapshot import Snapshots
from lowvram.results.files.durable import made_folders, unfinished_name
from lowvram.results.files.lease import check_ours

MOST_NAMED = 2  # buffers that a message names


@final
class WholeStep:
    """A whole step and what it has left, as long as nothing later changes the weights.

    Args:
        following: what comes after the step and may fail, as a message names it.
    """

    def __init__(self, step: int, model: nn.Module, following: str) -> None:
        self.step, self._following = step, following
        self._before = generators.states_of(generators.global_sources())
        self._model, self._untouched = model, Untouched(model)

    def rescue(self, error: BaseException, newest: int, save: Callable[[dict[str, Any]], bool]) -> None:
        """Save a snapshot after the step, and say so; or say why that isn't possible.

        Args:
            error: what ended the run after the step.
            newest: the step of the newest snapshot; 0 if there is none.
            save: is given the random state from after the step; returns False if another rank will save it.
        """
        if newest == self.step:
            return
        reshard(self._model)
        if (why := self._lost_by(error)) is not None:
            say(f"step {self.step} can't be saved any more, since {why}: {newest_is(newest)}")
            return
        try:
            generators.restore(self._before)
            if not save(generators.saved()):
                return
        except Exception as failure:  # the first error counts
            why = f"{type(failure).__name__}: {first_line(failure)}"
            say(f"step {self.step} can't be saved ({why}): {newest_is(newest)}")
            return
        say(f"{self._following} has failed; step {self.step} is saved{self._but()}")

    def _lost_by(self, error: BaseException) -> str | None:
        """Why the step's weights are lost; None if they are still there."""
        if not self._untouched.is_still(error):
            return f"{self._following} has changed weights before it failed"
        is_finite = not isinstance(error, NonFinite) or all(map(all_finite, self._model.parameters()))
        return None if is_finite else "its weights aren't finite"

    def _but(self) -> str:
        if not (names := self._untouched.changed_buffers()):
            return ""
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f" ({', '.join(names[:MOST_NAMED])}{more} already count samples of {self._following})"


def newest_is(step: int) -> str:
    return f"the newest snapshot is of step {step}" if step else "there is no snapshot"


def all_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def say(text: str) -> None:
    """Tell the user. On stderr, as the last rank may be any."""
    print(text, file=sys.stderr)


@final
class Posts:
    """The posts of the ranks that have failed after a step, in a run's folder."""

    def __init__(self, folder: Path, step: int) -> None:
        attempt = int(os.environ.get("MASTER_PORT", "0"))  # another one for each start of the ranks
        self._folder, self._prefix, self._attempt = folder, f".step_{step:08d}", attempt

    def path(self, of_rank: int, what: str = "post") -> Path:
        return self._folder / f"{self._prefix}.{what}.{self._attempt:08x}{of_rank:08x}.unfinished"

    def shards(self) -> Path:
        """The folder in which each leaves its large shards."""
        check_ours(self._folder)
        folder = self.path(0, "shards")
        folder.mkdir(exist_ok=True)
        return folder

    def leave(self, post: dict[str, Any], state: dict[str, Any], writing: Path) -> None:
        """Leave this rank's post, with its shards of `state`. While it is written it is `writing`."""
        check_ours(self._folder)
        shards = [local(leaf).detach().cpu() for leaf in sharded_leaves(state)]
        torch.save(post | {"shards": shards}, writing)
        writing.replace(self.path(all_ranks().rank))

    def is_complete(self) -> bool:
        """Whether all posts are there, and this is the one rank that takes them."""
        if not all(self.path(each).exists() for each in range(all_ranks().size)):
            return False
        with suppress(FileExistsError):
            os.close(os.open(self.path(0, "taken"), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        return False

    def take(self, state: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The state with whole tensors, and the posts, which are removed."""
        posts = [torch.load(self.path(each), weights_only=True) for each in range(all_ranks().size)]
        of_ranks = iter(zip(*(post.pop("shards") for post in posts), strict=True))
        whole = tree_map_only(DTensor, lambda tensor: as_gathered(next(of_ranks), tensor), state)
        for each in range(all_ranks().size):
            self.path(each).unlink()
        self.path(0, "taken").unlink()
        return whole, posts


def save_alone(
    posts: Posts, snapshots: Snapshots, step: int, state: dict[str, Any], post: dict[str, Any]
) -> Path | None:
    """Leave the post of one of several ranks, and write the snapshot if it is the last one; returns where.

    Args:
        state: as a snapshot has it, without what each rank has of its own.
        post: what it has of its own: its random state, and the log's.
    """
    made_folders(snapshots.folder)
    is_in_shards = snapshots.is_in_shards(state)
    rest, shards = apart(state) if is_in_shards else (state, {})
    hashes = write_shards(posts.shards(), shards, all_ranks().rank) if is_in_shards else {}
    posts.leave(post | {"hashes": hashes}, rest, unfinished_name(snapshots.folder / f"rank_{all_ranks().rank}"))
    if not posts.is_complete():
        return None
    whole, of_ranks = posts.take(rest)
    whole |= {"random": [each["random"] for each in of_ranks]} | of_ranks[0]["log"]
    if is_in_shards:
        return snapshots.settle_shards(step, posts.shards(), whole, [each["hashes"] for each in of_ranks])
    return snapshots.save(step, whole)


def as_gathered(shards: Sequence[Tensor], like: DTensor) -> Tensor | dict[str, Any]:
    """A sharded tensor as `gathered` leaves it, given the shard of each rank."""
    if is_kept_apart(like):
        return saved_apart(distinct(shards, like), like)
    return in_own_order(joined(shards, like), like)


def sharded_leaves(state: Any) -> Iterator[DTensor]:
    return (leaf for leaf in tree_leaves(state) if isinstance(leaf, DTensor))
