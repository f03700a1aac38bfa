"""What a forward pass changes beside what it returns."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowvram
from lowvram.config.errors import Incompatible
from lowvram.core.changes import LARGE_BYTES, Look
from lowvram.core.places import Places
from lowvram.core.repeat import Repeatable
from tests import restless


def test_a_large_tensor_that_changes_late_names_all_options_that_have_to_undo_it() -> None:
    module = nn.Module()
    module.register_buffer("codes", torch.zeros(LARGE_BYTES // 4 + 1))
    places = Places(module)
    assert Look(places).changes() == []
    look = Look(places)
    module.get_buffer("codes").add_(1)
    with pytest.raises(
        Incompatible, match=r"^Module\.codes was changed.*\(ckpt, tile, .*torchscript, .*zeroth_order\)$"
    ):
        look.changes()


class Table(nn.Module):
    def __init__(self, step: float) -> None:
        super().__init__()
        self.held, self.step = {"table": np.zeros(LARGE_BYTES // 8 + 1)}, step

    def forward(self, x: Tensor) -> Tensor:
        self.held["table"][-1] += self.step
        return x * self.held["table"][-1]


def test_a_large_array_that_changes_cannot_be_put_back() -> None:
    for step in (0.0, 1.0):
        module = Table(step)
        first, again = Repeatable(module).passes()
        with first:
            module(torch.ones(1))
        if not step:
            with again:
                module(torch.ones(1))
            continue
        with pytest.raises(Incompatible, match=r"^Table\.held, an array of numpy, is changed in place"), again:
            module(torch.ones(1))


NUM_PASSES = 0
SCALES = [1.0]
NEW, REGISTRY = "newest", "__warningregistry__"


class Sharing(restless.Mlp):
    """Counts in an attribute of its class, in one that is new, in its file, and in a list of its file."""

    count = 0
    total = torch.zeros(1)

    def between(self, x: Tensor) -> Tensor:
        global NUM_PASSES
        NUM_PASSES += 1
        Sharing.count += 1
        setattr(Sharing, NEW, vars(Sharing).get(NEW, 0) + NUM_PASSES)
        Sharing.total.add_(1)
        SCALES.append(SCALES[-1] * 0.9)
        return x * SCALES[-1] / (Sharing.count + NUM_PASSES + vars(Sharing)[NEW] + float(Sharing.total))


def fresh(seed: int) -> nn.Module:
    global NUM_PASSES
    NUM_PASSES, Sharing.count = 0, 0
    Sharing.total.zero_()
    SCALES[:] = [1.0]
    if NEW in vars(Sharing):
        delattr(Sharing, NEW)
    torch.manual_seed(seed)
    return restless.Net(Sharing)


def test_what_classes_and_files_hold_is_put_back_for_a_block_that_is_computed_again() -> None:
    x, target = torch.randn(4, restless.WIDTH), torch.arange(4)
    gradients = list[list[Tensor]]()
    for is_again in (False, True):
        model = fresh(7)
        if is_again:
            for block in model.get_submodule("blocks").children():
                repeat_block(block)
        for _ in range(2):
            nn.functional.cross_entropy(model(x), target).backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        assert (NUM_PASSES, Sharing.count, float(Sharing.total), len(SCALES)) == (8, 8, 8.0, 9)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def repeat_block(block: nn.Module) -> None:
    forward, repeatable = block.forward, Repeatable(block)
    block.forward = lambda x: checkpoint(
        forward, x, use_reentrant=False, preserve_rng_state=False, context_fn=repeatable.passes
    )


class Making(dict[str, type]):
    """As the table of activations of transformers: makes an object each time."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


def test_a_dictionary_that_makes_its_values_has_not_changed() -> None:
    module = restless.Mlp()
    vars(module)["table"] = Making(act=nn.ReLU)
    assert Look(Places(module)).changes() == []


class Weighted(restless.Mlp):
    """Counts its calls, and leaves a loss in a list that all blocks hold."""

    losses: ClassVar[list[Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.losses.append(x.square().mean())
        return x / self.num_calls


class Resetting(restless.Net):
    """Calls each block twice, and puts back what the blocks have changed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        scale = 1 + torch.stack(Weighted.losses).sum()
        Weighted.losses.clear()
        for block in self.blocks:
            vars(block)["num_calls"] = 0
        return self.head(x) * scale


@pytest.mark.parametrize("knob", ["ckpt=every1", "ckpt=sqrt", "ckpt=selective"])
def test_a_repetition_leaves_nothing_where_the_model_has_put_back_what_the_forward_pass_changed(knob: str) -> None:
    x, target = torch.randn(4, restless.WIDTH), torch.arange(4)
    weights = list[list[Tensor]]()
    for knobs in ("ckpt=none", knob):
        torch.manual_seed(11)
        model = Resetting(Weighted)
        task = lowvram.task(model, x, blocks="Weighted")
        rig = lowvram.assemble(task, f"{knobs} optimizer=sgd optimizer.lr=0.05", "cpu")
        for _ in range(3):
            lowvram.step(rig, lowvram.Part(x, target))
        weights.append(list(model.parameters()))
        assert [block.get_submodule("").num_calls for block in model.blocks] == [0, 0, 0, 0]
        assert not Weighted.losses
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_what_python_notes_of_a_warning_is_no_change() -> None:
    registry = globals().setdefault(REGISTRY, {})
    look = Look(Places(Sharing()))
    with warnings.catch_warnings(action="ignore"):
        warnings.warn_explicit("of a forward pass", UserWarning, __file__, 1, registry=registry)
    assert look.changes() == []
