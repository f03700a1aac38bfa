"""optimizer=external: optimizers of torch and of the user's own, and what each may be combined with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lowvram
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.rig import Rig
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


class OnlyFp32(SharedNorm):
    """Refuses other dtypes, as many kernels do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if any(parameter.dtype != torch.float32 for parameter in self.param_groups[0]["params"]):
            raise TypeError("only fp32")
        super().step()


class Clipping(torch.optim.SGD):
    """Plain steps with gradients whose norm over all is at most `clip`."""

    def __init__(self, params: Any, lr: float, clip: float) -> None:
        super().__init__(params, lr)
        self.clip = clip

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], self.clip)
        super().step()


class Estimating(SharedNorm):
    """Steps of a size that is estimated from all gradients, and hardly any at first, as Prodigy's are."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.param_groups[0] |= {"size": 1e-6, "total": 0.0}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        first = self.param_groups[0]
        first["total"] += sum(float(each.grad.norm()) for each in first["params"])
        first["size"] = max(first["size"], min(2 * first["size"], first["total"]))
        for parameter in first["params"]:
            parameter.sub_(first["lr"] * first["size"] * parameter.grad.sign())


class CountingInGroups(torch.optim.Optimizer):
    """Adam whose count of steps is in the group, as that of several packages is."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "step": 0})

    def count(self, group: dict[str, Any]) -> int:
        group["step"] += 1
        return group["step"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            step = self.count(group)
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].lerp_(gradient.square(), 0.001)
                root = (state["exp_avg_sq"] / (1 - 0.999**step)).sqrt() + 1e-8
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"] / (1 - 0.9**step), root, value=-group["lr"])


class CountingInAttributes(CountingInGroups):
    num_steps = 0

    def count(self, group: dict[str, Any]) -> int:
        del group
        self.num_steps += 1
        return self.num_steps


class Holding(torch.optim.Optimizer):
    """Updates the parameters that it was made with, whatever is in its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        self.held = list(params)
        super().__init__(self.held, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.held:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


class Halving(torch.optim.SGD):
    """Halves its learning rate after each step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step()
        for group in self.param_groups:
            group["lr"] /= 2


class KeepingItsRate(SharedNorm):
    """Doesn't read the learning rate of its groups."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.lr = lr

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.lr)


def two_rates(params: Any, lr: float) -> Optimizer:
    """A tenth of the learning rate for matrices."""
    params = list(params)
    groups = [
        {"params": [each for each in params if each.ndim > 1], "lr": lr / 10},
        {"params": [each for each in params if each.ndim < 2]},
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr)


def nothing(params: Any, lr: float) -> None: ...


def small_rig(target: str, *words: str, lr: float = 0.01) -> Rig:
    """The rig of a model that is the same at each call."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    task = lowvram.task(model, torch.rand(2, 6), nn.CrossEntropyLoss())
    return lowvram.assemble(task, [f"optimizer=external optimizer.lr={lr} optimizer.target={target}", *words], "cpu")


def small_steps(rig: Rig, indices: range, lrs: Mapping[int, float] | None = None) -> Tensor:
    """All weights after these steps, in one vector."""
    for index in indices:
        draw = torch.Generator().manual_seed(index)
        if lrs is not None:
            rig.stepper.set_lr(lrs[index])
        part = lowvram.Part(torch.randn(4, 6, generator=draw), torch.randint(3, (4,), generator=draw))
        lowvram.step(rig, part)
    return torch.cat([parameter.detach().float().flatten() for parameter in rig.model.parameters()])


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
        ("torch.optim.Adafactor", {Fact.WHOLE_UPDATES}, set()),
        (f"{OWN}.OfRows", {Fact.WHOLE_UPDATES}, set()),
        (f"{OWN}.SharedNorm", {Fact.WHOLE_UPDATES}, {Fact.SEPARATE_UPDATES}),
    ],
)
def test_what_an_update_depends_on_is_found_by_trying(target: str, needs: set[Fact], breaks: set[Fact]) -> None:
    drawn = torch.get_rng_state()
    knob = External(target)
    assert (knob.needs(), knob.breaks()) == (needs, breaks)
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.slow
def test_how_large_steps_are_does_not_matter_to_the_trial() -> None:
    """Small changes of weights near 1 look alike, whatever they depend on; and thresholds lie anywhere."""
    cases = [(f"{OWN}.OfRows", None, (True, False)), (f"{OWN}.SharedNorm", None, (False, False))]
    cases += [(f"{OWN}.Clipping", {"clip": clip}, (False, False)) for clip in (1.0, 300.0)]
    cases += [(f"{OWN}.OnlyFp32", None, (False, False))]
    cases += [(f"{OWN}.Estimating", None, (False, False)), (f"{TORCH}.Adam", None, (True, True))]
    for target, args, wanted in cases:
        for lr in (1.0, 1e-5):
            traits = External(target, lr, args).traits
            assert (traits.is_per_parameter, traits.is_elementwise) == wanted, (target, args, lr)


@pytest.mark.parametrize("other", ["", "stepping=in_backward", "stepping=cpu_offload", "precision=bf16_split"])
def test_groups_keep_the_ratios_of_their_learning_rates(other: str) -> None:
    """The schedule multiplies all of them."""
    model = small_rig(f"{OWN}.two_rates").model
    start = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    rates = dict(enumerate([0.4, 0.2]))
    optimizer = two_rates(model.parameters(), 0.4)
    for index, rate in rates.items():
        draw = torch.Generator().manual_seed(index)
        inputs, targets = torch.randn(4, 6, generator=draw), torch.randint(3, (4,), generator=draw)
        for group, ratio in zip(optimizer.param_groups, (0.1, 1.0), strict=True):
            group["lr"] = ratio * rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    wanted = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) - start
    found = small_steps(small_rig(f"{OWN}.two_rates", *[other] * bool(other), lr=0.4), range(2), rates) - start
    assert relative_error({"": wanted}, {"": found}) < (0.1 if "bf16" in other else 1e-5)


def test_learning_rates_that_an_optimizer_sets_itself_are_not_overwritten() -> None:
    rig = small_rig(f"{OWN}.Halving")
    small_steps(rig, range(2), {0: 0.01, 1: 0.01})
    assert rig.stepper.state_dict()["param_groups"][0]["lr"] == 0.01 / 4
    for refused in (rig, small_rig(f"{OWN}.KeepingItsRate")):
        with pytest.raises(
            Incompatible, match=r" sets its learning rates itself.* by the schedule 0.005\): choose sch"
        ):
            refused.stepper.set_lr(0.005)


@pytest.mark.parametrize("target", [f"{OWN}.CountingInGroups", f"{OWN}.Estimating", f"{OWN}.Halving"])
def test_what_an_optimizer_keeps_in_its_groups_is_saved_and_loaded(target: str) -> None:
    options = ["stepping=after_backward"]
    if "Counting" in target:
        options += ["stepping=in_backward", "stepping=cpu_offload", "precision=bf16_split", "precision=bf16_pure"]
    for other in options:
        first = small_rig(target, other)
        small_steps(first, range(5))
        state, weights = deepcopy(first.stepper.state_dict()), deepcopy(first.model.state_dict())
        wanted = small_steps(first, range(5, 8))
        second = small_rig(target, other)
        second.model.load_state_dict(weights)
        second.stepper.load_state_dict(state)
        assert torch.equal(small_steps(second, range(5, 8)), wanted), other


def test_settings_that_no_step_changes_are_as_configured_after_loading() -> None:
    words = "optimizer.args={weight_decay:0.5}", "optimizer.args={weight_decay:0.25}"
    first, second = (small_rig(f"{OWN}.CountingInGroups {args}") for args in words)
    small_steps(first, range(2))
    second.stepper.load_state_dict(first.stepper.state_dict())
    group = second.stepper.state_dict()["param_groups"][0]
    assert (group["step"], group["weight_decay"]) == (2, 0.25)


@pytest.mark.parametrize("other", ["precision=bf16_pure", "precision=bf16_split"])
def test_counts_in_groups_advance_once_a_step_with_weights_of_fewer_bits(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowvram.knobs.optimizer.external.PIECE_ELEMENTS", 1)  # of each weight, many pieces
    wanted = small_steps(small_rig(f"{TORCH}.Adam", other), range(6))
    assert relative_error({"": wanted}, {"": small_steps(small_rig(f"{OWN}.CountingInGroups", other), range(6))}) < 1e-2


def test_an_optimizer_that_takes_no_stand_ins_is_refused_with_weights_of_fewer_bits() -> None:
    small_steps(small_rig(f"{OWN}.Holding"), range(1))
    with pytest.raises(Incompatible, match=r"Holding can't be given one weight after the other"):
        small_rig(f"{OWN}.Holding", "precision=bf16_split")


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
        (f"{OWN}.CountingInAttributes", None, r"can hold: a new one that loads it makes other steps: keep counts"),
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
