"""The ledger: exact bytes, each storage once, every byte of the right kind, and nothing left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.ledger import Peak, announce, ledger
from lowvram.core.step import step
from lowvram.knobs.optimizer import SGD, AdamW
from tests.laboratory import CPU, PROBLEMS, InDouble, knobs_of, make_batch

KIB = 1024


# Bytes


def test_bytes_are_exact_and_rounded_up_as_cuda_does() -> None:
    with ledger() as peak:
        kept = [torch.empty(256), torch.empty(1, dtype=torch.uint8), torch.empty(129, dtype=torch.float64)]
        none = torch.empty(0)
    assert peak.peak_bytes == 1024 + 512 + 1536
    del kept, none


def test_the_peak_is_of_what_is_alive_together() -> None:
    with ledger() as peak:
        one = torch.empty(4 * KIB, dtype=torch.uint8)
        del one
        two, three = (torch.empty(3 * KIB, dtype=torch.uint8) for _ in range(2))
        del two
        four = torch.empty(2 * KIB, dtype=torch.uint8)
    assert peak.peak_bytes == 6 * KIB
    del three, four


SHARING: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda x: x.add_(1),
    "view": lambda x: x.view(4, -1),
    "slice": lambda x: x[10:20].t(),
    "detached": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
}


@pytest.mark.parametrize("use", SHARING.values(), ids=SHARING)
def test_what_shares_memory_counts_once(use: Callable[[Tensor], Tensor]) -> None:
    x = torch.zeros(KIB)
    with ledger(inputs=x) as peak:
        y = use(x)
    assert peak.by_kind_max[Kind.INPUTS] == 4 * KIB
    assert peak.peak_bytes == 4 * KIB
    del y


def test_memory_that_is_used_again_is_a_new_birth() -> None:
    with ledger() as peak:
        for _ in range(5):
            torch.empty(KIB)
    assert peak.peak_bytes == 4 * KIB


def test_memory_from_before_counts_once_it_is_named() -> None:
    x, unnamed = torch.zeros(KIB), torch.zeros(KIB)
    with ledger(inputs={"a": [x]}) as peak:
        pass
    assert peak.peak_bytes == peak.by_kind[Kind.INPUTS] == 4 * KIB
    del unnamed


# Kinds

LAYERS, WIDTH = 3, 256
WEIGHT_BYTES = 4 * LAYERS * WIDTH**2


def training(optimizer: torch.optim.Optimizer, model: nn.Module, num_samples: int = 2) -> Peak:
    """A step whose optimizer state is born in it."""
    x = torch.randn(num_samples, WIDTH)
    with ledger(model, optimizer, x) as peak:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return peak


def linear_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.mark.parametrize(
    ("knob", "bytes_per_parameter"),
    [(AdamW(), 16), (SGD(momentum=0.9), 12), (SGD(momentum=0.0), 8)],
    ids=["adamw", "momentum", "sgd"],
)
def test_bytes_per_parameter(knob: AdamW | SGD, bytes_per_parameter: int) -> None:
    """Weights, gradients and state; an optimizer's count of steps, one number a tensor, aside."""
    model = linear_model()
    peak = training(knob.make(list(model.parameters())), model)
    most = {kind: peak.by_kind_max[kind] for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER)}
    steps_bytes = 512 * LAYERS if isinstance(knob, AdamW) else 0
    assert sum(most.values()) - steps_bytes == WEIGHT_BYTES * bytes_per_parameter // 4
    assert most[Kind.PARAMETERS] == most[Kind.GRADIENTS] == WEIGHT_BYTES


def test_kinds_at_the_peak_add_up() -> None:
    model = linear_model()
    peak = training(AdamW().make(list(model.parameters())), model)
    assert sum(peak.by_kind.values()) == peak.peak_bytes
    assert peak.by_kind.keys() == peak.by_kind_max.keys() == set(Kind)
    assert all(peak.by_kind[kind] <= peak.by_kind_max[kind] for kind in Kind)
    assert peak.by_kind_max[Kind.INPUTS] == 2 * WIDTH * 4


def test_activations_are_what_the_forward_pass_makes() -> None:
    model, x = linear_model(), torch.randn(64, WIDTH)
    with ledger(model, inputs=x) as peak:
        y = model(x)
    assert peak.by_kind_max[Kind.ACTIVATIONS] == LAYERS * 64 * WIDTH * 4
    assert peak.by_kind_max[Kind.GRADIENTS] == peak.by_kind_max[Kind.OTHER] == 0
    with torch.no_grad(), ledger(model, inputs=x) as peak:
        y = model(x)
    assert 0 < peak.by_kind_max[Kind.ACTIVATIONS] < LAYERS * 64 * WIDTH * 4  # none is kept
    del y


def test_activations_that_are_computed_again_are_activations() -> None:
    """Inside the backward pass too, beside the gradients that flow there."""
    model, x = linear_model(), torch.randn(64, WIDTH, requires_grad=True)
    one = 64 * WIDTH * 4

    with ledger(model, inputs=x) as forward:
        y = checkpoint(model, x, use_reentrant=False)
    with ledger(model, inputs=[x, y]) as backward:
        y.sum().backward()
    assert 2 * one <= forward.by_kind_max[Kind.ACTIVATIONS] < 3 * one
    assert 3 * one <= backward.by_kind_max[Kind.ACTIVATIONS] < 5 * one  # what two layers save, gradients in and out


def test_gradients_that_accumulate_are_gradients() -> None:
    model, x = linear_model(), torch.randn(2, WIDTH)
    with ledger(model, inputs=x) as peak:
        for _ in range(2):
            model(x).sum().backward()
    assert peak.by_kind_max[Kind.GRADIENTS] == WEIGHT_BYTES


# The same run gives the same bytes.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("choices", [{}, {"ckpt": "every1", "accum": "x4", "precision": "bf16", "optimizer": "sgd"}])
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
def test_three_runs_are_equal_to_the_byte(problem: str, choices: dict[str, str | Knob]) -> None:
    peaks = [measured(problem, choices) for _ in range(3)]
    assert peaks[0] == peaks[1] == peaks[2]
    assert peaks[0].peak_bytes > 0


def measured(problem: str, choices: dict[str, str | Knob]) -> Peak:
    task = PROBLEMS[problem]
    rig, batch = assemble(task, knobs_of(**choices), CPU), make_batch(task.spec, 8)
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak


def test_a_step_under_the_ledger_has_the_same_numbers() -> None:
    task = InDouble(PROBLEMS["transformer_dropout"])
    losses = []
    for watch in (ledger, lambda *_: nothing()):
        rig, batch = assemble(task, knobs_of(ckpt="every1"), CPU), make_batch(task.spec, 8)
        torch.manual_seed(0)
        with watch(rig.model, rig.stepper):
            losses.append(step(rig, batch)[0])
        losses.append(step(rig, batch)[0])
    assert losses[:2] == losses[2:]


@contextmanager
def nothing() -> Iterator[None]:
    yield


# What is left behind: nothing.


@contextmanager
def collector(is_on: bool) -> Iterator[None]:
    (gc.enable if is_on else gc.disable)()
    yield
    gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_left_patched(is_on: bool, fails: bool) -> None:
    model, x = linear_model(), torch.randn(2, WIDTH)
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    num_watched = [weakref.getweakrefcount(storage) for storage in storages]
    with collector(is_on):
        seen = look_at(model, x, fails)
        assert gc.isenabled() == is_on
    assert seen.by_kind_max[Kind.PARAMETERS] == WEIGHT_BYTES
    assert _get_current_dispatch_mode_stack() == []
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert [weakref.getweakrefcount(storage) for storage in storages] == num_watched


def look_at(model: nn.Module, x: Tensor, fails: bool) -> Peak:
    peaks = []
    with suppress(KeyError), ledger(model) as peak:
        peaks.append(peak)
        x.copy_(model(x).detach())
        if fails:
            raise KeyError("in the middle")
    return peaks[0]


def test_a_ledger_holds_no_tensor() -> None:
    with ledger():
        x = torch.empty(KIB)
        alive = weakref.ref(x)
        del x
        assert alive() is None


def test_a_ledger_within_a_ledger() -> None:
    with ledger() as outer:
        one = torch.empty(KIB)
        with ledger() as inner:
            two = torch.empty(2 * KIB)
        assert not gc.isenabled()
        three = torch.empty(3 * KIB)
    assert inner.peak_bytes == 8 * KIB
    assert outer.peak_bytes == 24 * KIB
    assert gc.isenabled()
    del one, two, three


def test_an_update_within_an_update_ends_no_update() -> None:
    """What an optimizer makes after it ran another is still of the update."""

    class Outer(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            inner.step()
            torch.empty(KIB)

    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    inner, outer = torch.optim.SGD([parameter], 0.1), Outer([parameter], {})
    with ledger() as peak:
        outer.step()
        torch.empty(2 * KIB)
    assert peak.by_kind_max[Kind.OTHER] >= 4 * KIB
    assert peak.by_kind_max[Kind.ACTIVATIONS] == 8 * KIB


def test_a_scaled_stepper_has_state_too() -> None:
    """State is found in whatever a stepper wraps around its optimizer's."""
    problem = PROBLEMS["transformer"]
    peaks = {}
    for precision in ("fp32", "fp16"):
        rig, batch = assemble(problem, knobs_of(precision=precision), CPU), make_batch(problem.spec, 8)
        assert step(rig, batch)[1].applied
        with ledger(rig.model, rig.stepper, replace(batch).tensors()) as peaks[precision]:
            step(rig, batch)
    assert peaks["fp16"].by_kind_max[Kind.OPTIMIZER] == peaks["fp32"].by_kind_max[Kind.OPTIMIZER] > 0


def test_what_lies_outside_the_models_device_is_host_memory_and_no_part_of_the_peak() -> None:
    model = nn.Linear(256, 256, bias=False, device="meta")
    with ledger(model) as peak:
        on_device, on_host = torch.empty(1024, device="meta"), torch.empty(2048)
    assert peak.peak_bytes == 256 * 256 * 4 + on_device.nbytes
    assert peak.by_kind_max[Kind.HOST] == on_host.nbytes


def test_a_trial_of_a_model_announces_nothing() -> None:
    with ledger() as peak:
        with without_dispatch_modes():
            hidden = announce(torch.ones(1000), Kind.GRADIENTS)
        assert announce(torch.ones(10), Kind.GRADIENTS).numel() < hidden.numel()
    assert peak.by_kind_max[Kind.GRADIENTS] == 512
