"""Snapshots of sharded states: a folder in which each rank has written its shards, so that no rank gathers a tensor.

The shards are checkpoints of torch.distributed.checkpoint in the format safetensors, which loads them onto any number
of ranks. torch's own format isn't used: it describes the shards in a pickle, which runs code when it is read, and a
folder may be a stranger's. All else is in STATE, which is read as other snapshots are, without running code. A shard's
place is kept there by a tensor without memory, and beside it the hash of each file.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lowvram.compat.torch_trees import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from lowvram.config.texts import first_line
from lowvram.core.kept_apart import is_kept_apart
from lowvram.core.mesh import is_in_first
from lowvram.core.shards import is_sharded, local, row_order
from lowvram.results.files.durable import flush, naming, remove_empty, remove_files, unfinished_name
from lowvram.results.files.late import is_there_in_time
from lowvram.results.files.regular import fingerprint
from lowvram.results.files.run_folder import STATE

FILES = "files"  # the entry of STATE with the hash of each file of shards
SUFFIX = ".safetensors"
FILE_NAME = re.compile(r"rank_\d+\.\d+\.safetensors")
FILE_BYTES = 2**30  # about: a file is written from a copy in host memory
DTYPES = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


# For a part of a state a tensor for each name in it, or one for all that is sharded there: they tell how to shard.
Like = Mapping[str, Mapping[str, Tensor] | Tensor]


class Apart(NamedTuple):
    """A state, taken apart.

    Args:
        rest: the state, with a tensor without memory in the place of each of `shards`.
        shards: sharded tensors by a name of their own.
    """

    rest: dict[str, Any]
    shards: dict[str, DTensor]


def apart(state: dict[str, Any]) -> Apart:
    """Take the sharded tensors out of a state. Those whose shards are no plain tensors, such as states of few bits,
    stay in it. Communicates nothing; all ranks find the same."""
    shards = dict[str, DTensor]()

    def leave_a_place(tensor: DTensor) -> Tensor:
        if not is_plainly_sharded(tensor):
            return tensor
        detached = tensor.detach()
        assert isinstance(detached, DTensor)
        shards[name_of(len(shards))] = detached
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return Apart(tree_map_only(DTensor, leave_a_place, state), shards)


def name_of(number: int) -> str:
    return f"{number:06d}"


def is_plainly_sharded(tensor: DTensor) -> bool:
    is_plain = type(local(tensor.detach())) is Tensor and tensor.dtype in DTYPES and not is_kept_apart(tensor)
    return is_plain and is_sharded(tensor) and tensor.numel() > 0 and row_order(tensor) is None


def sharded_bytes(state: Any) -> int:
    """The bytes that the sharded tensors of a state would have on a rank that gathered them."""
    leaves = (leaf for leaf in tree_leaves(state) if isinstance(leaf, DTensor))
    return sum(leaf.numel() * leaf.itemsize for leaf in leaves if is_plainly_sharded(leaf))


def write_shards(folder: Path, shards: Mapping[str, DTensor], rank: int) -> dict[str, str]:
    """Write this rank's shards, and flush them to the disk. Returns the hash of each file by its name. Communicates
    nothing, so that a rank can do it whose peers are gone."""
    own = {name: shard for name, shard in shards.items() if is_first_copy(shard) and local(shard).numel()}
    if not own:
        return {}
    below = folder / f"rank_{rank:05d}"
    is_there_in_time(folder.is_dir, [folder.parent])
    below.mkdir()  # an error where this rank doesn't see what the first has made, rather than files that nobody finds
    writer = HuggingFaceStorageWriter(str(below), split_into_files(own), save_distributed=True)
    with alone(), naming(below):
        save(dict(own), storage_writer=writer, planner=OwnPlanner(), no_dist=True)
    hashes = dict[str, str]()
    for number, path in enumerate(sorted(below.iterdir())):
        named = folder / f"{below.name}.{number:05d}{SUFFIX}"
        path.rename(named)
        flush(named)
        hashes[named.name] = fingerprint(named)
    below.rmdir()
    return hashes


@contextmanager
def alone() -> Iterator[None]:
    """Around what torch does on this rank alone: without a warning that it does, and with errors as they were raised,
    such as a disk's."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as wrapped:
        ((error, _),) = wrapped.failures.values()
        raise error from None


def is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank's shard is to be written: of equal ones, that of the first copy."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    places = zip(coordinates, tensor.placements, strict=True)
    return is_in_first(tensor.device_mesh) and all(at == 0 for at, place in places if isinstance(place, Replicate))


def split_into_files(shards: Mapping[str, DTensor]) -> dict[str, int]:
    """The number of the file, from 1 on, in which each is written. Those that share memory, as tied weights do, get
    different ones: safetensors writes no memory twice."""
    number_of, number, num_bytes = dict[str, int](), 1, 0
    memory = set[int]()
    for name, shard in shards.items():
        values = local(shard)
        address = values.untyped_storage().data_ptr()
        if memory and (num_bytes + values.nbytes > FILE_BYTES or address in memory):
            number, num_bytes = number + 1, 0
            memory.clear()
        number_of[name] = number
        num_bytes += values.nbytes
        memory.add(address)
    return number_of


@final
class OwnPlanner(DefaultSavePlanner):
    """Plans what one rank writes, without asking the others: they write the other shards."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plan, self.metadata = all_plans, Metadata({})
        return self.global_plan, self.metadata


def read_shards(folder: Path, state: dict[str, Any], like: Like) -> dict[str, Any]:
    """The state of a folder with its tensors in host memory: of a sharded one this rank's shard alone. Communicates
    nothing.

    Args:
        state: what STATE holds.
        like: what it says nothing about is read whole.

    Raises:
        ValueError: the files don't hold what the state says.
    """
    whole, targets = dict[str, Any](), dict[str, Tensor]()
    for part, value in state.items():
        leaves, structure = tree_flatten(value)
        for place, (leaf, example) in enumerate(zip(leaves, examples(value, like.get(part)), strict=False)):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                leaves[place] = targets[name_of(len(targets))] = in_host_memory(leaf, example)
        whole[part] = tree_unflatten(leaves, structure)
    await_files(folder, state.get(FILES, ()))
    reader = HuggingFaceStorageReader(str(folder))
    try:
        with alone():
            reader.read_metadata()  # where that fails, `load` logs a traceback
            load(dict(targets), storage_reader=reader, no_dist=True)
    except OSError:
        raise
    except Exception as error:  # of any library, about what anybody may have written
        raise ValueError(f"its shards can't be read ({type(error).__name__}: {first_line(error)})") from error
    return whole


def examples(value: Any, like: Mapping[str, Tensor] | Tensor | None) -> Iterator[Tensor | None]:
    """For each leaf of a part of the state, a tensor that is laid out as the leaf is to be."""
    if isinstance(like, Mapping):
        for name, leaf in value.items():
            yield from (like.get(name) for _ in tree_leaves(leaf))
        return
    while True:
        yield like


def in_host_memory(place: Tensor, like: Tensor | None) -> Tensor:
    """Zeros of the shape and dtype of `place`; sharded as `like` is, if that has its rows in their own order."""
    if not isinstance(like, DTensor) or row_order(like) is not None:
        return torch.zeros(place.shape, dtype=place.dtype)
    spread = distribute_tensor(place, like.device_mesh, like.placements, src_data_rank=None)
    return torch.zeros_like(spread, device="cpu")


def are_sound(folder: Path, hashes: Mapping[str, str]) -> bool:
    """Whether the files of shards in a folder are those that were written, no more and no fewer. Raises OSError if one
    can't be read."""
    await_files(folder, hashes)
    names = names_in(folder)
    return names == set(hashes) and all(fingerprint(folder / name) == hashes[name] for name in sorted(names))


def names_in(folder: Path) -> set[str]:
    """The files of shards in a folder, of which torch reads each."""
    return {path.name for path in folder.iterdir() if path.suffix == SUFFIX}


def await_files(folder: Path, names: Iterable[str]) -> None:
    """Wait for files that other machines have written, and that this one may see late."""
    expected = set(names)
    is_there_in_time(lambda: expected <= names_in(folder), [folder])


def remove_folder(folder: Path) -> None:
    """Remove a snapshot that is a folder. What isn't ours in it stays."""
    names = sorted({path.name for path in folder.iterdir()} - {STATE})
    ours = [STATE, *(name for name in names if FILE_NAME.fullmatch(name))]
    if len(ours) == len(names) + 1:
        folder = folder.rename(unfinished_name(folder))  # whoever dies from here on leaves a leftover
    remove_files(folder / name for name in ours)
    remove_empty([folder])
