"""All that determines a run, in its folder: read as it was written, without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.secret import REFUSED
from lowvram.launch.spec import FILE_NAME, NoSpec, PointSpec

SECRET = "hf_" + "x" * 20
CONFIG: dict[str, Any] = {
    "seed": 1,
    "model": {"name": "m", "kwargs": {"token": SECRET, "sizes": [1, 2]}},
    "train": {"clip": float("inf")},
}
PLAN: dict[str, Any] = {"advice": "try vram=1G"}


def spec_in(folder: Path, **more: Any) -> PointSpec:
    known = {"config": CONFIG, "choices": {"model": "hf"}, "plan": PLAN, "provenance": {"seed": 1}, **more}
    return PointSpec("0" * 16, "n", 0, folder, **known)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, is_resumed=True, run="r", sweep="s", fidelity={"steps": 1})
    spec.write()
    assert spec.hidden() == [(["model", "kwargs", "token"], SECRET)]
    assert PointSpec.read(tmp_path, json.loads(json.dumps(spec.hidden()))) == spec


def test_no_secret_is_written(tmp_path: Path) -> None:
    spec_in(tmp_path).write()
    text = (tmp_path / FILE_NAME).read_text()
    assert SECRET not in text
    assert REFUSED in text
    with pytest.raises(NoSpec, match=r"model\.kwargs\.token: its value is a secret, which spec\.json doesn't hold"):
        PointSpec.read(tmp_path)


def test_a_value_that_is_no_number_is_no_secret(tmp_path: Path) -> None:
    """It differs from itself. The process that builds the point refuses it."""
    spec = spec_in(tmp_path, config={"lr": float("nan")})
    spec.write()
    assert spec.hidden() == []
    assert str(PointSpec.read(tmp_path).config) == "{'lr': nan}"


def test_the_row_begins_with_what_is_known() -> None:
    row = spec_in(Path("nowhere")).first_row()
    assert row["config"]["model"]["kwargs"] == {"token": REFUSED, "sizes": [1, 2]}
    assert (row["id"], row["plan"], row["choices"]) == ("0" * 16, PLAN, {"model": "hf"})
    assert row["status"] is None


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"seed": 1', '"seed": 2', "its bytes don't match its checksum"),
        ('"seed": 1', "", "its bytes don't match its checksum"),
        ("{", "[", "it is cut off, or its checksum is damaged"),
    ],
)
def test_a_damaged_one_is_refused_in_one_sentence(tmp_path: Path, old: str, new: str, why: str) -> None:
    spec_in(tmp_path).write()
    path = tmp_path / FILE_NAME
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(NoSpec, match=f"spec.json is no specification of a run: .*{why}"):
        PointSpec.read(tmp_path)
