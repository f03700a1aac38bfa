"""States of models, whole and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from lowvram.core.assemble import assemble
from lowvram.core.states import whole_model, with_values
from lowvram.core.step import step
from lowvram.models.external import ExternalConfig
from lowvram.models.layout import save
from lowvram.tasks import Auto
from tests.laboratory import CPU, TOKENS, knobs_of, make_batch, my_slice
from tests.ranks import on_ranks


class Foreign(nn.Module):
    """Tied, shared and unused weights, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.again, self.unused, self.scale = self.blocks[0], nn.Linear(3, 5), nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.count = {"passes": 0}
        self.hidden: Tensor
        self.register_buffer("hidden", torch.arange(8.0), persistent=False)

    def get_extra_state(self) -> Any:
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + 0.01 * self.hidden
        if self.training:
            self.seen += 1
            self.count["passes"] += 1
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def trained_whole(folder: Path | None, sharding: str = "none") -> dict[str, Tensor] | None:
    """All tensors of the whole model after two steps, by name; written into the folder too, if there is one."""
    config = ExternalConfig(target=f"{Foreign.__module__}.{Foreign.__name__}")
    rig = assemble(Auto().pose(config, TOKENS), knobs_of(optimizer="sgd", sharding=sharding), CPU)
    for seed in range(2):
        step(rig, my_slice(make_batch(TOKENS, 8, seed=seed)))
    model = whole_model(rig.model, rig.task.make_model)
    if model is None:
        return None
    assert model.get_parameter("head.weight") is model.get_parameter("embed.weight")
    if folder is not None:
        save(model, config, TOKENS, folder)
    assert model.get_extra_state()["passes"] >= 2
    return {name: each.detach() for name, each in [*model.named_parameters(), *model.named_buffers()]}


def test_a_sharded_model_of_any_kind_is_whole_again(tmp_path: Path) -> None:
    """Its constructor's skeleton has no memory; and no state_dict has all of its buffers."""
    wanted = trained_whole(None)
    found, of_the_other = on_ranks(trained_whole, tmp_path, "fsdp")
    assert of_the_other is None
    assert wanted is not None
    assert found is not None
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_tied_values_that_lie_in_larger_memory_can_be_saved(tmp_path: Path) -> None:
    """As those of rows that don't divide evenly over the ranks."""
    with torch.device("meta"):
        model = nn.ModuleDict({"embed": nn.Embedding(11, 8), "head": nn.Linear(8, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    padded = torch.randn(12, 8)
    whole = with_values(model, dict.fromkeys(("embed.weight", "head.weight"), padded[:11]))
    save_model(whole, str(tmp_path / "model.safetensors"))
    (saved,) = load_file(tmp_path / "model.safetensors").values()
    assert torch.equal(saved, padded[:11])
