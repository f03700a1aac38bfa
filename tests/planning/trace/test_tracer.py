"""The tracer: reference peaks, phases, ranks, and models that can't be planned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import Incompatible
from lowvram.core.assemble import assemble
from lowvram.core.device import Card
from lowvram.core.fact import Fact
from lowvram.core.kind import Kind
from lowvram.core.knob import Knob, is_compiled, row_shape
from lowvram.core.ledger import Peak, ledger
from lowvram.core.rig import Part
from lowvram.core.step import step
from lowvram.core.structure import Stating
from lowvram.core.values import Fill
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.offload import Activations
from lowvram.knobs.optimizer import External
from lowvram.knobs.sharding import FSDP, ContextParallel, TensorParallel, ZeRO1
from lowvram.knobs.stepping import AfterBackward
from lowvram.models.resnet import BlockKind, ResNetConfig, StemKind
from lowvram.models.transformer import Positions, TransformerConfig
from lowvram.planning.memory.replay import FREE
from lowvram.planning.scaling import TraceScaler
from lowvram.planning.target import Target
from lowvram.planning.trace import fake as paper
from lowvram.planning.trace.events import KINDS, Phase, Trace
from lowvram.planning.trace.fake import CantPlan
from lowvram.planning.trace.tracer import deaths_in_order, trace
from lowvram.planning.worker import without_parts
from lowvram.tasks import Auto, Classifier, LanguageModel
from tests.laboratory import CPU, PROBLEMS, knobs_of, make_batch, my_slice
from tests.ranks import on_ranks
from tests.tiers import first_of

pytestmark = [pytest.mark.medium, pytest.mark.sampled(2)]

KIB, GIB = 2**10, 2**30
A100, T4 = Target(Card("A100", (8, 0), 108)), Target(Card("T4", (7, 5), 40))
GPT2 = TransformerConfig(num_layers=12, width=768, num_heads=12, context=1024, positions=Positions.learned)
TOKENS = DataSpec(Modality.TOKENS, 50257, (1024,))
RESNET50 = ResNetConfig(BlockKind.bottleneck, [3, 4, 6, 3], 64, StemKind.quarter, 224)
IMAGES = DataSpec(Modality.IMAGES, 1000, (3, 224, 224))


class PlainLoss(LanguageModel):
    """With torch's own cross-entropy, whose logarithms of probabilities have the logits' format."""

    def criterion(self, outputs: Tensor, part: Part) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, -2), part.targets.flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("choices", "gib"),
    [({}, 10.54), ({"precision": "bf16"}, 8.03), ({"precision": "bf16", "ckpt": "every1"}, 5.61)],
    ids=str,
)
def test_gpt2_holds_what_another_tracer_says(choices: dict[str, str | Knob], gib: float) -> None:
    """124M parameters, tied, 8 x 1,024 tokens, fused AdamW."""
    sums = trace(PlainLoss(GPT2, TOKENS), knobs_of(**choices), 8, A100).sums()
    assert sums.peak_bytes / GIB == pytest.approx(gib, rel=0.002)


@pytest.mark.parametrize(("precision", "gib", "spared"), [("fp32", 5.462, 0), ("bf16", 3.005, 4 * 64 * 3 * 224**2)])
def test_resnet50_holds_what_another_tracer_says(precision: str, gib: float, spared: int) -> None:
    """With bf16 the backward pass needs the images in bf16 only; that tracer holds them in fp32, too."""
    found = trace(Classifier(RESNET50, IMAGES), knobs_of(precision=precision), 64, A100).sums().peak_bytes
    assert gib * 0.998 - spared / GIB <= found / GIB <= gib * 1.002


def test_exact_probabilities_of_bf16_logits_cost_a_copy_on_a_card() -> None:
    """Half of the fp32 logits: fp32 gradients of them before those in bf16. (fp16 is spared, torch 2.13.)"""
    knobs = knobs_of(precision="bf16")
    one_layer = replace(GPT2, num_layers=1)
    exact, plain = (trace(kind(one_layer, TOKENS), knobs, 8, A100).sums() for kind in (LanguageModel, PlainLoss))
    assert exact.peak_bytes - plain.peak_bytes == pytest.approx(8 * 1024 * 50257 * 2, rel=1e-3)


def test_phases_and_kinds_add_up() -> None:
    found = trace(PROBLEMS["transformer"], knobs_of(), 8, A100)
    sums, steady = found.sums(), found.sums(is_steady=True)
    on_device = sum(sums.by_kind.values()) - sums.by_kind[Kind.HOST]  # the batch
    assert on_device == sums.peak_bytes == max(sums.by_phase.values())
    weights, most = sums.by_kind_max[Kind.PARAMETERS], sums.by_kind_max
    assert weights <= sums.by_phase[Phase.BUILD] <= weights + 4 * KIB  # each is drawn where it stays
    in_update = weights + most[Kind.GRADIENTS] + most[Kind.OPTIMIZER]
    assert (
        in_update <= sums.by_phase[Phase.UPDATE] <= in_update + most[Kind.OTHER] + 64 * KIB
    )  # with every small number
    assert steady.by_phase[Phase.BUILD] == 0
    assert steady.by_phase[Phase.FORWARD] > weights + most[Kind.OPTIMIZER]
    assert steady.peak_bytes <= sums.peak_bytes


def test_largest_tensors_have_names() -> None:
    found = trace(PROBLEMS["transformer"], knobs_of(), 64, A100).largest(1000)
    makers = {large.maker for large in found}
    assert {"token_embedding.weight", "addmm in blocks.0.mlp.up"} <= makers
    assert [large.num_bytes for large in found] == sorted((large.num_bytes for large in found), reverse=True)
    sums = trace(PROBLEMS["transformer"], knobs_of(), 64, A100).sums()
    assert sum(large.num_bytes for large in found) == pytest.approx(sums.peak_bytes, rel=1e-2)


@pytest.mark.parametrize("choices", [{}, {"stepping": "cpu_offload"}, {"offload": "parameters"}], ids=str)
def test_requests_are_what_an_allocator_can_play(choices: dict[str, str | Knob]) -> None:
    """Each storage is freed before it is asked for anew, and nothing of the host is asked for."""
    found = trace(PROBLEMS["transformer"], knobs_of(**choices), 8, A100)
    held, total, peak = dict[int, int](), 0, 0
    for storage, num_bytes, _ in found.requests():
        assert (storage in held) is (num_bytes == FREE)
        total -= -(-held.pop(storage, 0) // 512) * 512
        if num_bytes != FREE:
            held[storage] = num_bytes
            total += -(-num_bytes // 512) * 512
        peak = max(peak, total)
    assert peak == found.sums().peak_bytes


def test_a_storage_that_changes_its_size_is_asked_for_anew() -> None:
    on_device, on_host = KINDS.index(Kind.PARAMETERS), KINDS.index(Kind.HOST)
    events = [(0, 100), (1, 200), (0, 300), (0, 300), (2, 50), (1, 0)]  # a storage, and its bytes from there on
    storages, num_bytes = torch.tensor(events).T
    kinds, work = torch.tensor([on_device, on_device, on_host]), torch.zeros(0, 9, dtype=torch.int64)
    phases, none = torch.zeros(6, dtype=torch.int64), torch.zeros(0, 8, dtype=torch.int64)
    found = Trace(storages, num_bytes, phases, kinds, ["a", "b", "c"], torch.tensor([0, 3, 0]), 0, [], none, [], work)
    asked = [(0, 100, 0), (1, 200, 3), (0, FREE, 0), (0, 300, 0), (1, FREE, 3)]
    assert found.requests() == asked
    assert found.requests([(2, -2, 7), (0, -1, 5)]) == [asked[0], (-1, 5, 0), *asked[1:4], (-2, 7, 0), *asked[4:]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "adafactor", "adamw_8bit", "apollo", "galore"])
def test_what_only_writes_values_is_the_same_where_it_is_worked_out(optimizer: str) -> None:
    task, knobs = PROBLEMS["transformer"], knobs_of(optimizer=optimizer, stepping=AfterBackward(clip=1.0))
    found = trace(task, knobs, 8, A100)
    with patch.object(paper, "only_writes", return_value=False) as asked:
        wanted = trace(task, knobs, 8, A100)
    assert asked.called
    assert found.requests() == wanted.requests()
    assert torch.equal(found.work, wanted.work)


def test_facts_are_those_of_the_card() -> None:
    with pytest.raises(Incompatible, match=r"precision=bf16 needs .* T4 only emulates it: use precision=fp16"):
        trace(PROBLEMS["transformer"], knobs_of(precision="bf16"), 8, T4)
    with pytest.raises(Incompatible, match="allocator=tight needs that the device is the CPU: it is T4 here"):
        trace(PROBLEMS["transformer"], knobs_of(allocator="tight"), 8, T4)
    assert Fact.CUDA not in T4.absent()
    assert trace(PROBLEMS["transformer"], knobs_of(allocator="expandable", precision="tf32"), 8, A100).sums().peak_bytes


def test_what_compiled_code_needs_is_checked_though_it_is_planned_eagerly() -> None:
    plain = trace(PROBLEMS["transformer"], knobs_of(), 8, A100).sums()
    assert trace(PROBLEMS["transformer"], knobs_of(compile="blocks", ckpt="compiler"), 8, A100).sums() == plain
    with pytest.raises(Incompatible, match="ckpt=compiler needs that the model is compiled"):
        trace(PROBLEMS["transformer"], knobs_of(ckpt="compiler", compile="none"), 8, A100)


def test_what_is_compiled_is_labelled() -> None:
    assert is_compiled(knobs_of(compile="blocks").values())
    assert not is_compiled(knobs_of().values())
    assert not is_compiled(knobs_of(compile="torchscript").values())


def test_what_leaves_a_card_is_still_there_while_it_is_copied() -> None:
    """A few storages at a time go, and as many come back before they are asked for; on a CPU each copy is at once."""
    problem = PROBLEMS["resnet"]
    peaks = {
        (target, in_flight): trace(problem, knobs_of(offload=Activations(in_flight=in_flight)), 32, target).sums()
        for target in (A100, Target())
        for in_flight in (1, 4)
    }
    one, four = (peaks[A100, in_flight].peak_bytes for in_flight in (1, 4))
    at_once, also = (peaks[Target(), in_flight].peak_bytes for in_flight in (1, 4))
    assert at_once == also < one < four
    assert len({peaks[A100, in_flight].host_bytes for in_flight in (1, 4)}) == 1  # with the batch
    assert len({peaks[Target(), in_flight].host_bytes for in_flight in (1, 4)}) == 1


@pytest.mark.parametrize("choices", [{"stepping": "cpu_offload"}, {"stepping": "in_backward"}], ids=str)
def test_gradients_that_leave_a_card_are_summed_by_way_of_pinned_memory(choices: dict[str, str | Knob]) -> None:
    """So with several parts a card's host holds more, by what the parameters of one shape take at most."""
    of_card, of_cpu = (
        trace(PROBLEMS["resnet"], knobs_of(accum="x2", **choices), 8, target).sums() for target in (A100, Target())
    )
    assert of_cpu.host_bytes < of_card.host_bytes < 2 * of_cpu.host_bytes


def test_sums_of_weights_that_stay_on_the_host_take_nothing_of_a_card() -> None:
    wide = LanguageModel(TransformerConfig(num_layers=1, width=64, num_heads=2, context=1024, vocab_size=50257), TOKENS)
    knobs = knobs_of(offload="parameters", stepping="in_backward", accum="x2")
    assert trace(wide, knobs, 2, A100).sums(is_steady=True).by_phase[Phase.UPDATE] < 50257 * 64 * 4 / 2


def test_a_plan_leaves_the_process_as_it_was() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    for choices in ({"precision": "tf32"}, {"offload": "parameters"}, {"sharding": "fsdp"}):
        trace(PROBLEMS["resnet"], knobs_of(**choices), 8, Target(A100.card, 2 if "sharding" in choices else 1))
        assert torch.backends.cuda.matmul.fp32_precision == before
        assert not dist.is_initialized()
    assert type(torch.ones(1) + 1) is Tensor


SHARDED: list[dict[str, str | Knob]] = [
    {"sharding": "fsdp", "ckpt": "every1", "accum": "x2"},
    {"sharding": "fsdp", "stepping": "cpu_offload"},
    {"sharding": "fsdp", "offload": "parameters", "accum": "x2"},
    {"sharding": "zero1", "accum": "x2"},
    {"sharding": "tensor", "accum": "x2"},
    {"sharding": TensorParallel(sequence=True), "accum": "x2"},
    {"sharding": "context", "accum": "x2"},
    {"sharding": "context", "ckpt": "every1"},
    {"sharding": FSDP(context=None), "ckpt": "every2"},
    {"sharding": ZeRO1(context=None), "accum": "x2"},
]
IN_ROWS: list[dict[str, str | Knob]] = [
    {"sharding": TensorParallel(tensor=2), "ckpt": "every1"},
    {"sharding": FSDP(tensor=2), "accum": "x2"},
    {"sharding": FSDP(tensor=2, sequence=True), "accum": "x2"},
    {"sharding": TensorParallel(tensor=2, sequence=True), "precision": "bf16"},
    {"sharding": ZeRO1(tensor=2), "accum": "x2"},
    {"sharding": ZeRO1(tensor=2, sequence=True), "ckpt": "every1"},
    {"sharding": ContextParallel(context=2), "precision": "bf16"},
]


def peak_of_a_rank(choices: dict[str, str | Knob]) -> Peak:
    """Of a step after the optimizer's state was born."""
    problem = PROBLEMS["transformer"]
    rig, batch = assemble(problem, knobs_of(**choices), CPU), my_slice(make_batch(problem.spec, 8))
    step(rig, batch)
    with ledger(rig.model, rig.stepper, batch.tensors()) as peak:
        step(rig, batch)
    return peak


@pytest.mark.parametrize("choices", first_of(SHARDED), ids=str)
def test_a_rank_alone_on_paper_is_one_among_real_ones(choices: dict[str, str | Knob]) -> None:
    check_on_paper(choices, 2)


@pytest.mark.slow
@pytest.mark.parametrize("choices", IN_ROWS, ids=str)
def test_a_rank_of_several_rows_on_paper_is_one_among_real_ones(choices: dict[str, str | Knob]) -> None:
    check_on_paper(choices, 4)


def check_on_paper(choices: dict[str, str | Knob], num_ranks: int) -> None:
    real = on_ranks(peak_of_a_rank, choices, num_ranks=num_ranks)[0]
    knobs = knobs_of(**choices)
    target = Target(num_ranks=num_ranks, row=row_shape(knobs.values(), num_ranks))
    paper = trace(PROBLEMS["transformer"], knobs, 8, target).sums(is_steady=True)
    assert paper.peak_bytes == pytest.approx(real.peak_bytes, rel=0.01)
    for kind in (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.HOST):
        assert paper.by_kind_max[kind] == pytest.approx(real.by_kind_max[kind], rel=0.01, abs=1024), kind


MESHES: list[dict[str, str | Knob]] = [
    {"sharding": "zero1"},
    {"sharding": "fsdp"},
    {"sharding": FSDP(replicate=2)},
    {"sharding": FSDP(reshard_after_forward=2)},
    {"sharding": "fsdp", "offload": "parameters"},
    {"sharding": FSDP(tensor=2)},
    {"sharding": TensorParallel(tensor=2, sequence=True)},
    {"sharding": FSDP(context=2)},
    {"sharding": ZeRO1(tensor=2)},
    {"sharding": ZeRO1(context=2)},
    {"offload": "parameters"},
]


@pytest.mark.parametrize("choices", MESHES, ids=str)
def test_a_mesh_of_ranks_takes_nothing_of_a_device(choices: dict[str, str | Knob]) -> None:
    """torch keeps its table of ranks on the host. 512 bytes more were planned for each mesh."""
    num_ranks = 4 if "sharding" in choices else 1
    target = Target(num_ranks=num_ranks, row=row_shape(knobs_of(**choices).values(), num_ranks))
    planned = trace(PROBLEMS["transformer"], knobs_of(**choices), 8, target)
    assert "arange" not in {storage.maker for storage in planned.largest(1000, is_steady=True)}


class Asking(nn.Module):
    """A model that looks at its numbers."""

    def __init__(self, inner: nn.Module, ask: Any) -> None:
        super().__init__()
        self.inner, self.ask = inner, ask
        self.head, self.initialise = inner.head, inner.initialise

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.inner(tokens)
        return self.ask(logits)


def asks_in_words(logits: Tensor) -> Tensor:
    return logits * 2 if logits.mean().item() > 0 else logits


def asks_by_mask(logits: Tensor) -> Tensor:
    return logits + logits[logits > 0].sum()


def asks_outside(logits: Tensor) -> Tensor:
    return logits + torch.from_numpy(logits.detach().numpy())


class AskingProblem(LanguageModel):
    def __init__(self, ask: Any) -> None:
        super().__init__(PROBLEMS["transformer"].model, PROBLEMS["transformer"].spec)
        self.ask = ask

    def make_model(self) -> nn.Module:
        return Asking(super().make_model(), self.ask)

    def stated(self) -> Stating:
        return {}  # what is known of the model inside isn't known of the one around it

    def values(self, model: Any, seed: int) -> Fill:
        fill = super().values(model.inner, seed)
        return lambda name, tensor: fill(name.removeprefix("inner."), tensor)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize(
    ("ask", "line"),
    [
        (asks_in_words, "logits.mean().item() > 0"),
        (asks_by_mask, "logits[logits > 0].sum()"),
        (asks_outside, "logits.detach().numpy()"),
    ],
)
def test_a_model_that_looks_at_its_numbers_cannot_be_planned(ask: Any, line: str, optimizer: str) -> None:
    """The line is told, and Adafactor, which asks for a number of its own, changes nothing about that."""
    with pytest.raises(CantPlan) as told:
        trace(AskingProblem(ask), knobs_of(optimizer=optimizer), 4, A100)
    message = str(told.value)
    assert message.startswith("can't plan this model: ")
    assert "test_tracer.py" in message
    assert line in message
    if ask is not asks_outside:
        assert "depends on the values of a tensor" in message
    assert type(torch.ones(1) + 1) is Tensor


class ReadingProblem(LanguageModel):
    """Its constructor reads numbers that it computes on the CPU, as those with a growing rate of dropped paths do."""

    def make_model(self) -> nn.Module:
        rates = torch.linspace(0, 0.1, 3, device="cpu").tolist()
        assert rates[2] == pytest.approx(0.1)
        return super().make_model()


def test_a_constructor_may_look_at_its_numbers() -> None:
    problem = ReadingProblem(PROBLEMS["transformer"].model, PROBLEMS["transformer"].spec)
    knobs = knobs_of(ckpt="every1")
    assert trace(problem, knobs, 4, A100).sums() == trace(PROBLEMS["transformer"], knobs, 4, A100).sums()
    assert TraceScaler(problem, A100).trace(without_parts(knobs), 1, 4).is_direct


def test_only_deaths_side_by_side_are_put_in_order() -> None:
    lines = [(0, 8), (1, 8), (2, 8), (2, 0), (0, 0), (3, 8), (3, 0), (1, 0)]
    assert deaths_in_order(lines) == [(0, 8), (1, 8), (2, 8), (0, 0), (2, 0), (3, 8), (1, 0), (3, 0)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("accum", "parts"), [("none", 1), ("x4", 4), ("x32", 32)])
def test_only_the_part_that_is_computed_lies_on_a_card(accum: str, parts: int) -> None:
    """The logical batch is in host memory; on a CPU, whose memory is the host's, it is all there."""
    problem, knobs = PROBLEMS["resnet"], knobs_of(accum=accum)
    batch, part = (rounded(make_batch(problem.spec, size)) for size in (32, 32 // parts))
    on_card, on_cpu = (trace(problem, knobs, 32, target).sums().by_kind_max for target in (A100, Target()))
    assert (on_card[Kind.INPUTS], on_card[Kind.HOST]) == (part, batch)
    assert on_cpu[Kind.INPUTS] == batch


def rounded(batch: Part) -> int:
    """The bytes of a batch, each tensor rounded up as torch's allocator does."""
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in batch.tensors())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_torchs_optimizers_update_lists_of_tensors_on_a_card_and_loop_on_the_host(name: str) -> None:
    def kinds(target: Target, stepping: str = "after_backward", **more: Any) -> Any:
        knobs = knobs_of(optimizer=External(f"torch.optim.{name}", args=more), stepping=stepping)
        return trace(wide, knobs, 2, target).sums().by_kind_max

    wide = Auto().pose(TransformerConfig(2, 128, 2, 8), DataSpec(Modality.TOKENS, 64, (8,)))

    looping = kinds(A100, foreach=False)
    assert kinds(A100) == kinds(A100, foreach=True)
    assert kinds(A100)[Kind.OTHER] > looping[Kind.OTHER]
    assert kinds(Target()) == kinds(Target(), foreach=False)
    assert kinds(A100, "cpu_offload") == kinds(A100, "cpu_offload", foreach=False)
