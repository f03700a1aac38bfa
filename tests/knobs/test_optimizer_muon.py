"""optimizer=muon: what it updates, what AdamW updates, and one state for both."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.copies import stands_for
from lowvram.core.rig import assemble
from lowvram.knobs.optimizer import Muon
from lowvram.knobs.optimizer.muon import Rule, rules_of
from lowvram.models.transformer import Positions
from lowvram.tasks import Auto, Problem
from tests.laboratory import CPU, PROBLEMS, TOKENS, TRANSFORMER, knobs_of

LEARNED = Auto().pose(replace(TRANSFORMER, positions=Positions.learned, tied_embeddings=False), TOKENS)


@pytest.mark.parametrize("problem", [PROBLEMS["transformer"], LEARNED], ids=["tied", "untied"])
def test_hidden_matrices_are_muons_and_the_rest_adamws(problem: Problem) -> None:
    rig = assemble(problem, knobs_of(optimizer="muon"), CPU)
    rules = rules_of(rig.model, rig.task.head(rig.model))
    hidden = {name for name, parameter in rig.model.named_parameters() if rules[parameter] is Rule.MUON}
    layers = ("attention.qkv", "attention.merge", "mlp.up", "mlp.down")
    assert hidden == {f"blocks.{block}.{layer}.weight" for block in range(3) for layer in layers}


def test_a_resnet_has_none() -> None:
    rig = assemble(PROBLEMS["resnet"], knobs_of(optimizer="muon"), CPU)
    assert set(rules_of(rig.model, rig.task.head(rig.model)).values()) == {Rule.ADAMW}


def test_updates_are_torchs() -> None:
    layers = [nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)]
    others = deepcopy(layers)
    model, head = nn.Sequential(*layers), layers[-1]
    assert isinstance(head, nn.Linear)
    knob = Muon(lr=0.01, momentum=0.9, iterations=3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
    ours = [knob.make(list(model.parameters()), rules_of(model, head))]
    hidden, *_, last = [p for layer in others for p in layer.parameters() if p.ndim == 2]
    rest = [p for layer in others for p in layer.parameters() if p.ndim == 1]
    theirs = [
        torch.optim.Muon([hidden], 0.01, 0.2, 0.9, ns_steps=3, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([last], 0.01, (0.8, 0.9), 1e-6, 0.2),
        torch.optim.AdamW(rest, 0.01, (0.8, 0.9), 1e-6, 0.0),
    ]
    for _ in range(3):
        x = torch.randn(5, 6)
        for which, optimizers in ((layers, ours), (others, theirs)):
            steps(nn.Sequential(*which), x, optimizers)
    found, wanted = (nn.Sequential(*which).state_dict() for which in (layers, others))
    torch.testing.assert_close(found, wanted)


def steps(model: nn.Module, x: Tensor, optimizers: list[torch.optim.Optimizer]) -> None:
    model.zero_grad()
    model(x).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_copies_are_updated_as_what_they_stand_for() -> None:
    """As fp32 masters in host memory are."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    rules, weight = rules_of(model, None), model[0].weight
    assert isinstance(weight, nn.Parameter)
    copy = nn.Parameter(weight.detach().clone())
    with pytest.raises(KeyError):
        Muon().make([copy], rules)
    (group,) = Muon().make([stands_for(copy, weight)], rules).param_groups
    assert group["rule"] == "muon"


def test_a_hidden_matrix_has_one_moment_and_others_two() -> None:
    rig = assemble(PROBLEMS["transformer"], knobs_of(optimizer="muon"), CPU)
    optimizer = rig.make_optimizer(rig.trainable)
    for parameter in rig.trainable:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {name: set(optimizer.state[parameter]) for name, parameter in rig.model.named_parameters()}
    assert names["blocks.0.mlp.up.weight"] == {"momentum_buffer"}
    assert names["blocks.0.mlp.up.bias"] == names["token_embedding.weight"] == {"step", "exp_avg", "exp_avg_sq"}


def test_without_whole_params() -> None:
    """Why shards are refused: the halves of an orthogonal matrix are other than orthogonal halves."""
    updates = []
    for parts in (1, 2):
        weight = nn.Parameter(torch.zeros(8, 8))
        shards = [nn.Linear(8, 8 // parts, bias=False) for _ in range(parts)]
        for shard, values in zip(shards, weight.detach().chunk(parts), strict=True):
            shard.weight = nn.Parameter(values.clone())
        model = nn.Sequential(*shards)
        optimizer = Muon(weight_decay=0.0).make(list(model.parameters()), rules_of(model, None))
        gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        for shard, its in zip(shards, gradient.chunk(parts), strict=True):
            shard.weight.grad = its.clone()
        optimizer.step()
        updates.append(torch.cat([shard.weight.detach() for shard in shards]))
    assert float((updates[0] - updates[1]).norm() / updates[0].norm()) > 0.1
