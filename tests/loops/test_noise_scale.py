"""train.noise_scale: what is found where it is known, and that measuring it changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.knob import Knob
from lowvram.core.ledger import ledger
from lowvram.core.mesh import data_ranks
from lowvram.core.probes.blocks import FoundBlocks
from lowvram.core.rig import IGNORE, Part, Task
from lowvram.core.step import step
from lowvram.core.structure import Blocks, Structure
from lowvram.core.values import Fill
from lowvram.knobs.accum import Parts
from lowvram.knobs.optimizer import SGD
from lowvram.knobs.precision import Fp16
from lowvram.loops.noise_scale import HIDDEN, NO_NOISE, SINGLE, Measured, estimates
from lowvram.loops.session import Session
from lowvram.loops.train import Train
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch
from tests.loops.sessions import Told
from tests.ranks import on_ranks

MakeSession = Callable[..., Session]
WIDTH, DISTANCE, SPREAD = (
    1000,
    0.3,
    0.5,
)  # of weights from the best ones; of samples around these
SCALE = (SPREAD / DISTANCE) ** 2  # tr(S) / |G|**2


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, samples: Tensor) -> Tensor:
        return (self.weight - samples).square().sum(1) / 2


def fill(name: str, tensor: Tensor) -> None:
    tensor.detach().fill_(DISTANCE)


class Quadratic(Task):
    """Samples are normally distributed around 0, and the gradient of each is the weights less the sample."""

    def make_model(self) -> nn.Module:
        return Point()

    def values(self, model: nn.Module, seed: int) -> Fill:
        return fill

    def criterion(self, outputs: Tensor, part: Part) -> Tensor:
        return outputs[part.targets != IGNORE].sum()

    def structure(self, model: nn.Module) -> Structure:
        return Structure(model, self.call, no_inputs, no_inputs, {Blocks(): lambda known: FoundBlocks((), None, True)})


def no_inputs(num_samples: int) -> Any:
    raise NotImplementedError


def batch_of(num_samples: int, seed: int, share_ignored: float) -> Part:
    draw = torch.Generator().manual_seed(seed)
    targets = torch.zeros(num_samples, dtype=torch.int64)
    targets[torch.rand(num_samples, generator=draw) < share_ignored] = IGNORE
    return Part(SPREAD * torch.randn(num_samples, WIDTH, generator=draw), targets)


def found_of(
    choices: dict[str, str | Knob],
    num_steps: int,
    num_samples: int = 32,
    share_ignored: float = 0.0,
    num_in_batch: int | None = None,
) -> Measured:
    found = Measured()
    knobs = {**knobs_of(optimizer=SGD(lr=1e-12, momentum=0.0), **choices), **found.knobs()}
    rig = assemble(Quadratic(), knobs, CPU)
    for seed in range(num_steps):
        batch = batch_of(num_samples, num_steps * data_ranks().rank + seed, share_ignored)
        step(rig, replace(batch, num_in_batch=num_in_batch))
    return found


@pytest.mark.parametrize("num_steps", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_on_a_quadratic_it_is_the_known_one(num_steps: int) -> None:
    value = found_of({"accum": Parts(4)}, num_steps).value()
    assert value == pytest.approx(SCALE, rel=0.1)


@pytest.mark.parametrize(
    ("choices", "num_samples"),
    [
        ({"accum": Parts(2)}, 32),
        ({"accum": Parts(8)}, 45),  # parts of 6 and of 5
        ({"accum": Parts(4), "precision": Fp16(init_scale=1024.0)}, 32),
        ({"accum": Parts(4), "precision": Fp16(init_scale=4.0, growth_interval=20)}, 32),
    ],
    ids=str,
)
def test_neither_parts_nor_a_loss_scale_matter(choices: dict[str, str | Knob], num_samples: int) -> None:
    assert found_of(choices, 100, num_samples).value() == pytest.approx(SCALE, rel=0.1)


def test_it_is_per_sample_although_targets_differ() -> None:
    """Of samples half of which don't count, twice as many are needed."""
    value = found_of({"accum": Parts(4)}, 100, 64, share_ignored=0.5).value()
    assert value == pytest.approx(2 * SCALE, rel=0.1)


def on_this_rank(choices: dict[str, str | Knob], sizes: list[int]) -> float | None:
    num_in_batch = None if len(set(sizes)) == 1 else sum(sizes)
    return found_of(choices, 50, sizes[data_ranks().rank], num_in_batch=num_in_batch).value()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[16, 16], [7, 6, 6]])
def test_with_ddp_it_is_over_all_ranks(sizes: list[int]) -> None:
    values = on_ranks(on_this_rank, {"sharding": "ddp", "accum": Parts(2)}, sizes, num_ranks=len(sizes))
    assert values == [pytest.approx(SCALE, rel=0.1)] * len(sizes)
    assert len(set(values)) == 1


def test_the_estimates_are_the_papers() -> None:
    """Appendix A.1 of McCandlish et al. (2018)."""
    small, large, b, whole = 5.0, 3.0, 8, 32
    trace, square = estimates(
        torch.tensor(small * (b / whole) ** 2).double(),
        torch.tensor(b / whole).double(),
        torch.tensor(large).sqrt(),
        32,
    )
    assert float(square) == pytest.approx((whole * large - b * small) / (whole - b))
    assert float(trace) == pytest.approx((small - large) / (1 / b - 1 / whole))


def losses_and_peak(choices: dict[str, Any], found: Measured | None) -> tuple[list[float], int]:
    task = PROBLEMS["transformer"]
    rig = assemble(task, {**knobs_of(**choices), **(found.knobs() if found else {})}, CPU)
    losses = [float(step(rig, make_batch(task.spec, 32, seed))[0]) for seed in range(3)]
    batch = make_batch(task.spec, 32)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return losses, peak.peak_bytes


@pytest.mark.parametrize("choices", [{"accum": "x4"}, {"accum": "x4", "ckpt": "every1", "precision": "fp16"}], ids=str)
def test_measuring_changes_no_loss_and_takes_no_memory(choices: dict[str, str]) -> None:
    found = Measured()
    (losses, peak_bytes), (plain, plain_bytes) = losses_and_peak(choices, found), losses_and_peak(choices, None)
    assert losses == plain
    assert peak_bytes - plain_bytes <= 2 * 512  # of two numbers
    assert found.num_steps == 4


@pytest.mark.parametrize("model", ["transformer", "resnet"])
def test_a_run_has_it_in_its_rows(make_session: MakeSession, model: str) -> None:
    told = Told()
    row = Train().run(make_session(model, told=told, choices={"accum": "x2"}, noise_scale=True, steps=12))
    logged = told.values("noise_scale")
    value = row["gradient"].get("noise_scale")
    assert (value is None) == (row["gradient"].get("noise_scale_reason") in (HIDDEN, NO_NOISE))
    assert value is None or (logged[-1] == (12, value) and value > 0)


def test_a_single_part_has_none_and_the_row_says_why(
    make_session: MakeSession, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told()
    row = Train().run(make_session(told=told, noise_scale=True))
    assert row["gradient"] == {"noise_scale_reason": SINGLE}
    assert f"noise scale: unknown: {SINGLE}\n" in capsys.readouterr().out
    assert told.values("noise_scale") == []
    assert "gradient" not in Train().run(make_session())


def test_a_resumed_run_goes_on_with_its_averages() -> None:
    whole, first, second = (Measured() for _ in range(3))
    take_in(whole, range(8))
    take_in(first, range(5))
    second.restore(first.state())
    take_in(second, range(5, 8))
    assert second.value() == whole.value()
    second.restore({})  # of a run that hadn't measured it


def take_in(found: Measured, numbers: Sequence[int]) -> None:
    for number in numbers:
        found.take_in(torch.tensor(10.0 + number).double(), torch.tensor(2.0).double())


@pytest.mark.parametrize(("trace", "square", "reason"), [(2.0, -1.0, HIDDEN), (-1.0, 2.0, NO_NOISE)])
def test_estimates_below_zero_are_no_value(trace: float, square: float, reason: str) -> None:
    found = Measured()
    found.take_in(torch.tensor(trace).double(), torch.tensor(square).double())
    assert found.value() is None
    assert found.metrics() == {}
    assert found.fields() == {"gradient": {"noise_scale_reason": reason}}


def test_what_is_not_finite_does_not_count() -> None:
    found = Measured()
    take_in(found, range(3))
    before = found.value()
    found.take_in(torch.tensor(torch.inf).double(), torch.tensor(1.0).double())
    assert found.value() == before


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        (
            {"stepping": "in_backward"},
            "every gradient is alive when the update runs, and stepping=in_backward ends that",
        ),
        (
            {"stepping": "cpu_offload"},
            "every gradient is alive when the update runs, and stepping=cpu_offload ends that",
        ),
        (
            {"stepping": "zeroth_order"},
            "the backward pass of a part is one call of autograd, and stepping=zeroth_order ends that",
        ),
        ({"offload": "parameters"}, "the optimizer updates whole parameters, and offload=parameters ends that"),
    ],
    ids=str,
)
def test_what_has_no_gradient_to_measure_is_refused(choices: dict[str, str], why: str) -> None:
    with pytest.raises(Incompatible, match=rf"^train\.noise_scale=true needs that {why}$"):
        assemble(PROBLEMS["transformer"], {**knobs_of(**choices), **Measured().knobs()}, CPU)
