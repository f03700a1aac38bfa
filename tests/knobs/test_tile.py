"""tile: chunks of an MLP give the same numbers, are computed twice in all, and hand each gradient over once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks

from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.kind import Kind
from lowvram.core.knob import Exactness, Knob
from lowvram.core.ledger import Peak
from lowvram.core.repeat import Repeatable
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.sharding import TensorParallel
from lowvram.knobs.stepping import InBackward
from lowvram.knobs.stepping.in_backward import Norm
from lowvram.knobs.tile import TiledMLP
from lowvram.knobs.tile.chunks import Inner
from lowvram.knobs.tile.tokenwise import Tiled
from lowvram.models.external import HandedOver
from lowvram.models.hf import HfConfig
from lowvram.models.transformer import TransformerConfig
from lowvram.tasks import Auto, Problem
from tests.hugging import tiny
from tests.knobs.test_sharding_tensor import GROUPED
from tests.laboratory import (
    CPU,
    KNOBS,
    PROBLEMS,
    TOKENS,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    saved_bytes,
    train,
)
from tests.ranks import on_ranks
from tests.test_laws import error_of
from tests.tiers import first_of

pytestmark = [pytest.mark.medium, pytest.mark.sampled(2)]

TASK = PROBLEMS["transformer"]  # 3 blocks, sequences of 8 tokens
SIZES = [32, 32, 27]
BAND = TiledMLP.band


def trained(tile: str | Knob, task: Problem | InDouble = TASK, **choices: str | Knob) -> Trained:
    return train(task, knobs_of(optimizer="sgd", tile=tile, **choices), SIZES, lr=0.01)


# Numbers


@pytest.mark.parametrize(("dtype", "band"), [(torch.float32, BAND), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("tokens", [1, 100, 200])
def test_losses_and_gradients_are_the_same(tokens: int, dtype: torch.dtype, band: float) -> None:
    """With chunks of 1, 3 and 6 of 8 places: the last one is smaller."""
    assert 0 < error_of("tile", TiledMLP(tokens), "transformer", dtype) <= band


def test_with_few_tokens_nothing_changes_to_the_bit() -> None:
    assert error_of("tile", TiledMLP(32 * 8), "transformer", torch.float32) == 0


@pytest.mark.parametrize("ckpt", ["none", "every1", "every2", "selective"])
def test_each_token_is_computed_twice_whatever_the_block_recomputes(ckpt: str) -> None:
    """Where the block is recomputed, its recomputation stops before the MLP."""
    rig, seen = assemble(TASK, knobs_of(ckpt=ckpt, tile=TiledMLP(100)), CPU), Counter[int]()
    for index, block in enumerate(TASK.structure(rig.model).blocks):
        assert isinstance(block.mlp, nn.Module)
        up = block.mlp.get_submodule("up")
        up.register_forward_hook(lambda _, inputs, __, index=index: seen.update({index: inputs[0][..., 0].numel()}))
    step(rig, make_batch(TASK.spec, 32))
    assert seen == dict.fromkeys(range(3), 2 * 32 * 8)


def test_chunks_have_at_most_so_many_tokens() -> None:
    rig, seen = assemble(TASK, knobs_of(tile=TiledMLP(100)), CPU), list[tuple[int, ...]]()
    rig.structure.blocks[0].get_submodule("mlp.up").register_forward_hook(lambda _, x, __: seen.append(x[0].shape))
    step(rig, make_batch(TASK.spec, 32))
    assert seen == 2 * [(32, 3, 16), (32, 3, 16), (32, 2, 16)]


@pytest.mark.parametrize("stepping", [InBackward(), InBackward(clip=0.5, norm=Norm.two_passes)], ids=str)
def test_each_gradient_arrives_once(stepping: InBackward) -> None:
    task = InDouble(TASK)
    found = trained(TiledMLP(100), task, stepping=stepping)
    wanted = trained("none", task, stepping=stepping.reference())
    assert relative_error(found.parameters, wanted.parameters) <= 1e-12
    rig, calls = assemble(TASK, knobs_of(tile=TiledMLP(100)), CPU), Counter[str]()
    for name, parameter in rig.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    step(rig, make_batch(TASK.spec, 32))
    assert calls == dict.fromkeys(dict(rig.model.named_parameters()), 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_number_formats_stay_in_their_bands(precision: str) -> None:
    wanted = trained("none", InDouble(TASK)).gradients
    errors = [relative_error(trained(tile, precision=precision).gradients, wanted) for tile in ("none", TiledMLP(40))]
    assert errors[1] <= 1.1 * errors[0] <= KNOBS["precision", precision].band


def test_autocast_holds_in_both_passes() -> None:
    rig, seen = assemble(TASK, knobs_of(precision="bf16", tile=TiledMLP(100)), CPU), list[torch.dtype]()
    rig.structure.blocks[0].get_submodule("mlp.up").register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    step(rig, make_batch(TASK.spec, 32))
    assert seen == 6 * [torch.bfloat16]


def test_weights_of_16_bits_sum_their_gradients_in_32() -> None:
    torch.manual_seed(0)
    mlp, x = nn.Linear(8, 8).bfloat16(), torch.randn(1, 512, 8, dtype=torch.bfloat16)
    errors = []
    wanted = torch.ones(8, 512, dtype=torch.float64) @ x[0].double()
    for tokens in (512, 1):
        mlp.zero_grad()
        tiled(mlp, tokens)(x).sum().backward()
        assert mlp.weight.grad is not None
        errors.append(float((mlp.weight.grad.double() - wanted).norm() / wanted.norm()))
    assert errors[1] <= 2 * max(errors[0], 2**-9)


@pytest.mark.parametrize("adapter", ["lora", "freeze"])
def test_frozen_weights_get_no_gradient(adapter: str) -> None:
    found, wanted = (trained(tile, adapter=adapter) for tile in (TiledMLP(100), "none"))
    assert found.gradients.keys() == wanted.gradients.keys() < found.parameters.keys()
    assert relative_error(found.gradients, wanted.gradients) <= BAND


# One MLP


def tiled(mlp: nn.Module, tokens: int = 6) -> Tiled:
    return Tiled(Inner(Repeatable(mlp), mlp.forward), tokens)


class Gated(nn.Module):
    """Two inputs, as in Bloom."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(4, 5), nn.Linear(4, 5)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.up(x) * self.gate(x).sigmoid() + residual[..., :1]


@pytest.mark.parametrize("needing", [(True, True), (True, False), (False, True), (False, False)], ids=str)
@pytest.mark.parametrize("shape", [(2, 7, 4), (2, 7, 3, 4), (14, 4), (2, 1, 4), (9, 2, 4)], ids=str)
def test_any_layout_and_any_inputs_that_train(shape: tuple[int, ...], needing: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    mlp = Gated().double()
    results = []
    for call in (mlp, tiled(mlp)):
        inputs = [torch.ones(shape, dtype=torch.float64).cumsum(0).requires_grad_(needs) for needs in needing]
        output = call(*inputs)
        mlp.zero_grad()
        (output * output.detach().cos()).sum().backward()
        results.append([output, *(each.grad for each in (*inputs, *mlp.parameters()))])
    for found, wanted in zip(*results, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_both_passes_draw_the_same_random_numbers() -> None:
    mlp, x = nn.Sequential(nn.Dropout(0.5)), torch.ones(2, 50, 4, requires_grad=True)
    output = tiled(mlp)(x)
    state = torch.get_rng_state()
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, output.detach())
    assert 0.3 < (output == 0).float().mean() < 0.7
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_can_be_walked_twice() -> None:
    mlp, x = nn.Linear(4, 4), torch.ones(2, 7, 4, requires_grad=True)
    loss = tiled(mlp)(x).square().sum()
    first = torch.autograd.grad(loss, [x, mlp.weight], retain_graph=True)
    second = torch.autograd.grad(loss, [x, mlp.weight])
    assert all(map(torch.equal, first, second))


def test_only_the_input_is_kept() -> None:
    mlp, x, kept = nn.Sequential(nn.Linear(4, 400), nn.GELU(), nn.Linear(400, 4)), torch.ones(1, 30, 4), list[int]()
    x.requires_grad_()
    with saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
        tiled(mlp)(x)
    assert kept == [x.numel()]


def test_without_gradients_it_is_cut_as_well() -> None:
    """An evaluation saves memory, too."""
    mlp, seen = nn.Linear(4, 4), list[int]()
    mlp.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    with torch.no_grad():
        output = Tiled(Inner(Repeatable(mlp), mlp.__call__), 6)(torch.ones(2, 7, 4))
    assert not output.requires_grad
    assert seen == [3, 3, 1]


# Models of others


class Expander(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.mix = nn.Linear(16, 16)

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + self.expand(self.mix(x_btd).cumsum(1) / 8)


def expanders() -> nn.Module:
    blocks = (Expander() for _ in range(3))
    return nn.Sequential(nn.Embedding(11, 16), *blocks, nn.Linear(16, 11))


def test_an_external_model_names_its_own() -> None:
    task = Auto().pose(HandedOver(target="expanders", maker=expanders, reads=Modality.TOKENS), TOKENS)
    with pytest.raises(Incompatible, match=r"tile=mlp needs that the task knows the MLPs .* list those in tile\.names"):
        assemble(task, knobs_of(tile="mlp"), CPU)
    with pytest.raises(BadInput, match=r"tile\.names=\['grow'\]: must be names, inside the blocks, of what computes"):
        assemble(task, knobs_of(tile=TiledMLP(names=["grow"])), CPU)
    found = trained(TiledMLP(100, ["expand"]), task, ckpt="every1")
    error = relative_error(found.gradients, trained("none", task).gradients)
    assert 0 < error <= BAND


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "dropout"), [("gpt2", 0.0), ("gpt2", 0.1), ("llama", 0.0), ("bert", 0.0)])
def test_models_of_transformers(kind: str, dropout: float) -> None:
    """With dropout inside the MLP, chunks draw other masks: the loss is about the same, and all is finite."""
    spec = TOKENS if kind != "bert" else DataSpec(Modality.LABELLED_TOKENS, 5, (8,), vocab_size=300)
    task = Auto().pose(HfConfig(tiny(kind), dropout=dropout), spec)
    found, wanted = (trained(tile, task, ckpt="every1") for tile in (TiledMLP(100), "none"))
    error = relative_error(found.gradients, wanted.gradients)
    assert (0 < error <= 2 * BAND) if not dropout else (0.01 < error < 1)


# Memory

LONG = Auto().pose(
    TransformerConfig(num_layers=2, width=32, num_heads=2, context=512), DataSpec(Modality.TOKENS, 11, (512,))
)


def peak_of(**choices: str | Knob) -> Peak:
    return peak_as_measured(LONG, knobs_of(**choices), 4)


def test_the_block_that_is_recomputed_gets_smaller() -> None:
    """All but the MLP stays: attention's tensors, and the block's input, output and their gradients."""
    whole, cut = (peak_of(ckpt="every1", tile=tile).by_kind_max[Kind.ACTIVATIONS] for tile in ("none", TiledMLP(128)))
    assert cut <= 0.7 * whole


@pytest.mark.parametrize("choices", [{}, {"ckpt": "every1", "stepping": "in_backward"}, {"precision": "bf16"}], ids=str)
def test_a_plan_is_right_to_the_byte(choices: dict[str, str]) -> None:
    knobs: dict[str, Any] = {**choices, "tile": TiledMLP(300)}
    planned, found = peak_as_planned(LONG, knobs_of(**knobs), 4), peak_of(**knobs)
    assert (planned.peak_bytes, planned.by_kind_max) == (found.peak_bytes, found.by_kind_max)


def test_selective_keeps_no_product_that_is_computed_again() -> None:
    whole, cut = (
        peak_of(ckpt="selective", tile=tile).by_kind_max[Kind.ACTIVATIONS] for tile in ("none", TiledMLP(128))
    )
    assert cut <= 0.8 * whole


# With others


COMPILED = first_of([("blocks", {"ckpt": "every1"}), ("blocks", {}), ("model", {"ckpt": "every1"}), ("model", {})])


@pytest.mark.usefixtures("compiled_quickly")
@pytest.mark.parametrize(("option", "choices"), COMPILED, ids=str)
@pytest.mark.slow
def test_the_compiler_takes_it_as_one_graph(option: str, choices: dict[str, str]) -> None:
    """Else the rest of the block would silently run uncompiled."""
    counters.clear()
    found = train(TASK, knobs_of(compile=option, tile=TiledMLP(100), **choices), [32])
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] > 0
    wanted = train(TASK, knobs_of(), [32])
    assert relative_error(found.gradients, wanted.gradients) <= KNOBS["compile", option].band


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
def test_compiled_blocks_keep_less() -> None:
    batch = make_batch(TASK.spec, 32)
    whole, cut = (saved_bytes(TASK, knobs_of(compile="blocks", tile=tile), batch) for tile in ("none", TiledMLP(100)))
    assert cut < 0.6 * whole


@pytest.mark.slow
@pytest.mark.parametrize("option", ["fsdp", "ddp"])
def test_ranks_train_like_one_process(option: str) -> None:
    choices: dict[str, str | Knob] = {"optimizer": "sgd", "tile": TiledMLP(30), "ckpt": "every1"}
    task = InDouble(TASK)
    wanted = train(task, knobs_of(optimizer="sgd"), [8, 8])
    for found in on_ranks(train, task, knobs_of(sharding=option, **choices), [8, 8]):
        assert relative_error(found.parameters, wanted.parameters) <= 1e-12


# What it says of itself


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TiledMLP(tokens=0), r"tile\.tokens=0: must be at least 1"),
        (lambda: TiledMLP(names=[]), r"tile\.names='\[\]': must be null .* or a list"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], Knob], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make()


def test_it_is_exact() -> None:
    assert TiledMLP.exactness is Exactness.EXACT


class Unsaid(TiledMLP):
    breaks_always = frozenset()


def losses_with_own_tokens(tiles: list[int]) -> list[list[float]]:
    """On a rank that has a run of the tokens between layers that are split; none where that fails."""
    found: list[list[float]] = []
    for tokens in tiles:
        knobs = knobs_of(sharding=TensorParallel(sequence=True), tile=Unsaid(tokens=tokens))
        try:
            found.append([*map(float, train(InDouble(GROUPED), knobs, [4]).losses)])
        except Exception:  # of ranks whose runs don't fit together
            found.append([])
    return found


def test_without_whole_calls() -> None:
    """Each chunk of an MLP's tokens would be shared out anew, so that the ranks' runs are mixed up."""
    wanted = pytest.approx([*map(float, train(InDouble(GROUPED), knobs_of(), [4]).losses)], rel=1e-12)
    for in_one_call, in_chunks in on_ranks(losses_with_own_tokens, [1024, 8]):  # of 32
        assert in_one_call == wanted
        assert in_chunks != wanted
