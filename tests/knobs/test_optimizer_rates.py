"""optimizer.groups and optimizer.layer_decay: rates of some parameters that differ from the optimizer's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram import knob
from lowvram.api import all_knobs
from lowvram.config.errors import BadInput, Incompatible
from lowvram.core.assemble import assemble, bare_model
from lowvram.core.knob import Knob, conflicts
from lowvram.core.probes.layers_above import LayersAbove
from lowvram.core.rig import Part, Rig
from lowvram.core.shards import whole
from lowvram.core.step import step
from lowvram.knobs.optimizer import SGD, Adafactor, AdamW, External
from lowvram.knobs.optimizer.groups import OptimizerKnob
from lowvram.knobs.stepping import AfterBackward
from tests.laboratory import (
    CPU,
    KNOBS,
    OPTIONS,
    PROBLEMS,
    InDouble,
    batches,
    knobs_of,
    missing_here,
    my_slice,
    peak_as_planned,
    relative_error,
    structure_of,
)
from tests.ranks import on_ranks

pytestmark = pytest.mark.medium
FACTORS = (0.5, 1.0, 0.7, 0.2)  # of a schedule
SIZES = [8, 8, 7, 8]
MODELS = ["transformer", "resnet_group"]
NUM_BLOCKS = 3  # of both models
PLAIN: dict[type, Any] = {
    AdamW: lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0),
    SGD: lambda groups: torch.optim.SGD(groups, momentum=0.9),
    Adafactor: torch.optim.Adafactor,
}


def option_with(option: str, **rules: Any) -> OptimizerKnob:
    ours: Any = KNOBS["optimizer", option]
    return replace(ours, **rules)


def drawn_groups(names: list[str], draw: random.Random) -> dict[str, dict[str, float]]:
    """Globs of some names, each of which matches something that the ones before it don't."""
    groups, rest = dict[str, dict[str, float]](), [*names]
    while rest and len(groups) < 4:
        name = draw.choice(rest)
        first, _, last = name.rpartition(".")
        glob = draw.choice([name, f"*.{last}", first, f"{first}.*", name.replace("0", "?")])
        values = {
            "lr": draw.uniform(0.001, 0.02),
            "lr_scale": draw.uniform(0.1, 2),
            "lr_decay": draw.uniform(0.5, 1),
            "weight_decay": draw.choice([0, draw.uniform(0.0, 0.3)]),
        }
        chosen = draw.sample([*values], draw.randint(1, 4))
        groups[glob] = {key: values[key] for key in chosen}
        rest = [each for each in rest if not (fnmatch(each, glob) or fnmatch(each, f"{glob}.*"))]
    return groups


def depth(name: str) -> int:
    """Layers above a parameter of the tests' models, whose blocks have numbers."""
    if not name.startswith("blocks."):
        return 0 if name.startswith(("norm", "head")) else NUM_BLOCKS + 1
    return NUM_BLOCKS - int(name.split(".")[1])


def values_of(name: str, weight: Tensor, ours: OptimizerKnob) -> dict[str, float]:
    """A parameter's learning rate and weight decay, by the rules."""
    fits = [each for glob, each in (ours.groups or {}).items() if fnmatch(name, glob) or fnmatch(name, f"{glob}.*")]
    group, settings = fits[0] if fits else {}, vars(ours)
    decay = group.get("lr_decay", ours.layer_decay or 1.0)
    lr = group.get("lr", settings["lr"]) * group.get("lr_scale", 1.0) * decay ** depth(name)
    return {"lr": lr, "weight_decay": group.get("weight_decay", settings["weight_decay"] if weight.ndim >= 2 else 0.0)}


def trained_plainly(problem: str, ours: OptimizerKnob, clip: float) -> dict[str, Tensor]:
    """By a loop without lowvram, with torch's groups of parameters."""
    task = InDouble(PROBLEMS[problem])
    model = assemble(task, knobs_of(), CPU).model
    optimizer = PLAIN[type(ours)](
        [{"params": [weight], **values_of(name, weight, ours)} for name, weight in model.named_parameters()]
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: FACTORS[min(number, len(FACTORS) - 1)])
    for batch in batches(task.spec, SIZES, torch.float64):
        optimizer.zero_grad()
        (task.criterion(task.call(model, batch.inputs), batch) / batch.num_targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return dict(model.named_parameters())


def steps(rig: Rig, parts: Iterator[Part], lr: float) -> dict[str, Tensor]:
    for factor, part in zip(FACTORS, parts, strict=False):
        rig.stepper.set_lr(lr * factor)
        step(rig, part)
    return {name: whole(weight.detach()).clone() for name, weight in rig.model.named_parameters()}


def trained(problem: str, ours: Knob, **choices: Any) -> dict[str, Tensor]:
    task = InDouble(PROBLEMS[problem])
    rig = assemble(task, knobs_of(optimizer=ours, **choices), CPU)
    return steps(rig, map(my_slice, batches(task.spec, SIZES, torch.float64)), vars(ours)["lr"])


@pytest.mark.parametrize("problem", MODELS)
@pytest.mark.parametrize("option", ["adamw", "sgd", "adafactor"])
def test_updates_are_those_of_torch_with_groups_of_parameters(option: str, problem: str) -> None:
    names = [name for name, _ in bare_model(PROBLEMS[problem]).named_parameters()]
    for seed in range(4):
        draw = random.Random(seed)
        ours = option_with(option, groups=drawn_groups(names, draw), layer_decay=[None, 0.7][seed % 2])
        wanted = trained_plainly(problem, ours, clip=0.3)
        found = trained(problem, ours, accum="x2", stepping=AfterBackward(clip=0.3))
        assert relative_error(found, wanted) < 1e-11, (seed, ours)


RULES: dict[str, Any] = {
    "groups": {"blocks.0": {"lr": 1e-30, "weight_decay": 0}, "*.bias": {"lr_scale": 0.5, "weight_decay": 0.1}},
    "layer_decay": 0.8,
}
STEPPING: list[dict[str, Any]] = [
    {"stepping": "in_backward"},
    {"stepping": "in_backward", "accum": "x2"},
    {"stepping": "cpu_offload"},
    {"offload": "parameters"},
]
EVERY = [
    pytest.param(option, marks=[pytest.mark.slow] if "bit" in option else [])
    for option in OPTIONS["optimizer"]
    if not missing_here(("optimizer", option))
]


@pytest.mark.sampled
@pytest.mark.parametrize("choice", STEPPING, ids=str)
@pytest.mark.parametrize("option", EVERY)
def test_every_stepper_has_every_optimizer_update_so(option: str, choice: dict[str, Any]) -> None:
    ours = option_with(option, **RULES)
    if conflicts(knobs_of(optimizer=ours, **choice), {}):
        pytest.skip("these options conflict")
    parts = {"accum": "x2"} if "accum" in choice else {}
    wanted = trained("transformer", ours, **parts)
    found = trained("transformer", ours, **choice)
    assert relative_error(found, wanted) < 1e-9


@pytest.mark.parametrize("option", EVERY)
def test_every_optimizer_heeds_rates_in_every_precision(option: str) -> None:
    """A tiny rate keeps weights as they are; the others move, but for vectors where bf16 is too coarse."""
    problem = PROBLEMS["transformer"]
    first = assemble(problem, knobs_of(), CPU).model.state_dict()
    ours = option_with(option, **RULES)
    for precision in ("fp32", "bf16_pure", "bf16_split"):
        knobs = knobs_of(optimizer=ours, precision=precision)
        if missing_here(("precision", precision)) or conflicts(knobs, {}):
            continue
        found = steps(assemble(problem, knobs, CPU), iter_of(problem), vars(ours)["lr"])
        for name, weight in found.items():
            moved = (weight - first[name].to(weight.dtype)).abs().max()
            is_still = name.startswith("blocks.0.")
            assert moved < 1e-20 if is_still else moved > 0 or weight.ndim < 2, (precision, name)


def iter_of(problem: Any) -> Iterator[Part]:
    return batches(problem.spec, [8, 8])


def on_two(choices: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    return [trained("transformer", option_with("adamw", **RULES), **each) for each in choices]


def test_ranks_update_like_one_process() -> None:
    choices: list[dict[str, Any]] = [{"sharding": each} for each in ("ddp", "zero1", "fsdp")]
    (wanted,) = on_two([{}])
    for ours in on_ranks(on_two, [*choices, {"sharding": "fsdp", "stepping": "in_backward"}]):
        for found in ours:
            assert relative_error(found, wanted) < 1e-10


def test_stages_of_a_pipeline_know_the_globs_of_the_others() -> None:
    (wanted,) = on_two([{"accum": "x2"}])
    of_ranks = on_ranks(on_two, [{"sharding": "pipeline", "accum": "x2"}])
    found = {name: weight for (ours,) in of_ranks for name, weight in ours.items()}
    assert relative_error(found, wanted) < 1e-10


def test_names_are_those_of_the_model_where_it_is_compiled_or_adapted() -> None:
    problem = PROBLEMS["transformer"]
    for choices in ({"compile": "blocks"}, {"compile": "model"}):
        assemble(problem, knobs_of(optimizer=AdamW(**RULES), **choices), CPU)
    ours = AdamW(groups={"blocks.0": {"lr": 1e-30}, "*.lora_B": {"lr_scale": 16}}, layer_decay=0.5)
    rig = assemble(problem, knobs_of(optimizer=ours, adapter="lora"), CPU)
    before = {name: weight.detach().clone() for name, weight in rig.model.named_parameters() if weight.requires_grad}
    after = steps(rig, iter_of(problem), 0.01)
    for name, weight in before.items():
        assert ((after[name] - weight).abs().max() < 1e-20) == name.startswith("blocks.0."), name


def test_a_saved_state_does_not_depend_on_the_groups() -> None:
    """So a run may go on with other ones; torch would refuse other numbers of parameters in groups."""
    problem = PROBLEMS["transformer"]
    for stepping in ("after_backward", "in_backward", "cpu_offload"):
        plain = assemble(problem, knobs_of(stepping=stepping), CPU)
        steps(plain, iter_of(problem), 0.01)
        state = plain.stepper.state_dict()
        resumed = assemble(problem, knobs_of(optimizer=AdamW(**RULES), stepping=stepping), CPU)
        resumed.model.load_state_dict(plain.model.state_dict())
        resumed.stepper.load_state_dict(state)
        before = {name: weight.detach().clone() for name, weight in resumed.model.named_parameters()}
        after = steps(resumed, iter_of(problem), 0.01)
        for name, weight in before.items():
            assert torch.equal(after[name], weight) == name.startswith("blocks.0."), (stepping, name)
        assert str(resumed.stepper.state_dict().keys()) == str(state.keys())


def test_a_plan_is_the_same() -> None:
    problem = PROBLEMS["transformer"]
    for option in ("adamw", "muon"):
        plans = [peak_as_planned(problem, knobs_of(optimizer=option_with(option, **rules)), 8) for rules in ({}, RULES)]
        assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("rules", "sentence"),
    [
        ({"groups": {}}, r"optimizer\.groups=\{\}: must be null, or globs"),
        ({"groups": {"a": {}}}, r"optimizer\.groups\.a=\{\}: must be a group of values"),
        ({"groups": {"a": 3}}, r"optimizer\.groups\.a=3: must be a group of values"),
        (
            {"groups": {"a": {"rate": 1}}},
            r"optimizer\.groups\.a\.rate=1: must be removed: optimizer\.groups\.a knows lr",
        ),
        ({"groups": {"a": {"lr": "fast"}}}, r"optimizer\.groups\.a\.lr='fast': must be a number or null"),
        ({"groups": {"a": {"lr": 0}}}, r"optimizer\.groups\.a\.lr=0\.0: must be above 0 \(weights that should not"),
        ({"groups": {"a": {"lr_scale": -1}}}, r"optimizer\.groups\.a\.lr_scale=-1\.0"),
        (
            {"groups": {"a": {"lr_decay": 1.5}}},
            r"optimizer\.groups\.a\.lr_decay=1\.5: must be null \(off\), or above 0",
        ),
        ({"groups": {"a": {"weight_decay": float("nan")}}}, r"optimizer\.groups\.a\.weight_decay=nan"),
        ({"layer_decay": 0.0}, r"optimizer\.layer_decay=0\.0: must be null"),
    ],
)
def test_values_out_of_range_are_named(rules: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        AdamW(**rules)


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"blokcs.*": {"lr": 1}}, r"optimizer\.groups='blokcs\.\*': must be a glob that .* did you mean blocks"),
        ({"*.weight": {"lr": 1}, "blocks.0.mlp.up.weight": {"lr": 2}}, r"must be before the globs that match the same"),
    ],
)
def test_a_glob_that_gives_no_parameter_its_rates_is_refused(groups: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        assemble(PROBLEMS["transformer"], knobs_of(optimizer=AdamW(groups=groups)), CPU)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Undecayed(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=group["lr"])


def test_an_external_optimizer_has_rates_if_it_can() -> None:
    problem = PROBLEMS["transformer"]
    ours = External("torch.optim.NAdam", args={"weight_decay": 0.1}, **RULES)
    found, wanted = (trained("transformer", ours, stepping=each) for each in ("in_backward", "after_backward"))
    assert relative_error(found, wanted) < 1e-9
    for name, sentence in (("Counting", "changes its groups of parameters itself"), ("Undecayed", "no weight decay")):
        with pytest.raises(Incompatible, match=sentence):
            assemble(problem, knobs_of(optimizer=External(f"{__name__}.{name}", **RULES)), CPU)


def test_layers_are_counted_in_the_order_of_the_forward_pass() -> None:
    for problem in MODELS:
        found = structure_of(PROBLEMS[problem]).get(LayersAbove())
        assert found is not None
        tied = {"head.weight": NUM_BLOCKS + 1} if problem == "transformer" else {}
        assert found == {name: depth(name) for name in found} | tied


def test_words_of_the_command_line_reach_the_knob() -> None:
    ours: Any = knob("optimizer=sgd", "optimizer.groups={*.bias: {weight_decay: 0}, head: {lr: 1e-3}}")
    assert ours.groups == {"*.bias": {"weight_decay": 0}, "head": {"lr": 1e-3}}
    words = "ckpt=every1 optimizer.groups={*.bias: {weight_decay: 0}, head: {lr: 1e-3}} optimizer=sgd"
    assert all_knobs(words)["optimizer=sgd"] == ours


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure"])
def test_a_resumed_run_goes_on_to_the_bit(precision: str) -> None:
    problem = PROBLEMS["transformer"]
    knobs = knobs_of(optimizer=AdamW(**RULES), precision=precision)
    whole_run, first = (assemble(problem, knobs, CPU) for _ in range(2))
    sizes = [8, 8, 8, 8]
    wanted = steps(whole_run, batches(problem.spec, sizes), 0.01)
    parts = list(batches(problem.spec, sizes))
    for rig, at in ((first, slice(0, 2)), (assemble(problem, knobs, CPU), slice(2, 4))):
        if rig is not first:
            rig.model.load_state_dict(first.model.state_dict())
            rig.stepper.load_state_dict(first.stepper.state_dict())
        for factor, part in zip(FACTORS[at], parts[at], strict=True):
            rig.stepper.set_lr(0.01 * factor)
            step(rig, part)
        found = dict(rig.model.named_parameters())
    assert relative_error(found, wanted) == 0.0
