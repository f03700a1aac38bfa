"""What a snapshot must hold so that nothing is lost, or is refused before work depends on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lowvram.config.errors import Incompatible
from lowvram.core.savable import unreadable
from lowvram.loops.export.folder import load
from lowvram.loops.session import Interrupted, Session
from lowvram.loops.train import Train
from lowvram.models import layout
from lowvram.models.external import ExternalConfig
from lowvram.results.files.run_folder import snapshots_in
from tests.laboratory import TOKENS
from tests.loops.sessions import Told

MakeSession = Callable[..., Session]
Patch = pytest.MonkeyPatch
SWITCHED = 3  # the step after which a model freezes or thaws a parameter


def test_the_place_and_type_of_what_cannot_be_read_back_are_named() -> None:
    for value, wanted in {
        "numpy": (np.float32(1), "a.0.b is a numpy.float32"),
        "dict": ({1: object()}, "a.0.b.1 is a builtins.object"),
        "fine": ({1: (torch.ones(1), "x", None, {2}, [True])}, None),
    }.values():
        assert unreadable({"a": [{"b": value}]}) == wanted


def weights(session: Session) -> dict[str, Tensor]:
    return load(session.folder / "model").state_dict()


def switching(session: Session, name: str, trains: bool) -> Session:
    """The session, whose model switches one of its parameters after step `SWITCHED`, and changes it by hand."""
    update, calls = session.rig.stepper.update, [0]
    parameter = session.rig.model.get_parameter(name)
    if trains:
        parameter.requires_grad_(False)

    def switch() -> Any:
        result = update()
        calls[0] += 1
        if calls[0] == SWITCHED:
            parameter.requires_grad_(trains)
            with torch.no_grad():
                parameter.mul_(2.0)
        return result

    session.rig.stepper.update = switch
    return session


@pytest.mark.parametrize("trains", [False, True])
def test_a_parameter_that_is_frozen_or_thawed_while_training_is_saved(make_session: MakeSession, trains: bool) -> None:
    name = "head.weight"
    whole = switching(make_session(), name, trains)
    Train().run(whole)
    wanted = weights(whole)
    with pytest.raises(Interrupted):
        Train().run(switching(make_session(told=Told(stop_at=4)), name, trains))
    again = make_session(is_resumed=True)
    again.rig.model.get_parameter(name).requires_grad_(not trains)  # as its constructor makes it
    Train().run(again)
    assert again.rig.model.get_parameter(name).requires_grad == trains
    torch.testing.assert_close(weights(again), wanted, rtol=0, atol=0)


class Counting(nn.Module):
    """Keeps what it has seen beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.seen = nn.Embedding(11, 32), nn.Linear(32, 11), {"tokens": 0}
        self.inner = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen["tokens"] += tokens.numel()
        return self.head(self.inner(self.embed(tokens)))

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_an_extra_state_is_exported_and_loaded(tmp_path: Path) -> None:
    model = Counting()
    model(torch.zeros(2, 3, dtype=torch.int64))
    config = ExternalConfig(target=f"{Counting.__module__}.Counting")
    layout.save(model, config, TOKENS, tmp_path)
    with pytest.warns(UserWarning, match="files.json is missing"):
        loaded = load(tmp_path, model=Counting)
    assert loaded.seen == {"tokens": 6}
    torch.testing.assert_close(loaded.state_dict()["head.weight"], model.head.weight.detach())


def with_extra_state(session: Session, patch: Patch, value: Any) -> tuple[Session, list[Any]]:
    """The session, whose model has an extra state; and what it was set to."""
    found: list[Any] = []
    model_class = type(session.rig.model)
    patch.setattr(model_class, "get_extra_state", lambda model: value, raising=False)
    patch.setattr(model_class, "set_extra_state", lambda model, state: found.append(state), raising=False)
    return session, found


@pytest.mark.parametrize("value", [{"seen": [3, 4]}, torch.arange(3)])
def test_an_extra_state_is_saved_and_restored(make_session: MakeSession, monkeypatch: Patch, value: Any) -> None:
    session, _ = with_extra_state(make_session(told=Told(stop_at=2)), monkeypatch, value)
    with pytest.raises(Interrupted):
        Train().run(session)
    resumed, found = with_extra_state(make_session(is_resumed=True), monkeypatch, value)
    Train().run(resumed)
    torch.testing.assert_close(found[0], value)
    assert (resumed.folder / "model" / layout.EXTRA).is_file()


def test_an_extra_state_that_no_snapshot_can_hold_is_refused_before_the_first_step(
    make_session: MakeSession, monkeypatch: Patch
) -> None:
    session, _ = with_extra_state(make_session(), monkeypatch, np.ones(3))
    with pytest.raises(
        Incompatible, match=r"model: snapshots can't hold its state, as _extra_state is a numpy\.ndarray"
    ):
        Train().run(session)


@pytest.mark.parametrize("first_step", [1, 3])
def test_a_state_that_becomes_unreadable_loses_no_weights(
    make_session: MakeSession, first_step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first step the run is refused; later it goes on, and says that it leaves weights alone."""
    session = make_session(snapshot_every=2)
    stepper, calls = session.rig.stepper, [0]
    update = stepper.update

    def spoil() -> Any:
        result = update()
        calls[0] += 1
        if calls[0] == first_step:
            stepper.optimizer.param_groups[0]["date"] = np.ones(1)  # pyright: ignore[reportAttributeAccessIssue]
        return result

    stepper.update = spoil
    if first_step == 1:
        with pytest.raises(Incompatible, match=r"param_groups\.0\.date is a numpy\.ndarray"):
            Train().run(session)
        return
    Train().run(session)
    assert "from step 4 on no snapshot can be saved, only the weights at the end" in capsys.readouterr().out
    assert [path.name[:13] for path in snapshots_in(session.folder / "snapshots")] == ["step_00000002"]
    assert weights(session)


def test_weights_are_exported_where_the_last_snapshot_fails(make_session: MakeSession, monkeypatch: Patch) -> None:
    session = make_session()
    (session.folder / "snapshots").touch()  # no folder can be made there
    with pytest.raises(OSError, match="Not a directory"):
        Train().run(session)
    assert weights(session)


@pytest.mark.parametrize("first_step", [1, 3])
@pytest.mark.parametrize("is_new", [False, True])
def test_a_buffer_that_changes_its_shape_is_refused_after_the_first_step(
    make_session: MakeSession, first_step: int, is_new: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could be loaded from no snapshot, and from no export."""
    session = make_session(snapshot_every=2)
    model, update, calls = session.rig.model, session.rig.stepper.update, [0]
    if not is_new:
        model.register_buffer("bank", torch.zeros(0, 2))
    model.register_buffer("cache", torch.zeros(0), persistent=False)

    def grow() -> Any:
        calls[0] += 1
        model.cache = torch.zeros(calls[0])
        if calls[0] >= first_step:
            model.register_buffer("bank", torch.zeros(3 * calls[0], 2))
        return update()

    session.rig.stepper.update = grow
    says = "bank is added" if is_new else r"bank changes its shape from \(0, 2\) to"
    if first_step == 1:
        with pytest.raises(Incompatible, match=rf"^model: neither snapshots nor the exported weights .* {says}"):
            Train().run(session)
        return
    Train().run(session)
    assert "from step 4 on no snapshot can be saved" in capsys.readouterr().out
