"""tile=tokens: blocks that compute a few tokens at a time give the same numbers in less memory, or are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.api import task as task_of
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.attention import attention_of_last
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.adapter import Lora
from lowvram.knobs.ckpt import CompilerBudget
from lowvram.knobs.stepping import InBackward
from lowvram.knobs.tile import TiledTokens
from lowvram.knobs.tile.causal import CausalBlocks
from lowvram.knobs.tile.token_run import spans_of
from lowvram.knobs.tile.tokenwise import OutsideBlocks
from lowvram.models.hf import HfConfig
from lowvram.models.transformer import Positions, TransformerConfig
from lowvram.tasks import Auto, Problem
from tests.hugging import tiny
from tests.laboratory import (
    CPU,
    DEVICES,
    KNOBS,
    PROBLEMS,
    InDouble,
    Trained,
    knobs_of,
    make_batch,
    peak_as_measured,
    peak_as_planned,
    relative_error,
    train,
)
from tests.ranks import on_ranks

pytestmark = [pytest.mark.medium, pytest.mark.sampled(2)]

TASK = PROBLEMS["transformer"]  # samples of 8 tokens, rotary positions
SIZES = [32, 32, 27]
BAND = TiledTokens.band


def trained(tile: str | Knob, task: Problem | InDouble = TASK, **choices: str | Knob) -> Trained:
    return train(task, knobs_of(optimizer="sgd", tile=tile, **choices), SIZES, lr=0.01)


def posed(length: int = 8, **fields: Any) -> Problem:
    sizes = {"num_layers": 3, "width": 16, "num_heads": 4, "context": length, **fields}
    return Auto().pose(TransformerConfig(**sizes), DataSpec(Modality.TOKENS, 11, (length,)))


# Numbers

MODELS: dict[str, Callable[[], Problem]] = {
    "rotary": lambda: TASK,
    "learned": lambda: posed(positions=Positions.learned),
    "grouped": lambda: posed(num_kv_heads=2),
    "shared layers": lambda: posed(num_distinct_layers=2, num_layers=4),
    "a window wider than samples": lambda: posed(window=20),
}


@pytest.mark.sampled
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_losses_and_gradients_are_the_same(tokens: int, model: Callable[[], Problem]) -> None:
    task = InDouble(model())
    found, wanted = (trained(tile, task) for tile in (TiledTokens(tokens), "none"))
    assert relative_error({"": torch.stack(found.losses)}, {"": torch.stack(wanted.losses)}) <= 1e-12
    assert 0 < relative_error(found.gradients, wanted.gradients) <= 1e-12
    assert relative_error(found.parameters, wanted.parameters) <= 1e-12


def test_short_samples_are_computed_as_without_to_the_bit() -> None:
    assert relative_error(trained(TiledTokens(8)).parameters, trained("none").parameters) == 0


@pytest.mark.parametrize(
    ("num_tokens", "most"), [(8, 3), (9, 2), (3, 2), (5, 4), (1, 4), (2, 2), (7, 7), (16_384, 1000)]
)
def test_chunks_are_even_and_of_two_tokens_at_least(num_tokens: int, most: int) -> None:
    sizes = [end - begin for begin, end in spans_of(num_tokens, most)]
    assert sum(sizes) == num_tokens
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= max(most, 3)
    assert min(sizes) >= min(2, num_tokens)


@pytest.mark.parametrize("ckpt", ["none", "every1", "selective"])
def test_each_token_is_computed_twice_and_its_keys_once_more(ckpt: str) -> None:
    rig, mlp, keys = assemble(TASK, knobs_of(ckpt=ckpt, tile=TiledTokens(3)), CPU), list[int](), list[int]()
    block = TASK.structure(rig.model).blocks[1]
    block.get_submodule("mlp.up").register_forward_hook(lambda _, inputs, __: mlp.append(inputs[0].shape[1]))
    block.get_submodule("attention.qkv").register_forward_hook(lambda _, inputs, __: keys.append(inputs[0].shape[1]))
    step(rig, make_batch(TASK.spec, 4))
    assert mlp == [3, 3, 2, 2, 3, 3]
    assert keys == [3, 3, 2, 3, 3, 2, 3, 3]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_each_gradient_arrives_once(clip: float | None) -> None:
    task, stepping = InDouble(TASK), InBackward(clip=clip)
    found = trained(TiledTokens(3), task, stepping=stepping)
    wanted = trained("none", task, stepping=stepping.reference())
    assert relative_error(found.parameters, wanted.parameters) <= 1e-12
    rig, calls = assemble(TASK, knobs_of(tile=TiledTokens(3)), CPU), Counter[str]()
    for name, parameter in rig.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([name]))
    step(rig, make_batch(TASK.spec, 4))
    assert calls == dict.fromkeys(dict(rig.model.named_parameters()), 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_pure"])
def test_number_formats_stay_in_their_bands(precision: str) -> None:
    wanted = trained("none", InDouble(TASK)).gradients
    tiles = ("none", TiledTokens(2))
    errors = [relative_error(trained(tile, precision=precision).gradients, wanted) for tile in tiles]
    assert errors[1] <= 1.1 * errors[0] <= KNOBS["precision", precision].band


OTHERS: dict[str, dict[str, str | Knob]] = {
    "adapters": {"adapter": Lora(rank=2)},
    "few weights": {"adapter": "freeze"},
    "4 bits": {"adapter": "qlora"},
    "parts": {"accum": "x4", "ckpt": "every2"},
    "streamed": {"weights": "stream", "offload": "activations"},
    "from the host": {"offload": "parameters"},
    "less saved": {"ckpt": "selective", "logits": "chunked", "norms": "output"},
    "some blocks": {"depth": "layer_drop"},
}


@pytest.mark.parametrize("choices", OTHERS.values(), ids=OTHERS)
def test_with_other_options(choices: dict[str, str | Knob]) -> None:
    task = InDouble(TASK)
    found, wanted = (trained(tile, task, **choices) for tile in (TiledTokens(3), "none"))
    assert found.gradients.keys() == wanted.gradients.keys()
    assert relative_error(found.gradients, wanted.gradients) <= 1e-11
    assert relative_error(found.parameters, wanted.parameters) <= 1e-11


def test_dropout_draws_the_same_masks_in_all_passes() -> None:
    """Other ones than without tiles: the gradients fit the losses."""
    task = InDouble(PROBLEMS["transformer_dropout"])
    rig, batch = assemble(task, knobs_of(tile=TiledTokens(3), optimizer="sgd"), CPU), make_batch(TASK.spec, 8)
    part = Part(batch.inputs, batch.targets)
    weight = TASK.structure(rig.model).blocks[0].get_parameter("attention.qkv.weight")

    def loss() -> Tensor:
        torch.manual_seed(0)
        return rig.criterion(rig.forward(part), part)

    (gradient,) = torch.autograd.grad(loss(), weight)
    direction, size = torch.randn_like(weight), 1e-5
    with torch.no_grad():
        weight.add_(direction, alpha=size)
        above = loss()
        weight.sub_(direction, alpha=2 * size)
        below = loss()
    assert float((above - below) / (2 * size)) == pytest.approx(float((gradient * direction).sum()), rel=1e-6)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("dtype", "band"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
@pytest.mark.parametrize(("heads", "width"), [((4, 4), 16), ((4, 2), 12)])
def test_attention_of_the_last_tokens(
    heads: tuple[int, int], width: int, dtype: torch.dtype, band: float, device: torch.device
) -> None:
    """As the last rows of that of all tokens, with its gradients."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, num, 9, width, generator=draw).to(device, dtype).requires_grad_() for num in (*heads, heads[1])
    )
    options: dict[str, Any] = {"enable_gqa": heads[0] != heads[1]}
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)[:, :, 5:]
    last = attention_of_last(F.scaled_dot_product_attention, q[:, :, 5:], k, v, **options)
    weights = torch.randn(last.shape, generator=draw).to(device, dtype)
    found, wanted = (torch.autograd.grad(each, (q, k, v), weights) for each in (last, whole))
    for one, other in zip((last, *found), (whole, *wanted), strict=True):
        assert relative_error({"": one.float()}, {"": other.float()}) <= band


# Models of others


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "gpt_neox", "opt", "mistral", "gemma", "phi3:fused"])
def test_models_of_transformers(kind: str) -> None:
    task = InDouble(Auto().pose(HfConfig(tiny(kind)), DataSpec(Modality.TOKENS, 300, (9,), 300)))
    found, wanted = (trained(tile, task) for tile in (TiledTokens(4), "none"))
    band = 1e-7 if kind == "gemma" else 1e-12  # whose norms compute in fp32
    assert relative_error(found.gradients, wanted.gradients) <= band


class Reader(nn.Module):
    """A block with causal attention, and perhaps something else by which tokens meet."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.qkv, self.merge, self.up, self.down = (
            how,
            *(nn.Linear(8, n) for n in (24, 8)),
            *(nn.Linear(a, b) for a, b in ((8, 16), (16, 8))),
        )
        self.mix = nn.Conv1d(8, 8, 3, padding=2)
        self.far = nn.Conv1d(8, 8, 2, padding=16, dilation=16)  # farther than a trial's tokens

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean before":
            x = x + (x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]).tanh()
        if self.how == "convolution":
            x = x + self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        if self.how == "far convolution":
            x = x + self.far(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        if self.how == "own positions":
            x = x + torch.arange(x.shape[1], dtype=x.dtype)[:, None].sin()
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = attended(q, k, v, self.how).transpose(1, 2).flatten(2)
        x = x + self.merge(y)
        if self.how == "last token":
            x = x + x[:, -1:]
        return x + self.down(self.up(x).relu())


def attended(q: Tensor, k: Tensor, v: Tensor, how: str) -> Tensor:
    length = q.shape[2]
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    match how:
        case "both ways":
            return F.scaled_dot_product_attention(q, k, v)
        case "products":
            scores = (q @ k.transpose(-1, -2)).masked_fill(~lower, -torch.inf)
            return scores.softmax(-1) @ v
        case "a mask":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=lower)
        case "a window where samples are long" if length > 10:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=lower.triu(-4))
        case "keys the other way round":
            return F.scaled_dot_product_attention(q, k.flip(2), v, is_causal=True)
        case "twice":
            q = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.scaled_dot_product_attention(q, v, k, is_causal=True)
        case _:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def stack(how: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Reader(how) for _ in range(3)), nn.Linear(8, 5))


REFUSED = [
    "mean before",
    "convolution",
    "far convolution",
    "own positions",
    "last token",
    "both ways",
    "products",
    "a mask",
]
REFUSED += ["a window where samples are long", "keys the other way round"]


@pytest.mark.parametrize("how", REFUSED)
def test_tokens_that_meet_otherwise_are_refused(how: str) -> None:
    with pytest.raises(Incompatible, match="tokens meet in the blocks' causal attention alone"):
        assemble(task_of(stack(how), torch.randn(3, 19, 8), blocks="Reader"), knobs_of(tile=TiledTokens(4)), CPU)


@pytest.mark.parametrize("how", ["", "twice"])
def test_a_module_of_the_users_own(how: str) -> None:
    module, inputs = stack(how).double(), torch.randn(3, 19, 8, dtype=torch.float64)
    task = task_of(module, inputs, blocks="Reader")
    loss = lambda: module(inputs).square().sum()  # noqa: E731
    named = {name: each for name, each in module.named_parameters() if "mix" not in name and "far" not in name}
    wanted = dict(zip(named, torch.autograd.grad(loss(), [*named.values()]), strict=True))
    assemble(task, knobs_of(tile=TiledTokens(4)), CPU)
    found = dict(zip(named, torch.autograd.grad(loss(), [*named.values()]), strict=True))
    assert 0 < relative_error(found, wanted) <= 1e-13


def test_a_mask_that_the_trial_has_not_seen_is_refused() -> None:
    task = Auto().pose(HfConfig(tiny("llama")), DataSpec(Modality.TOKENS, 300, (9,), 300))
    rig = assemble(task, knobs_of(tile=TiledTokens(4)), CPU)
    inputs = {"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    rig.model(**inputs)
    inputs["attention_mask"][0, :3] = 0
    with pytest.raises(Incompatible, match=r"mask of padding.*tile=blocks"):
        rig.model(**inputs)
    with torch.no_grad():
        whole = assemble(task, knobs_of(), CPU).model(**inputs)
        assert torch.equal(rig.model(**inputs).logits, whole.logits)


def test_a_backward_pass_that_fails_leaves_torch_as_it_was() -> None:
    rig, attention = assemble(TASK, knobs_of(tile=TiledTokens(3)), CPU), F.scaled_dot_product_attention
    loss = rig.forward(rig.move(make_batch(TASK.spec, 4))).sum()
    handle = TASK.structure(rig.model).blocks[1].get_submodule("mlp.up").register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no more"):
        loss.backward()
    assert F.scaled_dot_product_attention is attention
    handle.remove()
    step(rig, make_batch(TASK.spec, 4))


def fail(*_: object) -> None:
    raise RuntimeError("no more")


@pytest.mark.parametrize("problem", ["resnet", "resnet_group"])
def test_images_are_refused(problem: str) -> None:
    with pytest.raises(Incompatible, match="tile="):
        assemble(PROBLEMS[problem], knobs_of(tile="tokens"), CPU)


def test_positions_are_told_where_a_block_counts_them() -> None:
    rig = assemble(TASK, knobs_of(), CPU)
    found = TASK.structure(rig.model).get(CausalBlocks())
    assert found.told is not None
    assert found.told.argument == "first"
    assert [*found.blocks] == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [("gpt2", ["transformer.ln_f"]), ("llama", ["model.norm"]), ("opt", ["model.decoder.final_layer_norm"])],
)
def test_the_last_norm_computes_chunks_of_tokens_too(kind: str, names: list[str]) -> None:
    task = Auto().pose(HfConfig(tiny(kind)), DataSpec(Modality.TOKENS, 300, (9,), 300))
    rig = assemble(task, knobs_of(), CPU)
    assert [name for name, _ in task.structure(rig.model).get(OutsideBlocks())] == names


# Memory


def test_it_saves_more_than_recomputing_whole_blocks() -> None:
    task = posed(256, width=32, num_kv_heads=1)
    choices = [{"ckpt": "every1"}, {"ckpt": "every1", "tile": KNOBS["tile", "mlp"]}, {"tile": TiledTokens(16)}]
    peaks = [peak_as_measured(task, knobs_of(logits="chunked", **each), 2) for each in choices]
    recomputed, mlps, tiled = (peak.by_kind_max[Kind.ACTIVATIONS] for peak in peaks)
    assert tiled <= 0.65 * mlps <= 0.4 * recomputed


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "choices",
    [{}, {"ckpt": "every1", "stepping": "in_backward"}, {"precision": "bf16"}, {"logits": "chunked"}],
    ids=str,
)
def test_a_plan_is_right_to_the_byte(choices: dict[str, str]) -> None:
    knobs: dict[str, Any] = {**choices, "tile": TiledTokens(10)}
    task = posed(64, width=32)
    planned, found = (peak(task, knobs_of(**knobs), 4) for peak in (peak_as_planned, peak_as_measured))
    assert (planned.peak_bytes, planned.by_kind_max) == (found.peak_bytes, found.by_kind_max)


# With others


@pytest.mark.parametrize("option", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_ranks_train_like_one_process(option: str) -> None:
    task = InDouble(TASK)
    wanted = train(task, knobs_of(optimizer="sgd"), [8, 8])
    for found in on_ranks(train, task, knobs_of(sharding=option, optimizer="sgd", tile=TiledTokens(3)), [8, 8]):
        assert relative_error(found.parameters, wanted.parameters) <= 1e-12


def test_without_compiled() -> None:
    """The model runs eagerly: the compiler's budget is nobody's."""
    rig = assemble(TASK, knobs_of(tile=TiledTokens(3)), CPU)
    assert CompilerBudget(0.0).apply(rig) is rig
    assert not any(module._compiled_call_impl for module in rig.model.modules())


def test_without_whole_calls() -> None:
    """A layer is called with the tokens of a chunk."""
    rig, seen = assemble(TASK, knobs_of(tile=TiledTokens(3)), CPU), list[int]()
    up = TASK.structure(rig.model).blocks[0].get_submodule("mlp.up")
    up.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    rig.forward(rig.move(make_batch(TASK.spec, 4)))
    assert seen == [3, 3, 2]


def test_a_single_token_is_refused() -> None:
    with pytest.raises(BadInput, match=r"tile\.tokens=1: must be at least 2"):
        TiledTokens(tokens=1)
