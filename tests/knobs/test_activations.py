"""activations: how exact codes of few bits are, which saved tensors become codes, and that a step is repeatable."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.layers import layer_norms
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.knobs.activations import FewBits, codes, few_bits
from lowvram.knobs.activations.codes import BLOCK_NUMEL, empty_codes, from_codes, read_codes, to_codes, write_codes
from lowvram.knobs.activations.few_bits import CountingStepper, InFewBits
from lowvram.knobs.ckpt import CompilerBudget
from lowvram.knobs.norms import KeepOutput
from lowvram.knobs.stepping import InBackward, Norm
from tests.knobs.test_offload import Moved
from tests.laboratory import (
    CPU,
    PROBLEMS,
    knobs_of,
    leaves_something_behind,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)

EACH = pytest.mark.parametrize("bits", [8, 4, 2])
MODELS = pytest.mark.parametrize("problem", ["transformer", "resnet"])


# The codes by themselves


def read_back(values: Tensor, bits: int, seed: int = 1) -> Tensor:
    kept, found = empty_codes(len(values), bits, values.device), torch.empty_like(values)
    write_codes(*kept, values, bits, seed)
    read_codes(found, *kept, bits)
    return found


def steps_of(values: Tensor, bits: int) -> Tensor:
    """The distance of two levels in each block (b, 1), at least."""
    blocks = values.double().view(-1, BLOCK_NUMEL)
    return (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / (2**bits - 1)


@pytest.mark.sampled
@EACH
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_number_becomes_one_of_its_two_neighbours_right_on_average(bits: int, scale: float) -> None:
    exact = torch.randn(20 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(1)) * scale
    draws = torch.stack([read_back(exact, bits, 10_000 * draw).double() for draw in range(500)])
    steps = steps_of(exact, bits) * 1.01 + exact.double().abs().view(-1, BLOCK_NUMEL).amax(1, keepdim=True) / 100
    errors = (draws - exact.double()).view(500, -1, BLOCK_NUMEL)
    assert (errors.abs() <= steps).all()
    assert (errors.mean(0).abs() <= 5 * steps / 2 / math.sqrt(500)).all()
    at_most_two = [len(set(each.tolist())) for each in draws.T]
    assert max(at_most_two) == 2


@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zeros_and_positive_numbers_behind_a_relu_stay_what_they_are(bits: int, dtype: torch.dtype) -> None:
    """However small beside the others: ReLU's gradient depends on it."""
    drawn = torch.randn(40 * BLOCK_NUMEL, generator=torch.Generator().manual_seed(1))
    exact = F.relu(drawn * torch.logspace(-5, 3, len(drawn))).to(dtype)
    found = read_back(exact, bits)
    assert torch.equal(found > 0, exact > 0)
    assert torch.equal(found[exact == 0], exact[exact == 0])


@EACH
def test_equal_numbers_are_exact_up_to_bf16(bits: int) -> None:
    assert read_back(torch.zeros(100), bits).tolist() == [0.0] * 100
    assert read_back(torch.full((128,), 1.5), bits).tolist() == [1.5] * 128


@EACH
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bits: int, bad: float) -> None:
    exact = torch.linspace(-1, 1, 3 * BLOCK_NUMEL)
    exact[70] = bad
    found = read_back(exact, bits)
    assert not found[70].isfinite()
    assert found[:64].isfinite().all()


@EACH
def test_pieces_give_the_bits_of_the_whole(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "PIECE_NUMEL", 2 * BLOCK_NUMEL)
    exact = torch.randn(5 * BLOCK_NUMEL + 7)
    whole, found = empty_codes(len(exact), bits, CPU), torch.empty_like(exact)
    to_codes(*whole, exact, bits, 3)
    from_codes(found, *whole, bits)
    assert torch.equal(found, read_back(exact, bits, 3))


@EACH
def test_a_block_takes_its_bits_and_four_bytes(bits: int) -> None:
    taken = sum(each.nbytes for each in empty_codes(10 * BLOCK_NUMEL, bits, CPU))
    assert taken == 10 * (8 * bits + 4)


@pytest.mark.slow
@EACH
def test_compiled_they_are_the_same(bits: int) -> None:
    """As a card runs them."""
    exact = torch.randn(1000)
    plain, compiled = (empty_codes(1000, bits, CPU) for _ in range(2))
    to_codes(*plain, exact, bits, 3)
    torch.compile(to_codes, dynamic=True)(*compiled, exact, bits, 3)
    assert all(map(torch.equal, plain, compiled))
    values, others = torch.empty(1000), torch.empty(1000)
    from_codes(values, *plain, bits)
    torch.compile(from_codes, dynamic=True)(others, *plain, bits)
    torch.testing.assert_close(values, others, rtol=1e-6, atol=1e-6)


# Which saved tensors become codes

WIDTH = 64


class Watched:
    """Counts the storages that become codes, and how often they are read back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[int] = []
        self.read: list[int] = []
        write, read = few_bits.write_codes, few_bits.read_codes
        monkeypatch.setattr(few_bits, "write_codes", self.noted(write, self.written, 2))
        monkeypatch.setattr(few_bits, "read_codes", self.noted(read, self.read, 0))

    def noted(self, operator: Callable[..., None], numels: list[int], place: int) -> Callable[..., None]:
        def call(*args: Any) -> None:
            numels.append(args[place].numel())
            operator(*args)

        return call


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def run(model: nn.Module, x: Tensor, function: Callable[[Tensor], Tensor], min_bytes: int = 1024) -> Tensor:
    part = Part(x, torch.zeros(len(x), dtype=torch.long))
    with InFewBits(model, CPU, min_bytes, 8, lambda: 1).active(part):
        return function(model(x)).square().sum()


def test_weights_inputs_and_small_tensors_stay(watched: Watched) -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH)
    run(model, x, lambda y: y[0].clone()).backward()  # of the saved: weight, input, a row of 256 bytes
    assert watched.written == watched.read == []
    assert model.weight.grad is not None


def test_what_needs_no_gradient_stays(watched: Watched) -> None:
    """A mask, a table of angles; attention's logarithm of a sum, whose error would be one of an exponent."""
    model, x, mask = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH), torch.full((32, WIDTH), -math.inf)
    run(model, x, lambda y: y + (mask.exp() * y)).backward()
    assert watched.written == [32 * WIDTH]  # what is squared

    def attend(y: Tensor) -> Tensor:
        heads = y.view(1, 1, 32, WIDTH)
        return F.scaled_dot_product_attention(heads, heads, heads)

    watched.written.clear()
    run(model, x, attend, min_bytes=1).backward()
    assert watched.written == [32 * WIDTH] * 2  # the heads and the result, which is squared


def test_views_of_one_storage_become_codes_once_and_are_read_back_once(watched: Watched) -> None:
    """As the parts of one projection to queries, keys and values."""
    model, x = nn.Linear(WIDTH, 3 * WIDTH, bias=False), torch.randn(32, WIDTH)

    def attend(qkv: Tensor) -> Tensor:
        queries, keys, values = qkv.view(1, 4, 8, 3 * WIDTH).split(WIDTH, 3)
        return F.scaled_dot_product_attention(queries, keys, values)

    run(model, x, attend).backward()
    assert watched.written == [3 * 32 * WIDTH, 32 * WIDTH]
    assert sorted(watched.read) == [32 * WIDTH, 3 * 32 * WIDTH]


def test_a_relus_result_and_the_next_layers_input_are_the_same_codes(watched: Watched) -> None:
    model, x = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
        torch.randn(32, 64),
    )
    run(model, x, lambda y: y).backward()
    assert watched.written == [32 * WIDTH] * 2  # that, and what is squared


def test_a_tensor_with_gaps_stays(watched: Watched) -> None:
    """What was never written between its numbers could be nan, and so its whole block."""
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(32, WIDTH)

    def into_gaps(y: Tensor) -> Tensor:
        padded = torch.empty(32, 2 * WIDTH).fill_(math.nan)[:, :WIDTH].detach()
        return padded.copy_(y.detach()).requires_grad_() * y

    run(model, x, into_gaps).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()


def test_without_a_backward_pass_nothing_becomes_codes(watched: Watched) -> None:
    task = PROBLEMS["transformer"]
    rig = assemble(task, knobs_of(activations="int8"), CPU)
    with torch.no_grad():
        rig.forward(make_batch(task.spec, 32))
    assert watched.written == []


@MODELS
def test_of_a_recomputed_block_only_the_input_becomes_codes(problem: str, watched: Watched) -> None:
    task = PROBLEMS[problem]
    rig, sizes = assemble(task, knobs_of(activations=FewBits(min_bytes=1), ckpt="every1"), CPU), []
    blocks = task.structure(rig.model).blocks
    for block in blocks:
        block.register_forward_pre_hook(lambda _, inputs: sizes.append(inputs[0].numel()))
    loss = rig.criterion(rig.forward(part := make_batch(task.spec, 32)), part)
    assert [numel for numel in watched.written if numel in sizes][: len(blocks)] == sizes
    num_written = len(watched.written)
    loss.backward()
    assert len(watched.written) == num_written


def test_what_is_offloaded_are_the_codes() -> None:
    moved = {}
    for option in ("full", "int8", "int4"):
        task, before = PROBLEMS["transformer"], Moved()
        step(assemble(task, knobs_of(activations=option, offload="activations"), CPU), make_batch(task.spec, 64))
        moved[option] = before.bytes[0]
    assert moved["int4"] < 0.6 * moved["int8"] < 0.3 * moved["full"]


@pytest.mark.parametrize("offload", ["none", "activations"])
def test_offloaded_codes_are_the_same_codes(offload: str) -> None:
    alone, together = (
        train(PROBLEMS["resnet"], knobs_of(activations="int8", offload=which), [32, 27]) for which in ("none", offload)
    )
    assert relative_error(alone.gradients, together.gradients) == 0


# Steps


@pytest.mark.sampled(3)
@pytest.mark.parametrize("problem", ["transformer_dropout", "resnet"])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_forward_pass_is_exact_and_gradients_are_right_on_average(bits: int, problem: str) -> None:
    """With dropout, too: the rounding draws from no generator of torch's."""
    task = PROBLEMS[problem]
    wanted = train(task, knobs_of(), [32])
    draws = [train(task, knobs_of(activations=FewBits(bits, 1, seed)), [32]) for seed in range(16)]
    assert all(found.losses == wanted.losses for found in draws)
    mean = {name: sum((found.gradients[name] for found in draws), torch.zeros(())) / 16 for name in wanted.gradients}
    errors = [relative_error(found.gradients, wanted.gradients) for found in draws]
    assert min(errors) > 0
    assert relative_error(mean, wanted.gradients) < 0.5 * max(errors)


def test_a_resumed_step_rounds_as_it_would_have() -> None:
    task = PROBLEMS["transformer"]
    first, second = make_batch(task.spec, 32, 0), make_batch(task.spec, 32, 1)
    knobs = knobs_of(activations="int4", accum="x2", precision="fp16")
    rig, resumed = (assemble(task, knobs, CPU) for _ in range(2))
    step(rig, first)
    weights, state = deepcopy(rig.model.state_dict()), deepcopy(rig.stepper.state_dict())
    step(rig, second)
    resumed.model.load_state_dict(weights)
    resumed.stepper.load_state_dict(state)
    step(resumed, second)
    assert relative_error(resumed.model.state_dict(), rig.model.state_dict()) == 0
    forgetful = assemble(task, knobs, CPU)
    forgetful.model.load_state_dict(weights)
    forgetful.stepper.load_state_dict({**state, "num_steps": 0})
    step(forgetful, second)
    assert relative_error(forgetful.model.state_dict(), rig.model.state_dict()) > 0


def test_each_part_and_each_step_rounds_by_other_numbers() -> None:
    rig = assemble(PROBLEMS["transformer"], knobs_of(activations="int8"), CPU)
    assert isinstance(rig.stepper, CountingStepper)
    seeds = []
    for _ in range(3):
        rig.stepper.begin(2)
        seeds += [rig.stepper.next_seed() for _ in range(5)]
        rig.stepper.update()
    assert len(set(seeds)) == 15


def test_two_passes_over_one_graph_read_the_same_numbers() -> None:
    clip = InBackward(clip=1e9, norm=Norm.two_passes)  # which changes nothing
    found, wanted = (
        train(PROBLEMS["resnet"], knobs_of(activations="int8", stepping=stepping, optimizer="sgd"), [32, 27], lr=0.01)
        for stepping in (clip, InBackward())
    )
    assert relative_error(found.gradients, wanted.gradients) < 1e-6


@pytest.mark.sampled(4)
@MODELS
@pytest.mark.parametrize(
    "others", [{}, {"ckpt": "every2"}, {"offload": "activations"}, {"precision": "bf16", "accum": "x2"}], ids=str
)
def test_the_plan_is_what_is_measured(problem: str, others: dict[str, str]) -> None:
    choices: dict[str, str | Knob] = {"activations": "int8", **others}
    planned, found = (
        peak_as_planned(PROBLEMS[problem], knobs_of(**choices), 64),
        peak_as_measured(PROBLEMS[problem], knobs_of(**choices), 64),
    )
    assert found.by_kind_max[Kind.ACTIVATIONS] == planned.by_kind_max[Kind.ACTIVATIONS]


@pytest.mark.parametrize("bits", [0, 1, 3, 16])
def test_other_numbers_of_bits_are_refused(bits: int) -> None:
    with pytest.raises(BadInput, match=rf"activations\.bits={bits}: must be 8, 4 or 2"):
        FewBits(bits)


def test_no_size_is_refused() -> None:
    with pytest.raises(BadInput, match=r"activations\.min_bytes=0: must be at least 1"):
        FewBits(min_bytes=0)


def test_without_compiled() -> None:
    """The model runs eagerly: the compiler's budget is nobody's."""
    rig = assemble(PROBLEMS["transformer"], knobs_of(activations="int8"), CPU)
    assert CompilerBudget(0.0).apply(rig) is rig
    assert not any(module._compiled_call_impl for module in rig.model.modules())


def test_without_exact_activations() -> None:
    """A norm that computes its normalised input from its output divides the error of the codes by its weights. In a
    block of 64 numbers the large ones set the error, the small weight divides it."""
    task = PROBLEMS["transformer"]

    def gradients(*extra: Knob, **choices: str) -> dict[str, Tensor]:
        rig = assemble(task, knobs_of(**choices), CPU)
        for knob in extra:
            rig = knob.apply(rig)
        for norm in layer_norms(rig.model):
            with torch.no_grad():
                norm.weight[::2] = 0.01
        batch = make_batch(task.spec, 32)
        rig.stepper.begin(1)
        rig.criterion(rig.forward(batch), batch).backward()
        return {name: each.grad for name, each in rig.model.named_parameters() if each.grad is not None}

    exact = gradients()
    usual = relative_error(gradients(activations="int8"), exact)
    assert relative_error(gradients(KeepOutput(), activations="int8"), exact) > 3 * usual


def test_without_undoable_steps() -> None:
    """The next step rounds by other random numbers, also after an update that was left out."""
    assert leaves_something_behind(activations="int8")
