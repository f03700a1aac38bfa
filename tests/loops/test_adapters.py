"""mode=train with adapters: what is saved of them, and what others can do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lowvram.core.knob import Knob
from lowvram.core.rig import Part
from lowvram.knobs.adapter import Freeze, Lora, QLora
from lowvram.knobs.adapter.layers import library
from lowvram.loops.evaluate import evaluate
from lowvram.loops.export.folder import load
from lowvram.loops.metrics_log import MetricsLog
from lowvram.loops.session import Interrupted, Session
from lowvram.loops.train import Train, TrainingRun
from tests.laboratory import PROBLEMS, relative_error
from tests.loops.sessions import Told
from tests.tiers import first_of

pytestmark = pytest.mark.medium

MakeSession = Callable[..., Session]
ADAPTERS: list[Knob] = [
    Freeze(["blocks.1", "head"]),
    Lora(train=["head"]),
    QLora(),
    Lora(train_a=False, rank_stabilized=True),
]


@pytest.mark.parametrize("problem", first_of(["transformer_dropout", "resnet"]))
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_run_that_was_stopped_goes_on_to_the_last_digit(
    make_session: MakeSession, problem: str, adapter: Knob
) -> None:
    choices: dict[str, str | Knob] = {"adapter": adapter}
    whole, first, second = Told(), Told(stop_at=3), Told()
    uninterrupted = make_session(problem, told=whole, choices=choices)
    Train().run(uninterrupted)
    folder = uninterrupted.folder / "stopped"
    folder.mkdir()
    with pytest.raises(Interrupted):
        Train().run(replace(make_session(problem, told=first, choices=choices), folder=folder))
    Train().run(replace(make_session(problem, told=second, choices=choices, is_resumed=True), folder=folder))
    histories = [told.values("loss/train") for told in (first, second, whole)]
    assert histories[0] + histories[1] == histories[2]
    weights = [load(place / "model").state_dict() for place in (uninterrupted.folder, folder)]
    assert relative_error(*weights) == 0


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_snapshot_holds_what_trains_alone(make_session: MakeSession, adapter: Knob) -> None:
    session = make_session(choices={"adapter": adapter})
    state = TrainingRun(session, MetricsLog(session.folder, Told())).state([])
    assert set(state["model"]) >= {name for name, p in session.rig.model.named_parameters() if p.requires_grad}
    assert sum(tensor.numel() for tensor in state["model"].values()) <= sum(
        parameter.numel() * (2 if "token_embedding" in name else 1)  # by both of its names
        for name, parameter in session.rig.model.named_parameters()
        if parameter.requires_grad
    )


@pytest.mark.sampled
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("problem", ["transformer", "resnet", "resnet_frozen"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_is_left_is_what_was_evaluated(
    make_session: MakeSession, problem: str, adapter: Knob, merge: bool
) -> None:
    session = make_session(problem, choices={"adapter": adapter}, merge=merge)
    row = Train().run(session)
    model = load(session.folder / "model")
    assert set(model.state_dict()) == set(PROBLEMS[problem].make_model().state_dict())
    plain = replace(session, rig=replace(session.rig, model=model, forward=lambda part: model(part.inputs)))
    assert evaluate(plain).loss == pytest.approx(row["loss"]["eval"], rel=1e-5)
    assert row["model"]["parameters"] > row["model"]["trainable"] > 0
    names = {path.name for path in (session.folder / "model").iterdir()}
    apart = {"adapter_config.json", "adapter_model.safetensors", "lowvram.json"}
    whole = {"config.json", "model.safetensors"}
    assert names == (apart if isinstance(adapter, Lora) and not merge else whole) | {"files.json"}


@pytest.mark.parametrize("problem", ["transformer", "resnet"])
def test_peft_puts_what_was_saved_into_the_model_that_was_there(make_session: MakeSession, problem: str) -> None:
    adapter = Lora(rank=4, targets=["qkv", "up", "blocks.1"], train=["head"])
    if problem == "resnet":
        adapter = Lora(rank=4, train=["head"])
    session = make_session(problem, choices={"adapter": adapter})
    Train().run(session)
    plain: Any = make_session(problem).rig.model
    batch: Part = next(session.batches(0))
    before = plain.eval()(batch.inputs)
    theirs = library().PeftModel.from_pretrained(plain, session.folder / "model").eval()
    with torch.no_grad():
        assert torch.allclose(theirs(batch.inputs), load(session.folder / "model").eval()(batch.inputs), atol=1e-5)
        assert not torch.allclose(theirs(batch.inputs), before, atol=1e-5)
