"""What modules keep in attributes goes round through a file, and what doesn't is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowvram.loops.snapshot import Snapshots
from lowvram.loops.unregistered import Unregistered
from tests.restless import BLOCKS, WIDTH, Net

GOES_ROUND = ["Counter", "SometimesDrops", "OwnNumpy", "OwnPython", "OwnGenerator", "GlobalNumpy"]


@pytest.mark.parametrize("name", GOES_ROUND)
def test_a_resumed_model_goes_on_to_the_bit(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(BLOCKS[name]), torch.randn(2, WIDTH)
    kept = Unregistered(model)
    model(x)
    Snapshots(tmp_path, 1).save(
        1, {"random": kept.state(), "model": model.state_dict(), "global": torch.get_rng_state()}
    )
    wanted = model(x)
    model(x)  # moves what a file holds, too
    again = Net(BLOCKS[name])
    state = Snapshots(tmp_path, 1).load()
    assert state is not None
    again.load_state_dict(state["model"])
    Unregistered(again).load(state["random"])
    torch.set_rng_state(state["global"])
    assert torch.equal(again(x), wanted)
    assert kept.told() is None


@pytest.mark.parametrize("name", ["NestedState", "PlainTensor", "TensorInList"])
def test_what_a_snapshot_cannot_hold_is_told(name: str) -> None:
    model = Net(BLOCKS[name])
    kept = Unregistered(model)
    assert kept.told() is None
    model(torch.randn(2, WIDTH))
    assert f"snapshots don't hold {name}." in str(kept.told())


@pytest.mark.parametrize("name", ["Ema", "InstanceNorm", "Spectral", "FunctionalDropout"])
def test_what_every_snapshot_holds_is_not_told(name: str) -> None:
    model = Net(BLOCKS[name])
    kept = Unregistered(model)
    model(torch.randn(2, WIDTH))
    assert kept.told() is None


class OfTorch:
    """As an object that FSDP keeps in the attributes of a module."""

    __module__ = "torch.distributed.fsdp"
    count = 0


def test_what_torch_notes_for_itself_is_not_told() -> None:
    model = Net(BLOCKS["Counter"])
    state = OfTorch()
    vars(model.blocks[0])["state"] = {"fsdp": state}
    kept = Unregistered(model)
    state.count = 1
    assert kept.told() is None
