"""optimizer=muon: what it updates, what AdamW updates, and one state for both."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lowvram.core.assemble import assemble
from lowvram.core.copies import register_copy
from lowvram.core.knob import Knob
from lowvram.core.mesh import data_ranks
from lowvram.core.rounding import Stochastic
from lowvram.core.shards import whole
from lowvram.knobs.optimizer import Muon
from lowvram.knobs.optimizer.fp32_compute import RoundingPolicy
from lowvram.knobs.optimizer.matrices import roles_of
from lowvram.models.transformer import Positions
from lowvram.tasks import Auto, Problem
from tests.laboratory import CPU, PROBLEMS, TOKENS, TRANSFORMER, InDouble, knobs_of, relative_error, train
from tests.ranks import on_ranks
from tests.tiers import first_of

LEARNED = Auto().pose(replace(TRANSFORMER, positions=Positions.learned, tied_embeddings=False), TOKENS)


@pytest.mark.parametrize("problem", [PROBLEMS["transformer"], LEARNED], ids=["tied", "untied"])
def test_hidden_matrices_are_muons_and_the_rest_adamws(problem: Problem) -> None:
    rig = assemble(problem, knobs_of(optimizer="muon"), CPU)
    roles = roles_of(rig.model, rig.structure.last_weights, Muon.layers)
    hidden = {name for name, parameter in rig.model.named_parameters() if roles[parameter].is_matrix}
    layers = ("attention.qkv", "attention.merge", "mlp.up", "mlp.down")
    assert hidden == {f"blocks.{block}.{layer}.weight" for block in range(3) for layer in layers}


def test_a_resnet_has_none() -> None:
    rig = assemble(PROBLEMS["resnet"], knobs_of(optimizer="muon"), CPU)
    roles = roles_of(rig.model, rig.structure.last_weights, Muon.layers)
    assert not any(role.is_matrix for role in roles.values())


def test_updates_are_torchs() -> None:
    layers = [nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)]
    others = deepcopy(layers)
    model, head = nn.Sequential(*layers), layers[-1]
    assert isinstance(head, nn.Linear)
    knob = Muon(lr=0.01, momentum=0.9, iterations=3, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
    ours = [knob.make(list(model.parameters()), roles_of(model, {head.weight}, Muon.layers))]
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
    roles, weight = roles_of(model, (), Muon.layers), model[0].weight
    assert isinstance(weight, nn.Parameter)
    copy = nn.Parameter(weight.detach().clone())
    with pytest.raises(KeyError):
        Muon().make([copy], roles)
    (group,) = Muon().make([register_copy(copy, weight)], roles).param_groups
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


def one_update(is_shared: bool, dtype: torch.dtype) -> Tensor:
    """Of a matrix of zeros; shared: every rank holds some of its rows."""
    model = nn.Linear(8, 8, bias=False, dtype=dtype)
    gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    nn.init.zeros_(model.weight)
    if is_shared:
        mesh = init_device_mesh("cpu", (data_ranks().size,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        gradient = distribute_tensor(gradient, mesh, [Shard(0)])
    optimizer = Muon(weight_decay=0.0).make(
        list(model.parameters()), roles_of(model, (), Muon.layers), RoundingPolicy(Stochastic())
    )
    model.weight.grad = gradient
    optimizer.step()
    return whole(model.weight).float()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_make_the_whole_matrix_orthogonal(dtype: torch.dtype) -> None:
    """Not each rank its own rows: those would lie 0.3 away."""
    wanted = one_update(is_shared=False, dtype=dtype)
    for found in on_ranks(one_update, True, dtype):
        assert (found - wanted).norm() <= 0.02 * wanted.norm()


def orthogonal(gradient: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """torch's iteration, without its rounding to bf16."""
    a, b, c = coefficients
    is_tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if is_tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def trained_in_double(sharding: str) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", orthogonal)
        found = train(InDouble(PROBLEMS["transformer"]), knobs_of(optimizer="muon", sharding=sharding), [12, 12])
    return found.parameters


@pytest.mark.parametrize("sharding", first_of(["tensor", "fsdp"]))
def test_but_for_rounding_to_bf16_ranks_update_like_one_process(sharding: str) -> None:
    """They have parts of the matrices, in an order of their own where several layers stand side by side."""
    wanted = trained_in_double("none")
    for found in on_ranks(trained_in_double, sharding):
        assert relative_error(found, wanted) < 1e-12


CHOICES: list[dict[str, str | Knob]] = [{}, {"stepping": "in_backward"}, {"stepping": "cpu_offload", "accum": "x2"}]


def losses_of(choices: list[dict[str, str | Knob]]) -> list[Tensor]:
    task = PROBLEMS["transformer"]
    return [torch.stack(train(task, knobs_of(**each, optimizer="muon"), [32, 32, 27]).losses) for each in choices]


@pytest.mark.slow
def test_shared_weights_train_like_whole_ones() -> None:
    (wanted,) = losses_of([{}])
    for ours in on_ranks(losses_of, [{**each, "sharding": "fsdp"} for each in CHOICES]):
        for found in ours:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    (alone,) = losses_of([{"offload": "parameters"}])
    assert torch.equal(alone, wanted)
