"""A search over meshes finds what planning every mesh with every option would find."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from lowvram.config.errors import BadInput
from lowvram.planning.devices import load_device
from lowvram.planning.estimate import PlanDevice
from lowvram.planning.worker import CANT_BE_HAD, Planner
from lowvram.results.row import MIB
from lowvram.search.meshes import Mesh, every_mesh
from lowvram.search.plan_cache import PlanCache
from lowvram.search.result import with_changes
from lowvram.search.space import Plan
from lowvram.search.worker import offered_over_meshes, search, spread
from tests.calls import TINY, TINY_RESNET, Outcome
from tests.planning.test_worker import composed
from tests.tiers import first_of

CARD = ("plan.device=rtx4090", "vram=8GiB")
DEEP = (*TINY, "model.num_layers=4", "model.num_heads=4", "data.sequence_length=64", "train.batch_size=64")
GROUPS = "search.groups=[ckpt]"
PLANNER = Planner()  # traces of one test serve the others


def book(*words: str, model: tuple[str, ...] = DEEP) -> PlanCache:
    whole, choices = composed(*model, *CARD, GROUPS, *words)
    return PlanCache(PLANNER, whole, choices, PlanDevice("rtx4090", load_device("rtx4090")), lambda num_plans: None)


def test_every_mesh_has_all_ranks() -> None:
    """What isn't said is made of the ranks that are left."""
    for num_ranks in (2, 4, 6, 8):
        for mesh in every_mesh(num_ranks, [1, 2, 4, 8, 16]):
            said = [mesh.values.get(name, 1) for name in ("pipeline", "context", "tensor", "replicate")]
            assert num_ranks % prod(map(int, said)) == 0, mesh
            if mesh.option == "pipeline":
                assert mesh.accum is not None
                assert int(mesh.accum) >= int(mesh.values.get("pipeline", 2)) * int(mesh.values.get("stages", 1))
    assert len({mesh.words for mesh in every_mesh(4, [4, 8])}) == len([*every_mesh(4, [4, 8])])


def test_a_mesh_is_typed_in_words() -> None:
    mesh = Mesh("pipeline", {"pipeline": 2}, "x8")
    assert mesh.words == "pipeline sharding.pipeline=2 accum=x8"
    assert with_changes(["devices=4", "sharding=none", "vram=8GiB"], {"sharding": mesh.words, "ckpt": "every1"}) == [
        *("devices=4", "vram=8GiB", "sharding=pipeline", "sharding.pipeline=2", "accum=x8", "ckpt=every1")
    ]
    assert Mesh("fsdp", {"reshard_after_forward": False}).words == "fsdp sharding.reshard_after_forward=false"


def test_what_was_typed_holds_for_each_mesh() -> None:
    """Its option, its values, and the number of parts."""
    cache = book("devices=4", "sharding=fsdp", "sharding.reduce=bf16", "sharding.tensor=2")
    refused = spread(cache, ["sharding"])
    assert cache.meshes is not None
    assert set(cache.meshes.knobs) == {
        "fsdp",
        "fsdp sharding.tensor=2",
        "fsdp sharding.tensor=2 sharding.sequence=true",
        "fsdp sharding.reshard_after_forward=false",
    } | {words for words in cache.meshes.knobs if "replicate" in words or "context" in words}
    assert all(vars(each["sharding"])["reduce"] == "bf16" for each in cache.meshes.knobs.values())
    assert all(words.startswith("fsdp") for _, words in refused)
    parts = book("devices=4", "accum=x8")
    spread(parts, ["accum"])
    assert parts.meshes is not None
    assert not any("accum" in words for words in parts.meshes.knobs)
    assert any(words.startswith("pipeline") for words in parts.meshes.knobs)
    with pytest.raises(BadInput, match=r"sharding.ranks='2': must be auto with mode=search"):
        spread(book("devices=4", "sharding=ddp", "sharding.ranks=2"), ["sharding"])


def every_plan(cache: PlanCache) -> list[Plan]:
    """Of all combinations that can be planned."""
    spread(cache, [])
    space, _ = offered_over_meshes(cache, ["ckpt"])
    found: list[Plan] = []
    for options in space.combinations():
        try:
            found.append(cache.plan(space, options))
        except CANT_BE_HAD:
            continue
    return found


LENGTH = ("data.sequence_length=512", "model.context=512")
WIDE = (*DEEP, "model.width=512", "model.num_heads=8", "model.num_layers=6", *LENGTH)
FOUR = (*DEEP, "model.width=256", *LENGTH, "accum=x8")  # one number of parts: a third of the pipelines
MODELS = {
    "transformer": WIDE,
    "resnet": (*TINY_RESNET, "model.layers=[3,3]", "model.width=64", "data.image_size=64", "train.batch_size=64"),
    "groups of heads, untied": (*FOUR, "model.num_kv_heads=2", "model.tied_embeddings=false", "model.mlp_width=512"),
    "long samples": (*FOUR, "data.sequence_length=2048", "model.context=2048", "train.batch_size=16"),
    "a large head": (*FOUR, "model.vocab_size=20000"),
    "llama": (),  # of transformers
}


def words_of(model: str) -> tuple[str, ...]:
    if model != "llama":
        return MODELS[model]
    sizes: Any = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=1000, num_key_value_heads=4, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained("llama")
    data = ("data=synthetic", "data.sequence_length=256", "data.eval_samples=4", "train.batch_size=64")
    return ("model=hf", "model.name=llama", "accum=x8", *data)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4])
@pytest.mark.parametrize("model", first_of([*MODELS]))
def test_the_fastest_mesh_that_fits_is_found(
    model: str, num_devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words, about = (f"devices={num_devices}",), words_of(model)
    plans = every_plan(book(*words, model=about))
    assert len({plan["changes"]["sharding"] for plan in plans}) >= 4 * num_devices - 4
    sizes = sorted(plan["least_vram_bytes"] for plan in plans)
    for share in (0.05, 0.3, 1.0):
        budget_bytes = 1.1001 * sizes[int(share * (len(sizes) - 1))]
        best_ms = min(plan["step_ms"] for plan in plans if plan["least_vram_bytes"] * 1.1 <= budget_bytes)
        found = search(book(*words, f"vram={budget_bytes / MIB}MiB", model=about), [])["ranking"][0]
        assert found["fits"]
        assert found["step_ms"] <= 1.05 * best_ms, (found["changes"], share)


@pytest.mark.slow
def test_from_the_command_line_to_the_winners_file(call: Callable[..., Outcome], tmp_path: Path) -> None:
    words = (*DEEP, *CARD, "mode=search", "devices=2", "search.groups=[precision]", "hydra.run.dir=found")
    done = call(*words)
    assert done.code == 0, done.err
    assert "the fastest: " in done.out
    winner = (tmp_path / "found" / "experiment" / "winner.yaml").read_text()
    assert "  - override /sharding: " in winner
    again = call(
        *DEEP, "--config-dir", "found", "experiment=winner", "mode=plan", *CARD, "devices=2", "hydra.run.dir=p"
    )
    assert again.code == 0, again.err


def test_devices_without_ranks_are_refused(call: Callable[..., Outcome]) -> None:
    for mode in ("plan", "measure"):
        done = call(*TINY, f"mode={mode}", "devices=2")
        assert done.code != 0
        assert (
            "devices=2: must be null or 1 with one rank: sharding spreads a point over several" in done.err + done.out
        )
