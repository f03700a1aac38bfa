"""A cache of what a teacher has said: for each sample the likeliest classes of each of its targets, in mapped files.

A folder holds `cache.json` (what it is a cache of), `index.npy` (a line per sample) and shards, each of three arrays
with a row per target. Samples are found by index and epoch, and compared by a hash of their contents: augmented
samples, which are another in each epoch, have a row each, others only one. Padding, which is no target, takes no room.

Shapes: t targets of a shard, k classes that are kept of each, n samples of a part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from lowvram.compat.torch_trees import tree_leaves
from lowvram.compress.distillation.soft import IDS, REST, VALUES, Likeliest
from lowvram.config.errors import BadInput, require
from lowvram.config.texts import first_line
from lowvram.core.rig import IGNORE, Part
from lowvram.data.randomness import Key
from lowvram.results.files import manifest
from lowvram.results.files.regular import SHORT_BYTES, open_regular, read_regular

FOLDER, ABOUT, INDEX = "cache", "cache.json", "index.npy"
KEY = "task.cache"
SHARD_BYTES = 2**26  # a shard is written once it has as many
LINE = np.dtype(
    [("epoch", "i8"), ("index", "i8"), ("shard", "i4"), ("first", "i8"), ("num_targets", "i4"), ("digest", "u8")]
)
ARRAYS = (VALUES, IDS, REST)


@final
@dataclass(frozen=True)
class About:
    """What a cache is of. `key` is a hash of the other fields and of all samples, whatever their order."""

    teacher: str  # as the user named it
    teacher_digest: str  # of its weights
    teacher_format: str  # in which it computed
    data: str  # modality, classes and shape of samples
    num_train: int  # samples of an epoch
    seed: int
    num_samples: int  # from the first of the training order on
    num_targets: int
    classes: int  # that the teacher knows
    top: int  # of them kept for each target
    values: str  # the number format of their logarithms
    temperature: float
    key: str = ""

    def key_for(self, lines: np.ndarray) -> str:
        fields = {name: value for name, value in asdict(self).items() if name != "key"}
        in_order = lines[np.lexsort((lines["index"], lines["epoch"]))]
        samples = [in_order[name].tobytes() for name in ("epoch", "index", "digest")]
        return hashlib.sha256(b"".join([json.dumps(fields).encode(), *samples])).hexdigest()

    @property
    def bytes_per_target(self) -> int:
        return self.top * (np.dtype(self.values).itemsize + 4) + 4


def digests_of(part: Part) -> np.ndarray:
    """A hash of the contents of each sample (n,), a few bytes."""
    leaves = [leaf.contiguous().numpy() for leaf in tree_leaves((part.inputs, part.targets))]
    hashes = (
        hashlib.blake2b(b"".join(leaf[row].tobytes() for leaf in leaves), digest_size=8)
        for row in range(len(leaves[0]))
    )
    return np.array([int.from_bytes(each.digest(), "little") for each in hashes], np.uint64)


class Place(NamedTuple):
    """Where the targets of a sample are."""

    shard: int
    first: int
    num_targets: int


@final
class Writer:
    """Writes a cache into a folder, shard by shard."""

    def __init__(self, folder: Path, values: str) -> None:
        self.folder, self.values = folder, np.dtype(values)
        self.rows: list[tuple[np.ndarray, ...]] = []  # of the present shard, in the order of `ARRAYS`
        self.shard = self.num_rows = self.num_bytes = self.num_targets = 0
        self.places: dict[int, Place] = {}  # by the hash of a sample
        self.lines: list[tuple[int, ...]] = []

    def add(self, keys: list[Key], part: Part, likeliest: Likeliest) -> None:
        """Add the samples of a part.

        Args:
            likeliest: of those targets that count, sample by sample.
        """
        counts = (part.targets != IGNORE).flatten(1).sum(1) if part.targets.dim() > 1 else part.targets != IGNORE
        ends = np.cumsum(counts.long().numpy())
        arrays = [each.cpu().numpy() for each in likeliest]
        arrays = [arrays[0].astype(self.values), arrays[1].astype(np.int32), arrays[2].astype(np.float32)]
        for (index, epoch), digest, first, end in zip(keys, digests_of(part), [0, *ends[:-1]], ends, strict=True):
            place = self.places.get(int(digest)) or self.put(*(array[first:end] for array in arrays))
            self.places[int(digest)] = place
            self.lines.append((epoch, index, *place, int(digest)))

    def put(self, *rows: np.ndarray) -> Place:
        place = Place(self.shard, self.num_rows, len(rows[0]))
        self.rows.append(rows)
        self.num_rows += len(rows[0])
        self.num_targets += len(rows[0])
        self.num_bytes += sum(array.nbytes for array in rows)
        if self.num_bytes >= SHARD_BYTES:
            self.write_shard()
        return place

    def write_shard(self) -> None:
        """Write the present shard, and begin the next one."""
        for name, arrays in zip(ARRAYS, zip(*self.rows, strict=True), strict=False):
            np.save(shard_file(self.folder, name, self.shard), np.concatenate(arrays))
        self.rows, self.num_rows, self.num_bytes, self.shard = [], 0, 0, self.shard + 1

    def finish(self, about: About) -> About:
        if self.rows:
            self.write_shard()
        lines = np.array(self.lines, LINE)
        lines = lines[np.lexsort((lines["index"], lines["epoch"]))]
        about = About(**{**asdict(about), "key": about.key_for(lines)})
        write_index(self.folder, lines)
        (self.folder / ABOUT).write_text(json.dumps(asdict(about), indent=2) + "\n")
        return about


def shard_file(folder: Path, name: str, number: int) -> Path:
    return folder / f"{name}-{number:05d}.npy"


OPENED: dict[str, Cache] = {}  # by name and the state of the index


def open_cache(name: str) -> Cache:
    """The cache in a folder, or in the folder of a run. It is read once, unless it changes."""
    folder = cache_folder(name)
    stamps = [
        (file.stat().st_mtime_ns, file.stat().st_size) for file in (folder / ABOUT, folder / INDEX) if file.is_file()
    ]
    key = repr((name, stamps))
    if key not in OPENED:
        OPENED[key] = Cache(name)
    return OPENED[key]


def cache_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    return next((each for each in (folder / FOLDER, folder) if (each / ABOUT).is_file()), folder)


def write_index(folder: Path, lines: np.ndarray) -> None:
    np.save(folder / INDEX, lines)


@final
class Cache:
    """An opened cache.

    Raises:
        BadInput: the folder holds none, or a damaged one.
    """

    def __init__(self, name: str) -> None:
        self.name, self.folder = name, cache_folder(name)
        try:
            self.about = About(**json.loads(read_regular(self.folder / ABOUT, SHORT_BYTES)))
            with open_regular(self.folder / INDEX) as file:
                self.lines = np.load(file)
        except OSError:
            allowed = f"the folder of a run with mode=teach: it holds no {FOLDER}/ with {ABOUT} and {INDEX} to read"
            raise BadInput(KEY, name, allowed) from None
        except Exception:  # numpy's reader raises errors of any class for a damaged header
            allowed = f"as it was written: {ABOUT} or {INDEX} in it is damaged; run mode=teach again"
            raise BadInput(KEY, name, allowed) from None
        if self.lines.dtype != LINE or self.about.key != self.about.key_for(self.lines):
            raise BadInput(KEY, name, f"as it was written: {self.folder / INDEX} doesn't match {ABOUT}")
        self.check_files()
        self.sorted_by = self.lines["epoch"] * self.about.num_train + self.lines["index"]
        self.shards: dict[tuple[str, int], np.ndarray] = {}

    def check_files(self) -> None:
        """Raises BadInput if a file isn't as mode=teach wrote it."""
        try:
            written = manifest.read(self.folder)
        except ValueError as error:
            raise BadInput(KEY, self.name, f"as it was written: {manifest.NAME} is damaged ({error})") from None
        for name, content in written.files.items() if written else ():
            require(content.is_in(self.folder / name), KEY, self.name, damaged(self.folder / name))

    def check(self, samples: str, num_train: int, seed: int, keys: list[Key], part: Part) -> None:
        """Raises BadInput if it is a cache of other samples.

        Args:
            samples: `About.data` of those to train on.
            keys, part: some of them.
        """
        for what, of_cache, here in (
            ("data", self.about.data, samples),
            ("number of samples", self.about.num_train, num_train),
            ("seed", self.about.seed, seed),
        ):
            allowed = f"a cache of these data: its {what} is {of_cache}, here {here}; run mode=teach for them"
            require(of_cache == here, KEY, self.name, allowed)
        self.places(keys, part)

    def places(self, keys: Iterable[Key], part: Part) -> list[Place]:
        """Where the samples of a part are. Raises BadInput if one isn't there, or was another one."""
        places: list[Place] = []
        for (index, epoch), digest in zip(keys, digests_of(part), strict=True):
            at = int(np.searchsorted(self.sorted_by, epoch * self.about.num_train + index))
            line = self.lines[at] if at < len(self.lines) else None
            is_there = line is not None and (line["epoch"], line["index"], line["digest"]) == (epoch, index, digest)
            allowed = f"a cache of these data: sample {index} of epoch {epoch} isn't the one that the teacher saw"
            require(is_there, KEY, self.name, f"{allowed}; run mode=teach for them")
            assert line is not None
            places.append(Place(int(line["shard"]), int(line["first"]), int(line["num_targets"])))
        return places

    def soft(self, keys: list[Key], part: Part) -> dict[str, Tensor]:
        """What the teacher said of the samples of a part: `CachedSoftTargets` describes the tensors."""
        empty, places = self.empty(part.targets), self.places(keys, part)
        counts = part.targets != IGNORE
        for row, place in enumerate(places):
            for name, tensor in empty.items():
                rows = self.array(name, place.shard)[place.first : place.first + place.num_targets]
                is_whole = len(rows) == int(counts[row].sum())
                require(is_whole, KEY, self.name, damaged(shard_file(self.folder, name, place.shard)))
                tensor[row][counts[row]] = torch.from_numpy(np.array(rows)).reshape(-1, *tensor.shape[counts.dim() :])
        return empty

    def empty(self, targets: Tensor) -> dict[str, Tensor]:
        """Tensors of the right shapes and formats, all zero."""
        values = torch.float16 if np.dtype(self.about.values) == np.float16 else torch.float32
        shape = (*targets.shape, self.about.top)
        return {
            VALUES: torch.zeros(shape, dtype=values),
            IDS: torch.zeros(shape, dtype=torch.int32),
            REST: torch.zeros(targets.shape),
        }

    def array(self, name: str, shard: int) -> np.ndarray:
        """One array of a shard, mapped into memory."""
        if (name, shard) not in self.shards:
            file = shard_file(self.folder, name, shard)
            try:
                open_regular(file).close()
                array = np.load(file, mmap_mode="r")
            except Exception as error:  # numpy's reader raises errors of any class for a damaged header
                raise BadInput(KEY, self.name, f"{damaged(file)} ({first_line(error)})") from None
            is_whole = array.offset + array.nbytes == file.stat().st_size and array.flags.c_contiguous
            is_whole &= (array.dtype, array.shape[1:]) == self.rows_of(name)
            require(is_whole, KEY, self.name, damaged(file))
            self.shards[name, shard] = array
        return self.shards[name, shard]

    def rows_of(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
        """Number format and shape of the rows of an array."""
        if name == REST:
            return np.dtype(np.float32), ()
        return np.dtype(self.about.values if name == VALUES else np.int32), (self.about.top,)


def damaged(file: Path) -> str:
    return f"as it was written: {file} is missing or damaged; run mode=teach again"
