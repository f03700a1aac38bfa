"""`import lowvram`: knobs, plans and measurements for somebody's own loop."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowvram
from lowvram.api import cross_entropy
from lowvram.compat.torch_trees import tree_leaves
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.knob import Knob
from lowvram.knobs.ckpt import RecomputeEvery
from lowvram.knobs.optimizer import External
from lowvram.knobs.precision import Bf16
from tests.yours import TwoHeads, TwoLosses

TOKENS = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
BATCH = lowvram.Part(TOKENS[:, :-1], TOKENS[:, 1:])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(16, 2, 64, dropout=0.0, batch_first=True) for _ in range(3)]
    return nn.Sequential(nn.Embedding(11, 16), *layers, nn.Linear(16, 11))


def plain_gradients() -> dict[str, Tensor]:
    module = model()
    nn.functional.cross_entropy(module(BATCH.inputs).flatten(0, 1), BATCH.targets.flatten()).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def test_a_knob_in_a_loop_of_ones_own_changes_memory_and_not_the_gradients() -> None:
    module = model()
    with lowvram.ledger(model()) as plain:
        pass
    peaks = []
    for knobs in ([], ["ckpt=every1"]):
        lowvram.assemble(lowvram.task(module, BATCH.inputs), knobs, "cpu")
        module.zero_grad()
        with lowvram.ledger(module, inputs=BATCH.inputs) as peak:
            loss = nn.functional.cross_entropy(module(BATCH.inputs).flatten(0, 1), BATCH.targets.flatten())
            loss.backward()
            del loss
        peaks.append(peak.peak_bytes)
    assert plain.peak_bytes < peaks[1] < peaks[0]
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert all(torch.equal(found[name], wanted) for name, wanted in plain_gradients().items())  # pyright: ignore[reportArgumentType]


def test_the_step_trains_the_module_itself() -> None:
    module = model()
    rig = lowvram.assemble(lowvram.task(module, BATCH.inputs), ["accum=x2", "optimizer=sgd optimizer.lr=0.5"], "cpu")
    assert rig.model is module
    losses = [lowvram.step(rig, BATCH)[0].item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_blocks_of_ones_own_module_are_skipped() -> None:
    module = model()
    rig = lowvram.assemble(lowvram.task(module, BATCH.inputs), "depth=layer_drop depth.count=2", "cpu")
    calls = list[nn.Module]()
    for number in (1, 2, 3):
        module.get_submodule(f"{number}.self_attn").register_forward_pre_hook(lambda module, _: calls.append(module))
    assert lowvram.step(rig, BATCH)[1].applied
    assert len(calls) == 1


def test_one_string_holds_all_knobs() -> None:
    task = lowvram.task(model(), BATCH.inputs)
    rig = lowvram.assemble(task, "precision=bf16 optimizer.momentum=0 optimizer=sgd ckpt=every2 ckpt.every=3", "cpu")
    assert rig.forward(BATCH).dtype is torch.bfloat16
    lowvram.step(rig, BATCH)
    assert all(tensor.numel() == 1 for tensor in tree_leaves(rig.stepper.state_dict()) if isinstance(tensor, Tensor))
    planned = lowvram.plan(task, BATCH.targets, batch_size=4, knobs="precision=bf16 ckpt=every1", device="cpu")
    assert planned["allocated_bytes"] > 0


def test_what_is_printed_is_a_line() -> None:
    task = lowvram.task(nn.Linear(4, 3), torch.rand(2, 4), nn.MSELoss())
    rig = lowvram.assemble(task, "", "cpu")
    assert (repr(task), repr(rig)) == ("ModuleTask(Linear, criterion=MSELoss())", "Rig(Linear, 15 parameters, cpu)")
    rig.model.weight.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert repr(rig) == "Rig(Linear, 15 parameters, 3 of them trained, cpu)"


def test_dir_shows_the_api_and_nothing_else() -> None:
    assert dir(lowvram) == sorted(lowvram.__all__)


def test_knobs_are_words_or_values() -> None:
    assert lowvram.knob("optimizer=external", "optimizer.target=torch.optim.SGD", "optimizer.args={momentum:0.5}") == (
        External("torch.optim.SGD", args={"momentum": 0.5})
    )
    assert lowvram.knob("ckpt=every2") == RecomputeEvery(2)
    assert lowvram.knob("ckpt=every2", "ckpt.every=3") == RecomputeEvery(3)
    task = lowvram.task(model(), BATCH.inputs)
    rig = lowvram.assemble(task, [Bf16(), RecomputeEvery(1)], "cpu")
    assert rig.forward(BATCH).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["precison=bf16"], "precison='bf16': must be one of the groups"),
        (["precision=bf61"], "precision='bf61': must be one of bf16,"),
        (["ckpt=every2", "ckpt.evry=3"], "ckpt.evry"),
        (["ckpt=every2", "ckpt.every=0"], "ckpt.every=0: must be at least 1"),
    ],
)
def test_a_wrong_word_is_reported(words: list[str], message: str) -> None:
    with pytest.raises(BadInput) as told:
        lowvram.knob(*words)
    assert message in str(told.value)


def test_knobs_that_do_not_fit_are_reported() -> None:
    with pytest.raises(Incompatible, match="logits=chunked needs that the task knows the model's last layer"):
        lowvram.assemble(lowvram.task(model(), BATCH.inputs), ["logits=chunked"], "cpu")


@pytest.mark.parametrize("knobs", [[], ["precision=bf16", "ckpt=every1", "optimizer=sgd"]])
def test_a_plan_for_the_cpu_says_what_is_measured(knobs: list[str | Knob]) -> None:
    task = lowvram.task(model(), BATCH.inputs)
    planned = lowvram.plan(task, BATCH.targets, batch_size=4, knobs=knobs, device="cpu")
    found = lowvram.measure(lowvram.assemble(task, knobs, "cpu"), [BATCH] * 5, warmup_steps=1, steps=3)
    assert planned["allocated_bytes"] == pytest.approx(found.peak_bytes, rel=0.05)
    assert len(found.step_ms) == 3
    assert len(found.losses) == 4
    assert found.by_kind["parameters"] > 0
    assert found.spread_ms[0] <= found.step_ms_p50 <= found.spread_ms[1]


def test_a_plan_for_a_card_needs_none() -> None:
    planned = lowvram.plan(lowvram.task(model(), BATCH.inputs), BATCH.targets, batch_size=8, device="rtx3060")
    assert planned["reserved_bytes"] >= planned["allocated_bytes"] > 0


def test_dictionaries_become_keywords_and_the_criterion_is_ones_own() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, left: Tensor, right: Tensor) -> Any:
            return (left - right) * self.weight

    inputs = {"right": torch.ones(2, 3), "left": torch.zeros(2, 3)}
    task = lowvram.task(Named(), inputs, lambda outputs, targets: (outputs - targets[:, None]).square().sum())
    loss, _ = lowvram.step(lowvram.assemble(task, ["ckpt=none"], "cpu"), lowvram.Part(inputs, torch.tensor([1, 1])))
    assert loss.item() == pytest.approx(3.0)  # of each target


def test_targets_are_a_dictionary_as_well_as_a_tensor() -> None:
    inputs = torch.rand(4, 4)
    targets = {"kind": torch.tensor([0, 1, 2, 0]), "sizes": torch.rand(4, 2)}
    losses = []
    for knobs in ([], ["accum=x2"]):
        torch.manual_seed(0)
        task = lowvram.task(TwoHeads(), inputs, TwoLosses().criterion)
        assert lowvram.plan(task, targets, batch_size=4, knobs=knobs, device="cpu")["allocated_bytes"] > 0
        rig = lowvram.assemble(task, [*knobs, "optimizer=sgd"], "cpu")
        losses.append([lowvram.step(rig, lowvram.Part(inputs, targets))[0].item() for _ in range(2)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_loss_of_a_model_in_fp64_is_computed_in_fp64() -> None:
    logits, targets = torch.randn(4, 7, 5, dtype=torch.float64), torch.randint(5, (4, 7))
    exact = -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
    assert cross_entropy(logits, targets).item() == pytest.approx(exact.item(), rel=1e-14)
    assert cross_entropy(logits.half(), targets).dtype is torch.float32


def test_a_criterion_that_returns_a_mean_is_refused() -> None:
    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    rig = lowvram.assemble(lowvram.task(model(), BATCH.inputs, mean), ["accum=x2"], "cpu")
    with pytest.raises(BadInput, match=r"^criterion='mean': must be one whose criterion returns the sum"):
        lowvram.step(rig, BATCH)


def test_the_import_is_light_and_other_names_are_unknown() -> None:
    code = "import sys, lowvram; assert 'torch' not in sys.modules; print(sorted(lowvram.__all__))"
    assert "assemble" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lowvram.nothing


# Modules of the user's own with values, and what is no module or criterion


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def blocks_of_ones_own(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(50, width), *(Block(width) for _ in range(3)), nn.Linear(width, 50))


def adapted_losses(knobs: str) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model, ids = blocks_of_ones_own(64), torch.randint(50, (4, 9))
    rig = lowvram.assemble(lowvram.task(model, ids[:, :-1]), knobs, device="cpu")
    part = lowvram.Part(ids[:, :-1], ids[:, 1:])
    return [lowvram.step(rig, part)[0].item() for _ in range(2)], rig.model


def test_qlora_keeps_the_values_of_ones_own_module() -> None:
    plain, _ = adapted_losses("adapter=lora")
    quantized, model = adapted_losses("adapter=qlora")
    torch.testing.assert_close(quantized, plain, rtol=0.01, atol=0)
    layer: Any = model.get_submodule("1.mlp.0.base_layer")
    first: Any = model.get_submodule("1.mlp.0")
    assert first.lora_B["default"].weight.abs().max() > 0  # it trains
    assert layer.dequantized().abs().max() < 1 / 8 + 1e-6  # nn.Linear's initial values are below 1 / sqrt(64)


@pytest.mark.parametrize("option", ["lora", "qlora"])
def test_adapters_of_ones_own_module_are_planned_at_the_first_call(option: str) -> None:
    model, ids = blocks_of_ones_own(32), torch.zeros(2, 16, dtype=torch.long)
    planned = lowvram.plan(lowvram.task(model, ids), ids, 4, f"adapter={option}", "rtx3060")
    assert planned["allocated_bytes"] > 0


@pytest.mark.parametrize("criterion", ["text", None, 3, nn.CrossEntropyLoss])
def test_what_is_no_criterion_is_refused(criterion: Any) -> None:
    with pytest.raises(BadInput, match=r"^criterion=.*: must be a function of outputs and targets, or one of torch's"):
        lowvram.task(nn.Linear(2, 2), torch.zeros(2, 2), criterion)


@pytest.mark.parametrize("knobs", ["tile=blocks tile.samples=2", "tile=mlp tile.tokens=32"])
def test_a_plan_of_ones_own_module_counts_each_weight_once(knobs: str) -> None:
    model, ids = blocks_of_ones_own(16), torch.zeros(8, 17, dtype=torch.long)
    plain, planned = (
        lowvram.plan(lowvram.task(model, ids[:2, :-1]), ids[:2, 1:], 8, each, device="cpu")["by_kind_max"]["parameters"]
        for each in ("", knobs)
    )
    assert planned == plain


class KeepsNormsFrozen(nn.Sequential):
    """As models often keep the statistics of a pretrained backbone."""

    def train(self, mode: bool = True) -> KeepsNormsFrozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


@pytest.mark.parametrize(("kind", "num_batches"), [(nn.Sequential, 1), (KeepsNormsFrozen, 0)])
def test_a_model_trains_in_the_mode_that_its_train_gives(kind: type[nn.Sequential], num_batches: int) -> None:
    """Not in the one in which it is handed over: loaders of checkpoints return models in evaluation mode."""
    norm, dropout = nn.BatchNorm1d(4), nn.Dropout(0.5)
    module = kind(nn.Linear(4, 4), norm, dropout, nn.Linear(4, 3)).eval()
    x, y = torch.rand(8, 4), torch.arange(8) % 3
    rig = lowvram.assemble(lowvram.task(module, x), "optimizer=sgd", "cpu")
    assert dropout.training
    lowvram.step(rig, lowvram.Part(x, y))
    assert int(norm.num_batches_tracked) == num_batches  # pyright: ignore[reportArgumentType]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(nn.functional.dropout(self.norm(x), 0.1, self.training))


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ("accum=x4", "in 4 parts"),
        ("", "of the batch"),
        pytest.param("compile=model", "of the batch", marks=pytest.mark.slow),
    ],
)
def test_batch_norm_over_one_sample_is_refused_in_a_sentence(knobs: str, says: str) -> None:
    module = Normed()
    x, y = torch.rand(4, 4), torch.arange(4) % 3
    num_samples = 4 if "accum" in knobs else 1
    rig = lowvram.assemble(lowvram.task(module, x), knobs, "cpu")
    for size in (4, 3) if "compile" in knobs else ():  # the graph for any size raises torch's own error
        lowvram.step(rig, lowvram.Part(x[:size], y[:size]))
    with pytest.raises(Incompatible, match=f"^BatchNorm takes the mean over several samples, and {says}"):
        lowvram.step(rig, lowvram.Part(x[:num_samples], y[:num_samples]))
    says = says.replace("4 parts", "the parts")  # a plan doesn't follow all of them
    with pytest.raises(Incompatible, match=f"^BatchNorm takes the mean over several samples, and {says}"):
        lowvram.plan(lowvram.task(module, x), y, num_samples, knobs, device="cpu")


class Thawing(nn.Module):
    """Lets its first layer train from the third step on."""

    def __init__(self, begins_frozen: bool) -> None:
        super().__init__()
        self.first, self.last, self.num_calls = nn.Linear(4, 4), nn.Linear(4, 3), 0
        self.first.requires_grad_(not begins_frozen)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.first.requires_grad_(self.num_calls > 2)
        return self.last(self.first(x).tanh())


@pytest.mark.parametrize("knobs", ["", "stepping=in_backward", "stepping=cpu_offload", "accum=x2"])
def test_a_weight_that_no_optimizer_has_is_refused_once_it_trains(knobs: str) -> None:
    x, y = torch.rand(4, 4), torch.arange(4) % 3
    for begins_frozen in (True, False):
        module = Thawing(begins_frozen)
        rig = lowvram.assemble(lowvram.task(module, x), f"{knobs} optimizer=sgd optimizer.lr=0.5", "cpu")
        module.num_calls, before = 0, module.first.weight.detach().clone()
        lowvram.step(rig, lowvram.Part(x, y))
        assert torch.equal(module.first.weight, before)
        module.num_calls = 2
        if begins_frozen:
            with pytest.raises(
                Incompatible, match=r"lets first\.weight and 1 more train \(requires_grad\) since this step"
            ):
                lowvram.step(rig, lowvram.Part(x, y))
        else:
            lowvram.step(rig, lowvram.Part(x, y))
            assert not torch.equal(module.first.weight, before)


# What a loop of one's own may hand over


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = True) -> Tensor:
        return self.linear(x) if scale is None or not flag else self.linear(x) * scale


SHARED: list[dict[str, Any]] = [
    {"flag": False},
    {"scale": None},
    {"scale": torch.tensor(2.0)},
    {"scale": torch.tensor([[2.0, 3.0, 4.0]])},
    {"scale": torch.arange(1.0, 9.0)[:, None]},
]


@pytest.mark.parametrize("more", SHARED, ids=range(len(SHARED)))
def test_parts_share_what_has_no_row_for_each_sample(more: dict[str, Any]) -> None:
    inputs, losses = {"x": torch.rand(8, 4), **more}, list[float]()
    for knobs in ("", "accum=x4"):
        rig = lowvram.assemble(lowvram.task(Scaled(), inputs), knobs, "cpu")
        losses.append(lowvram.step(rig, lowvram.Part(inputs, torch.arange(8) % 3))[0].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


X, Y = torch.rand(8, 4), torch.arange(8) % 3
STRANGE: list[tuple[Any, str]] = [
    ((X, Y), r"^batch='tuple': must be a lowvram\.Part"),
    (lowvram.Part(X, Y.numpy()), r"^batch\.targets='ndarray': must be tensors"),
    (lowvram.Part(X[:0], Y[:0]), r"^batch\.targets=\[0\]: must be tensors with a row for each sample"),
    (lowvram.Part({"x": X, "scale": torch.ones(3)}, Y), r"^batch='a tensor of shape \(3,\)': must be .* the 8 samples"),
]


@pytest.mark.parametrize(("batch", "says"), STRANGE, ids=range(len(STRANGE)))
def test_a_batch_of_another_kind_is_refused_in_a_sentence(batch: Any, says: str) -> None:
    rig = lowvram.assemble(lowvram.task(Scaled(), X), "accum=x2", "cpu")
    with pytest.raises(BadInput, match=says):
        lowvram.step(rig, batch)


def test_too_few_batches_are_told() -> None:
    with pytest.raises(BadInput, match=r"^batches='too few': must be 14"):
        lowvram.measure(lowvram.assemble(lowvram.task(Scaled(), X), "", "cpu"), [lowvram.Part(X, Y)] * 5)


def test_a_field_without_an_option_is_the_neutral_ones() -> None:
    assert lowvram.knob("stepping.clip=0.1") == lowvram.knob("stepping=after_backward", "stepping.clip=0.1")
    rig = lowvram.assemble(lowvram.task(Scaled(), X), "stepping.clip=0.1 accum=x2", "cpu")
    assert rig.stepper.clip == 0.1  # pyright: ignore[reportAttributeAccessIssue]
