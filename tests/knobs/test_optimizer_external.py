"""optimizer=external: optimizers of torch and of the user's own, and what each may be combined with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Fact
from lowvram.knobs.optimizer import External
from tests.calls import Outcome
from tests.laboratory import CPU, PROBLEMS, batches, knobs_of, relative_error, train

OWN, TORCH = "tests.knobs.test_optimizer_external", "torch.optim"


class SharedNorm(Optimizer):
    """Divides every gradient by the norm of all."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad / norm)


class OfRows(SharedNorm):
    """Divides every gradient by its own parameter's norm."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.param_groups[0]["lr"] * parameter.grad / parameter.grad.norm())


def nothing(params: Any, lr: float) -> None: ...


def test_it_is_torchs_own() -> None:
    knob = External("torch.optim.NAdam", 0.01, {"betas": [0.8, 0.9], "weight_decay": 0.1})
    found = train(PROBLEMS["transformer"], knobs_of(optimizer=knob), [8] * 3)
    model = assemble(PROBLEMS["transformer"], knobs_of(), CPU).model
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    groups = [
        {"params": matrices},
        {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0},
    ]
    optimizer = torch.optim.NAdam(groups, 0.01, (0.8, 0.9), weight_decay=0.1)
    for batch, wanted in zip(batches(PROBLEMS["transformer"].spec, [8] * 3), found.losses, strict=True):
        loss = PROBLEMS["transformer"].criterion(model(batch.inputs), batch) / batch.num_targets
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("target", "needs", "breaks"),
    [
        ("torch.optim.Adamax", set(), set()),
        ("torch.optim.Adafactor", {Fact.WHOLE_PARAMS}, set()),
        (f"{OWN}.OfRows", {Fact.WHOLE_PARAMS}, set()),
        (f"{OWN}.SharedNorm", {Fact.WHOLE_PARAMS}, {Fact.SEPARATE_UPDATES}),
    ],
)
def test_what_an_update_depends_on_is_found_by_trying(target: str, needs: set[Fact], breaks: set[Fact]) -> None:
    drawn = torch.get_rng_state()
    knob = External(target)
    assert (knob.needs(), knob.breaks()) == (needs, breaks)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("other", ["stepping=in_backward", "stepping=cpu_offload", "precision=bf16_pure"])
def test_without_separate_updates(other: str) -> None:
    """Each of these updates one parameter at a time, which gives other numbers with an optimizer that looks at all."""
    task = lowvram.task(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), torch.rand(2, 4))
    with pytest.raises(Incompatible, match=f"{other}.* needs that the update of a parameter depends on no other"):
        lowvram.assemble(task, [f"optimizer=external optimizer.target={OWN}.SharedNorm", other], "cpu")


@pytest.mark.parametrize("stepping", ["in_backward", "cpu_offload"])
def test_with_it_the_numbers_would_be_others(stepping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowvram.knobs.stepping.cpu_offload.BUCKET_BYTES", 1024)
    knob = External(f"{OWN}.SharedNorm", lr=1.0)
    together = train(PROBLEMS["transformer"], knobs_of(optimizer=knob), [8] * 2)
    monkeypatch.setattr(External, "breaks", lambda self: frozenset())
    apart = train(PROBLEMS["transformer"], knobs_of(optimizer=knob, stepping=stepping), [8] * 2)
    assert relative_error({"": together.losses[1]}, {"": apart.losses[1]}) > 1e-2


@pytest.mark.parametrize("other", ["stepping=in_backward", "stepping=cpu_offload", "precision=bf16_pure", "accum=x2"])
def test_an_elementwise_one_works_with(other: str) -> None:
    group, _, option = other.partition("=")
    found = train(
        PROBLEMS["transformer"], knobs_of(optimizer=External("torch.optim.Adamax"), **{group: option}), [8] * 3
    )
    plain = train(PROBLEMS["transformer"], knobs_of(optimizer=External("torch.optim.Adamax")), [8] * 3)
    band = 0.02 if group == "precision" else 1e-5
    assert relative_error({"": torch.stack(found.losses)}, {"": torch.stack(plain.losses)}) <= band


@pytest.mark.parametrize(
    ("target", "args", "said"),
    [
        ("nowhere.Adam", None, r"optimizer\.target='nowhere\.Adam': must be .* no module nowhere"),
        (f"{TORCH}.SGD", {"momento": 1}, r"optimizer\.args=.*: must be what torch\.optim\.SGD takes"),
        (f"{TORCH}.SGD", {"momentum": -1}, r"optimizer\.target=.* ValueError: Invalid momentum"),
        (f"{TORCH}.LBFGS", None, r"optimizer\.target=.* updates dense tensors without a closure"),
        (f"{TORCH}.SparseAdam", None, r"optimizer\.target=.* updates dense tensors without a closure"),
        (f"{TORCH}.AdamW", {"weight_decay": None}, r"optimizer\.args\.weight_decay=null: must be a number"),
        (f"{TORCH}.AdamW", {"weight_decay": -1}, r"optimizer\.args\.weight_decay=-1: must be a number"),
        (f"{OWN}.nothing", None, r"must be a class of torch\.optim\.Optimizer: this made a NoneType"),
    ],
)
def test_what_cannot_be_used_is_refused(target: str, args: dict[str, Any] | None, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        External(target, args=args)


@pytest.mark.slow
def test_from_the_command_line_with_a_plan_and_a_resumed_run(call: Callable[..., Outcome]) -> None:
    words = ("optimizer=external", "optimizer.target=torch.optim.RAdam", "train.batch_size=4", "logger=none")
    planned = call("mode=plan", "plan.device=rtx3060", *words)
    assert planned.code == 0, planned.said()
    plain = call("mode=plan", "plan.device=rtx3060", *words[2:])
    for kind in ("parameters", "optimizer"):
        assert planned.row["plan"]["by_kind"][kind] == pytest.approx(plain.row["plan"]["by_kind"][kind], rel=0.01)
    run = call(*words, "train.steps=3")
    assert run.code == 0, run.said()
    assert run.row["loss"]["last"] < run.row["loss"]["first"]
