"""logits=chunked: the numbers of whole logits in every format, and memory that does not grow with the targets."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.compat.torch_fake import FakeTensorMode
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, Stage
from lowvram.core.ledger import Peak, ledger
from lowvram.core.rig import IGNORE, Part, Rig
from lowvram.knobs.logits import ChunkedLogits, LazyLogits
from lowvram.knobs.logits.chunked import targets_at_a_time
from lowvram.knobs.precision import Fp16
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto
from tests.laboratory import CPU, DEVICES, PROBLEMS, TOKENS, InDouble, knobs_of, make_batch, relative_error, train

CRITERION = PROBLEMS["transformer"].criterion
WIDTH, NUM_CLASSES, SHAPE = 24, 211, (3, 25)  # 75 targets: no chunk below divides them
CHUNKS = [1, 7, 74, 75, 512]
SUMS = pytest.mark.parametrize("sums_weights", [True, False], ids=["chunked", "tiled"])
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make_targets(shape: tuple[int, ...] = SHAPE) -> Tensor:
    targets = torch.randint(NUM_CLASSES, shape, generator=torch.Generator().manual_seed(1))
    targets[0, 3:] = IGNORE
    return targets


def make_head(dtype: torch.dtype, bias: bool) -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(WIDTH, NUM_CLASSES, bias, dtype=FP64).to(dtype)


def make_hidden(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(*shape, WIDTH, dtype=FP64, generator=draw).to(dtype).requires_grad_()


def loss_of(
    head: nn.Linear,
    hidden: Tensor,
    part: Part,
    chunk_tokens: int | None,
    cast: torch.dtype | None,
    sums_weights: bool = True,
) -> Tensor:
    """The sum, from chunks or (None) from whole logits. `cast`: autocast's dtype."""
    with torch.autocast("cpu", cast) if cast else nullcontext():
        if chunk_tokens is None:
            return CRITERION(head(hidden), part)
        return LazyLogits(hidden, head, chunk_tokens, sums_weights=sums_weights).cross_entropy(part.targets)


def loss_and_gradients(
    chunk_tokens: int | None,
    dtype: torch.dtype,
    cast: torch.dtype | None = None,
    bias: bool = False,
    scale: float = 1.0,
    sums_weights: bool = True,
) -> dict[str, Tensor]:
    """Of the mean loss. `scale`: as a loss scale, taken out again."""
    head, hidden, part = make_head(dtype, bias), make_hidden(dtype), Part(None, make_targets())
    loss = loss_of(head, hidden, part, chunk_tokens, cast, sums_weights)
    (loss / part.num_targets * scale).backward()
    found = {"loss": loss.detach()}
    for name, tensor in {"hidden": hidden, **dict(head.named_parameters())}.items():
        assert tensor.grad is not None
        assert tensor.grad.dtype is dtype
        found[name] = tensor.grad / scale
    return found


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[float]:
    """Relative, of each tensor on its own."""
    return [relative_error({name: found[name]}, {name: wanted[name]}) for name in wanted]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize(("dtype", "band"), [(FP64, 1e-12), (FP32, 2e-6)])
@SUMS
def test_the_numbers_are_those_of_whole_logits(
    sums_weights: bool, dtype: torch.dtype, band: float, chunk_tokens: int, bias: bool
) -> None:
    found = loss_and_gradients(chunk_tokens, dtype, bias=bias, sums_weights=sums_weights)
    assert max(errors(found, loss_and_gradients(None, FP64, bias=bias))) <= band


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [7, 512])
@pytest.mark.parametrize(
    ("dtype", "cast", "scale"), [(FP32, BF16, 1.0), (FP32, FP16, 65536.0), (BF16, None, 1.0)], ids=str
)
@SUMS
def test_sixteen_bits_err_no_more_than_with_whole_logits(
    sums_weights: bool, dtype: torch.dtype, cast: torch.dtype | None, scale: float, chunk_tokens: int, bias: bool
) -> None:
    found, full = (loss_and_gradients(each, dtype, cast, bias, scale, sums_weights) for each in (chunk_tokens, None))
    exact = loss_and_gradients(None, FP64, bias=bias)
    for error, of_full in zip(errors(found, exact)[1:], errors(full, exact)[1:], strict=True):
        assert error <= 1.5 * of_full
    assert errors(found, full)[0] <= 1e-6  # the loss: the same products, the same logarithms


def test_autocast_leaves_double_alone() -> None:
    found, exact = loss_and_gradients(7, FP64, cast=BF16), loss_and_gradients(None, FP64)
    assert max(errors(found, exact)) <= 1e-12


@pytest.mark.parametrize(("chunk_tokens", "sums_weights"), [(500, True), (100, False)])
def test_fp16_neither_loses_rare_classes_nor_overflows(chunk_tokens: int, sums_weights: bool) -> None:
    """Among 4,000 classes that are alike a probability is subnormal in fp16; 500 times the same target adds up to more
    than fp16 holds."""
    head, targets = nn.Linear(4, 4000, bias=False), torch.zeros(500, dtype=torch.long)
    head.weight.data.zero_()
    hidden = torch.full((500, 4), 200.0, requires_grad=True)
    with torch.autocast("cpu", FP16):
        LazyLogits(hidden, head, chunk_tokens, sums_weights=sums_weights).cross_entropy(targets).backward()
    wanted = torch.full((4000, 4), 500 * 200 / 4000)
    wanted[0] -= 500 * 200
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad, wanted, rtol=1e-3, atol=0)


@pytest.mark.parametrize("chunk_tokens", [7, 512])
@SUMS
def test_where_nothing_counts_loss_and_gradients_are_zero(sums_weights: bool, chunk_tokens: int) -> None:
    head, hidden = make_head(FP32, bias=True), make_hidden(FP32)
    logits = LazyLogits(hidden, head, chunk_tokens, sums_weights=sums_weights)
    loss = logits.cross_entropy(torch.full(SHAPE, IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in (hidden, head.weight, head.bias))


def test_a_part_without_samples_has_no_loss() -> None:
    hidden = make_hidden(FP32, (0, 25))
    loss = LazyLogits(hidden, make_head(FP32, bias=True), 7).cross_entropy(torch.zeros(0, 25, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("chunk_tokens", [7, 512])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@SUMS
def test_a_second_backward_pass_gives_the_same(sums_weights: bool, dtype: torch.dtype, chunk_tokens: int) -> None:
    head, hidden = make_head(dtype, bias=True), make_hidden(dtype)
    loss = LazyLogits(hidden, head, chunk_tokens, sums_weights=sums_weights).cross_entropy(make_targets()) / 3
    walk = partial(torch.autograd.grad, loss, [hidden, head.weight, head.bias])
    first = walk(retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()  # as an update may: it must not be what the second pass reads
    assert all(torch.equal(*two) for two in zip(walk(), kept, strict=True))


def test_what_needs_no_gradient_gets_none() -> None:
    head, hidden = make_head(FP32, bias=True), make_hidden(FP32)
    head.weight.requires_grad_(False)
    with ledger(head, inputs=hidden) as peak:
        LazyLogits(hidden, head, 2).cross_entropy(make_targets()).backward()
    assert head.weight.grad is None
    assert hidden.grad is not None
    assert head.bias.grad is not None
    assert peak.by_kind_max[Kind.ACTIVATIONS] < head.weight.nbytes


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("num_classes", [1, 7, 1000, 1025, 50257])
def test_a_log_softmax_in_place_is_the_same_to_the_bit(num_classes: int, device: torch.device) -> None:
    """In 16 bits a chunk's is computed over the fp32 copy of its logits: torch doesn't promise that this is allowed."""
    logits = 10 * torch.randn(33, num_classes, generator=torch.Generator().manual_seed(0)).to(device)
    wanted = torch.log_softmax(logits, -1)
    assert torch.equal(torch.log_softmax(logits, -1, out=logits), wanted)


# Sizes of GPT-2, on tensors without memory


def gpt2_loss(chunk_tokens: int | None, dtype: torch.dtype | None) -> Peak:
    """The ledger of the last layer and the loss of 16 x 512 tokens of GPT-2, forward and backward."""
    with FakeTensorMode():
        head = nn.Linear(768, 50257, bias=False)
        hidden = torch.empty(16, 512, 768, requires_grad=True)
        part = Part(None, torch.zeros(16, 512, dtype=torch.long))
        with ledger(head, inputs=[hidden, part.targets]) as peak:
            loss_of(head, hidden, part, chunk_tokens, dtype).backward()
    return peak


@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_the_loss_of_gpt2_takes_a_tenth_of_its_memory(dtype: torch.dtype | None) -> None:
    chunked, full = gpt2_loss(ChunkedLogits().chunk_tokens, dtype), gpt2_loss(None, dtype)
    weight_bytes = 50257 * 768 * 4
    assert full.by_kind_max[Kind.ACTIVATIONS] > 3e9
    assert chunked.by_kind_max[Kind.ACTIVATIONS] <= 0.1 * full.by_kind_max[Kind.ACTIVATIONS]
    assert chunked.by_kind_max[Kind.GRADIENTS] == -(-weight_bytes // 512) * 512  # the sum over chunks is the gradient


def test_the_gradients_of_one_chunk_are_scaled_where_they_are() -> None:
    """In bf16 the weight's gradient lies there once, whatever is multiplied in fp32."""
    with FakeTensorMode():
        head = nn.Linear(768, 50257, bias=False, dtype=BF16)
        hidden, part = (
            torch.empty(512, 768, dtype=BF16, requires_grad=True),
            Part(None, torch.zeros(512, dtype=torch.long)),
        )
        with ledger(head, inputs=hidden) as forward:
            loss_of(head, hidden, part, 512, None)
        with ledger(head, inputs=hidden) as both:
            loss_of(head, hidden, part, 512, None).backward()
    assert both.peak_bytes <= forward.peak_bytes + 2**20


@pytest.mark.parametrize(("dtype", "cast"), [(BF16, None), (FP32, BF16)], ids=["weights in bf16", "autocast"])
def test_in_16_bits_there_is_one_chunk_as_long_as_that_takes_less(dtype: torch.dtype, cast: torch.dtype | None) -> None:
    """A sum of gradients over chunks takes 4 · 768 bytes of each class, the logits of 1,536 more targets 2 · 1,536."""

    def peak_bytes(num_targets: int) -> int:
        with FakeTensorMode():
            head = nn.Linear(768, 50257, bias=False, dtype=dtype)
            hidden = torch.empty(num_targets, 768, dtype=dtype, requires_grad=True)
            part = Part(None, torch.zeros(num_targets, dtype=torch.long))
            with ledger(head, inputs=hidden) as peak:
                loss_of(head, hidden, part, 512, cast).backward()
        return peak.peak_bytes

    one, several = peak_bytes(512 + 1536), peak_bytes(512 + 1537)
    assert one <= 1.02 * several  # about even: copies of hidden states and such are left out of the rule
    assert peak_bytes(1024) < several - 1e8


@SUMS
def test_hidden_states_that_nothing_counts_may_have_any_values(sums_weights: bool) -> None:
    head, hidden, targets = make_head(FP32, bias=True), make_hidden(FP32), make_targets()
    targets[0, 3] = IGNORE
    gradients = []
    for value in (0.0, torch.inf):
        with torch.no_grad():
            hidden[0, 3] = value
        loss = LazyLogits(hidden, head, 7, sums_weights=sums_weights).cross_entropy(targets)
        gradients.append(torch.autograd.grad(loss, [hidden, *head.parameters()]))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_classes_that_nothing_counts_towards_may_have_any_logits(bias: bool) -> None:
    """The hidden states of targets that don't count are large: their probabilities would overflow."""
    head, hidden, part = make_head(FP32, bias), make_hidden(FP32), Part(None, make_targets())
    with torch.no_grad():
        hidden[0, 3:] *= 1e4
    gradients = [
        torch.autograd.grad(loss_of(head, hidden, part, chunk_tokens, None, sums_weights=False), [hidden, head.weight])
        for chunk_tokens in (7, None)
    ]
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_second_pass_needs_no_sum() -> None:
    """Of GPT-2, in bf16: neither the fp32 sum of the weight's gradients, nor a product beside it."""

    def peak_bytes(sums_weights: bool) -> int:
        with FakeTensorMode():
            head = nn.Linear(768, 50257, bias=False, dtype=BF16)
            hidden = torch.empty(16, 512, 768, dtype=BF16, requires_grad=True)
            part = Part(None, torch.zeros(16, 512, dtype=torch.long))
            with ledger(head, inputs=[hidden, part.targets]) as peak:
                loss_of(head, hidden, part, 512, None, sums_weights).backward()
        return peak.peak_bytes

    assert peak_bytes(False) <= peak_bytes(True) - 0.8 * 50257 * 768 * 4


@pytest.mark.parametrize(
    ("num_targets", "dtype", "sums_weights", "wanted"),
    [
        (2048, BF16, True, 2048),
        (2049, BF16, True, 512),
        (2048, BF16, False, 512),
        (600, FP32, True, 512),
        (0, BF16, True, 1),
    ],
)
def test_targets_at_a_time(num_targets: int, dtype: torch.dtype, sums_weights: bool, wanted: int) -> None:
    assert targets_at_a_time(torch.empty(num_targets, 768), 512, dtype, sums_weights) == wanted


# In a rig


def test_evaluation_never_holds_the_logits_either() -> None:
    head, hidden, targets = make_head(FP32, bias=True), make_hidden(FP32), make_targets()
    part = Part(None, targets)
    with torch.no_grad(), ledger(head, inputs=[hidden, targets]) as peak:
        outputs: Any = LazyLogits(hidden, head, 7)
        loss, correct = outputs.cross_entropy(targets), PROBLEMS["transformer"].num_correct(outputs, part)
    logits = head(hidden)
    torch.testing.assert_close(loss, CRITERION(logits, part).detach())
    assert torch.equal(outputs.argmax(-1), logits.argmax(-1))
    assert correct == (logits.argmax(-1) == targets).sum()
    assert peak.by_kind_max[Kind.ACTIVATIONS] < logits.nbytes / 2
    assert not loss.requires_grad


def test_the_likeliest_class_is_rounded_as_where_the_model_ran() -> None:
    """In bf16 classes tie that fp32 tells apart. Correct answers are counted outside autocast."""
    batch = make_batch(TOKENS, 16)
    found, wanted = (
        assemble(PROBLEMS["transformer"], knobs_of(logits=each, precision="bf16"), CPU) for each in ("chunked", "full")
    )
    with torch.no_grad():
        assert torch.equal(found.forward(batch).argmax(-1), wanted.forward(batch).argmax(-1))


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
def test_uneven_parts_match_the_plain_loop(problem: str) -> None:
    task = InDouble(PROBLEMS[problem])
    chunked = knobs_of(logits=ChunkedLogits(5), accum="x4", ckpt="every2", optimizer="sgd")
    found, wanted = train(task, chunked, [7, 13], lr=0.01), train(task, knobs_of(optimizer="sgd"), [7, 13], lr=0.01)
    assert relative_error(found.gradients, wanted.gradients) <= 1e-12
    assert relative_error(found.parameters, wanted.parameters) <= 1e-12


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings_match_the_plain_loop(tied: bool) -> None:
    config = TransformerConfig(num_layers=1, width=16, num_heads=2, context=8, tied_embeddings=tied)
    task = InDouble(Auto().pose(config, TOKENS))
    found, wanted = (train(task, knobs_of(logits=each), [4, 3]) for each in (ChunkedLogits(5), "full"))
    assert relative_error(found.gradients, wanted.gradients) <= 1e-12


@pytest.mark.parametrize("init_scale", [1.0, 65536.0, 2.0**31])
def test_fp16_skips_the_same_steps(init_scale: float) -> None:
    found, wanted = (
        train(PROBLEMS["transformer"], knobs_of(logits=each, precision=Fp16(init_scale)), [8] * 12)
        for each in ("chunked", "full")
    )
    assert [update.applied for update in found.updates] == [update.applied for update in wanted.updates]
    torch.testing.assert_close(found.losses, wanted.losses, rtol=5e-3, atol=0)


def test_a_compiled_model_ends_with_the_hidden_states_too() -> None:
    task, batch = PROBLEMS["transformer"], make_batch(TOKENS, 4)
    compiled, plain = (assemble(task, knobs_of(logits=each), CPU) for each in ("chunked", "full"))
    compiled.model.compile(backend="eager", fullgraph=True)
    found, wanted = (rig.criterion(rig.forward(batch), batch) for rig in (compiled, plain))
    torch.testing.assert_close(found, wanted)


def test_a_chunk_has_at_least_one_target() -> None:
    with pytest.raises(BadInput, match=r"logits\.chunk_tokens=0: must be at least 1"):
        ChunkedLogits(0)


@dataclass(frozen=True)
class Distilled(Knob):
    """Pulls the logits towards zero: a knob that reads them, as learning from a teacher does."""

    stage = Stage.BUILD
    is_careful: bool = True

    def needs(self) -> frozenset[Fact]:
        return frozenset({Fact.FULL_LOGITS} if self.is_careful else {})

    def apply(self, rig: Rig) -> Rig:
        return replace(rig, criterion=lambda outputs, part: rig.criterion(outputs, part) + outputs.square().sum())


def test_without_full_logits() -> None:
    """A criterion that reads logits never sees any: its term would be lost without a word."""
    task, batch = PROBLEMS["transformer"], make_batch(TOKENS, 4)

    def loss(logits: str, **adapter: Knob) -> Tensor:
        rig = assemble(task, knobs_of(logits=logits, **adapter), CPU)
        return rig.criterion(rig.forward(batch), batch)

    careless = Distilled(is_careful=False)
    assert loss("full", adapter=careless) > loss("full") + 1e-3
    assert abs(loss("chunked", adapter=careless) - loss("chunked")) < 1e-6
    with pytest.raises(Incompatible, match="needs that the logits of a part exist whole, and logits=chunked ends that"):
        loss("chunked", adapter=Distilled())
