"""adapter=lora beside peft's own models: the same numbers, and folders that each reads from the other."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.config.identity import counts
from lowvram.config.registry import node_of
from lowvram.core.assemble import assemble
from lowvram.core.step import step
from lowvram.knobs.adapter import Lora
from lowvram.knobs.adapter.layers import library
from lowvram.knobs.adapter.save_adapter import PREFIX
from lowvram.knobs.optimizer import AdamW
from tests.laboratory import CPU, PROBLEMS, batches, knobs_of, relative_error

pytestmark = pytest.mark.medium
LATER = {"rank_stabilized": False}  # fields that points had no value of, and their neutral values
LR = 1e-3


def in_peft(problem: str, ours: Lora, start: nn.Module, **options: Any) -> nn.Module:
    """The plain model with peft's own adapters, which have the values of those in `start`."""
    model: Any = assemble(PROBLEMS[problem], knobs_of(), CPU).model
    targets = [name.partition(".lora_A")[0] for name, _ in start.named_parameters() if ".lora_A." in name]
    config = library().LoraConfig(r=ours.rank, lora_alpha=ours.alpha, target_modules=targets, **options)
    theirs = library().get_peft_model(model, config)
    values = {f"{PREFIX}{name}": value.clone() for name, value in start.state_dict().items() if ".lora_" in name}
    assert not theirs.load_state_dict(values, strict=False).unexpected_keys
    return theirs


def trained_in_peft(problem: str, theirs: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    task = PROBLEMS[problem]
    for batch in batches(task.spec, [8, 8, 7, 8]):
        optimizer.zero_grad()
        (task.criterion(task.call(theirs, batch.inputs), batch) / batch.num_targets).backward()
        optimizer.step()
    return {name.removeprefix(PREFIX): value for name, value in theirs.named_parameters() if value.requires_grad}


def trained(problem: str, **choices: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model as it starts and the values that its trained parameters have after some steps."""
    start = assemble(PROBLEMS[problem], knobs_of(**choices), CPU).model
    rig = assemble(PROBLEMS[problem], knobs_of(**choices), CPU)
    rig.stepper.set_lr(LR)
    for batch in batches(PROBLEMS[problem].spec, [8, 8, 7, 8]):
        assert step(rig, batch)[1].applied
    return start, {name: value for name, value in rig.model.named_parameters() if value.requires_grad}


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
@pytest.mark.parametrize(("ours", "options"), [(Lora(), {}), (Lora(rank_stabilized=True), {"use_rslora": True})])
def test_steps_are_those_of_peft(problem: str, ours: Lora, options: dict[str, Any]) -> None:
    start, found = trained(problem, adapter=ours, optimizer=AdamW(lr=LR))
    theirs = in_peft(problem, ours, start, **options)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=AdamW().weight_decay)
    wanted = trained_in_peft(problem, theirs, optimizer)
    assert set(found) == set(wanted)
    assert relative_error(found, wanted) < 1e-6
    assert relative_error(found, {name: start.get_parameter(name) for name in found}) > 1e-3


@pytest.mark.parametrize("problem", ["transformer", "resnet_group"])
def test_steps_of_b_that_are_16_times_as_long_are_those_of_lora_plus(problem: str) -> None:
    """Hayou et al., "LoRA+: Efficient Low Rank Adaptation of Large Models" (2024)."""
    groups = {"*.lora_B": {"lr_scale": 16.0}}
    start, found = trained(problem, adapter=Lora(), optimizer=AdamW(lr=LR, groups=groups))
    theirs: Any = in_peft(problem, Lora(), start)
    make = import_module("peft.optimizers").create_loraplus_optimizer
    rates = {"lr": LR, "loraplus_lr_ratio": 16.0, "loraplus_weight_decay": AdamW().weight_decay}
    optimizer = make(theirs, torch.optim.AdamW, **rates, betas=(0.9, 0.95))
    assert relative_error(found, trained_in_peft(problem, theirs, optimizer)) < 1e-6
    assert relative_error(found, trained(problem, adapter=Lora(), optimizer=AdamW(lr=LR))[1]) > 1e-2


@pytest.mark.parametrize("ours", [Lora(rank=4, rank_stabilized=True)])
def test_a_folder_of_either_is_read_by_the_other(tmp_path: Path, ours: Lora) -> None:
    problem = "transformer"
    start, found = trained(problem, adapter=ours)
    trained_model: Any = assemble(PROBLEMS[problem], knobs_of(adapter=ours), CPU).model
    trained_model.load_state_dict(found, strict=False)
    ours.save_adapter(trained_model, tmp_path / "ours", None)
    inputs = next(batches(PROBLEMS[problem].spec, [4])).inputs
    plain: Any = assemble(PROBLEMS[problem], knobs_of(), CPU).model
    theirs = library().PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    with torch.no_grad():
        wanted = trained_model.eval()(inputs)
        assert torch.allclose(theirs(inputs), wanted, atol=1e-5)
        assert not torch.allclose(start.eval()(inputs), wanted, atol=1e-3)
    theirs.save_pretrained(tmp_path / "theirs")
    ours.load_adapter(start, tmp_path / "theirs")
    assert all(value.equal(found[name]) for name, value in start.named_parameters() if name in found)


@pytest.mark.parametrize("option", ["lora", "qlora"])
def test_points_keep_the_ids_that_they_had_before_a_field_came(option: str) -> None:
    node = node_of("adapter", option)
    assert {name for name in node if not counts(f"adapter.{name}", node[name])} == set(LATER)
    assert LATER.items() <= dict(node).items()
