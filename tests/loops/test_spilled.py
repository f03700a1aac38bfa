"""Whole tensors of a sharded model on the disk: their memory can be taken back, and the export is the same."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.states import whole_model
from lowvram.loops.spilled import LEAST_BYTES, spilled
from lowvram.loops.train import Train
from tests.laboratory import CPU, PROBLEMS, knobs_of
from tests.loops.sessions import session_in
from tests.loops.test_elastic import WIDE
from tests.ranks import on_ranks

pytestmark = pytest.mark.medium


def anonymous_bytes() -> int:
    """The memory of this process that only swap could take back."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_copy_has_the_same_values_and_no_name(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.randn(300, 4096) * 9).to(dtype)
    copy = spilled(tmp_path, tensor)
    assert copy.equal(tensor)
    assert (copy.dtype, copy.shape, copy.untyped_storage().nbytes()) == (dtype, tensor.shape, tensor.nbytes)
    assert list(tmp_path.iterdir()) == []
    tensor.zero_()
    assert copy.count_nonzero() > 0


def test_it_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    tensor = torch.ones(2**24)
    before, kept = anonymous_bytes(), [spilled(tmp_path, tensor) for _ in range(4)]
    assert anonymous_bytes() - before < tensor.nbytes / 4
    assert all(int(each.sum()) == 2**24 for each in kept)


def test_small_ones_stay_in_memory(tmp_path: Path) -> None:
    tmp_path.rmdir()
    assert spilled(tmp_path, torch.ones(LEAST_BYTES // 4 - 1)).sum() == LEAST_BYTES // 4 - 1


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        spilled(tmp_path, torch.ones(2**20))


def spilled_and_kept(folder: Path) -> bool:
    """Whether a sharded model is the same with its tensors in files and in memory."""
    rig = assemble(PROBLEMS["transformer"], knobs_of(sharding="fsdp"), CPU)
    with patch("lowvram.loops.spilled.LEAST_BYTES", 0):
        one = whole_model(rig.model, rig.task.make_model, partial(spilled, folder))
    other = whole_model(rig.model, rig.task.make_model)
    if one is None or other is None:
        return one is other
    values, wanted = one.state_dict(), other.state_dict()
    return values.keys() == wanted.keys() and all(values[name].equal(wanted[name]) for name in wanted)


def test_a_whole_model_is_the_same(tmp_path: Path) -> None:
    assert on_ranks(spilled_and_kept, tmp_path) == [True, True]


def exported(folder: Path, sharded_above_gib: float | None) -> int:
    """Train, and export; returns how many tensors were spilled."""
    choices: dict[str, str | Knob] = {"sharding": "fsdp"}
    session = session_in(folder, WIDE, choices=choices, steps=2, batch_size=4, sharded_above_gib=sharded_above_gib)
    with (
        patch("lowvram.loops.spilled.LEAST_BYTES", 0),
        patch("lowvram.loops.exported.spilled", wraps=spilled) as counted,
    ):
        Train().run(session)
    return counted.call_count


def test_an_export_is_the_same(tmp_path: Path) -> None:
    names = {"spilled": 0.0, "gathered": None}
    counts = {name: on_ranks(exported, tmp_path / name, size) for name, size in names.items()}
    assert counts["spilled"][0] > 10
    assert [counts["spilled"][1], *counts["gathered"]] == [0, 0, 0]
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in names)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
