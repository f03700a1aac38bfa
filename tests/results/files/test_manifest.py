"""An export replaces an earlier one file by file; whatever happens meanwhile, nothing of the user's is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.errors import BadInput
from lowvram.results.files import manifest
from lowvram.results.files.durable import remove_leftovers, unfinished_folder
from tests.tiers import first_of

OLD = {"config.json": "old", "weights": "old " * 99, "adapter": "old"}
NEW = {"config.json": "new", "weights": "new " * 99, "tokenizer": "new"}
MOST_CALLS = 99


def put(folder: Path, texts: dict[str, str]) -> None:
    with unfinished_folder(folder) as fresh:
        for name, text in texts.items():
            (fresh / name).write_text(text)
        manifest.put(fresh, folder)


def texts_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name != manifest.NAME}


def in_a_process_that_dies(call: Callable[[], object], num_calls: int) -> bool:
    """Whether it died before it had made so many calls that change a folder."""
    pid = os.fork()
    if pid == 0:
        left = [num_calls]
        for name in ("open", "mkdir", "fsync", "replace", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name), left))
        call()
        os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


def counted(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def counted_call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return call(*args, **options)

    return counted_call


@pytest.mark.parametrize("before", first_of([OLD, None]), ids=["over an older one", "the first"])
def test_a_death_leaves_the_old_export_the_new_one_or_one_that_is_refused(
    tmp_path: Path, before: dict[str, str] | None
) -> None:
    found = set[str]()
    for num_calls in range(MOST_CALLS):
        folder = tmp_path / str(num_calls) / "model"
        folder.mkdir(parents=True)
        (folder / "mine").write_text("mine")
        if before:
            put(folder, before)
        died = in_a_process_that_dies(lambda folder=folder: put(folder, NEW), num_calls)
        found.add(state(folder, before))
        remove_leftovers(folder.parent)
        remove_leftovers(folder)
        put(folder, NEW)  # the next one knows what is ours
        assert texts_of(folder) == NEW | {"mine": "mine"}
        assert [path.name for path in folder.parent.iterdir()] == ["model"]
        if not died:
            break
    assert found == ({"old", "cut off", "new"} if before else {"none", "cut off", "new"})


def state(folder: Path, before: dict[str, str] | None) -> str:
    """Of a folder in which somebody died."""
    texts = {name: text for name, text in texts_of(folder).items() if name != "mine" and not name.startswith(".")}
    if before is None and not (folder / manifest.NAME).exists():
        assert texts == {}
        return "none"
    try:
        manifest.check(folder)
    except BadInput as error:
        return "cut off" if "writing this one was cut off; resume=" in str(error) else str(error)
    assert texts in (before, NEW)
    return "old" if texts == before else "new"


def test_files_of_the_users_stay_and_ours_of_before_go(tmp_path: Path) -> None:
    put(tmp_path / "model", OLD)
    (tmp_path / "model" / "mine").write_text("mine")
    put(tmp_path / "model", NEW)
    manifest.check(tmp_path / "model")
    assert texts_of(tmp_path / "model") == NEW | {"mine": "mine"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer", "adapter", manifest.NAME])
def test_a_file_in_the_way_is_reported_before_anything_changes(tmp_path: Path, name: str) -> None:
    """One of another name than before, one that was edited, and a list of something else."""
    put(tmp_path / "model", OLD)
    (tmp_path / "model" / name).write_text("mine")
    there = {path.name: path.read_text() for path in (tmp_path / "model").iterdir()}
    with pytest.raises(
        FileExistsError, match=rf"model/{name} is in the way .*: move it elsewhere, then go on with resume="
    ):
        put(tmp_path / "model", NEW)
    assert {path.name: path.read_text() for path in (tmp_path / "model").iterdir()} == there
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_has_no_list_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"model/config\.json is in the way"):
        put(tmp_path / "model", NEW)


def test_a_folder_that_is_a_link_or_a_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "model").symlink_to("theirs")
    with pytest.raises(FileExistsError, match="model is in the way"):
        put(tmp_path / "model", NEW)
    assert list((tmp_path / "theirs").iterdir()) == []
    (tmp_path / "model").unlink()
    (tmp_path / "model").write_text("mine")
    with pytest.raises(FileExistsError, match="model is in the way"):
        put(tmp_path / "model", NEW)


def test_a_link_to_one_of_our_files_is_not_ours(tmp_path: Path) -> None:
    put(tmp_path / "model", OLD)
    (tmp_path / "model" / "weights").rename(tmp_path / "weights")
    (tmp_path / "model" / "weights").symlink_to("../weights")
    with pytest.raises(FileExistsError, match="weights is in the way"):
        put(tmp_path / "model", NEW)


def test_a_list_that_leads_out_of_its_folder_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    put(tmp_path / "model", OLD)
    told = json.loads((tmp_path / "model" / manifest.NAME).read_text())
    told["files"]["../mine"] = vars(manifest.content_of(tmp_path / "mine"))
    (tmp_path / "model" / manifest.NAME).write_text(json.dumps(told))
    with pytest.raises(FileExistsError, match=r"files\.json is in the way"):
        put(tmp_path / "model", NEW)
    with pytest.raises(BadInput, match=r"files\.json is damaged \(a name in it leads out of the folder\)"):
        manifest.check(tmp_path / "model")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_file_that_is_missing_or_changed_is_named(tmp_path: Path) -> None:
    put(tmp_path / "model", OLD)
    (tmp_path / "model" / "weights").write_text("old " * 98 + "odd ")
    with pytest.raises(BadInput, match=r"as it was exported: weights is damaged \(its bytes don't match their hash\)"):
        manifest.check(tmp_path / "model")
    (tmp_path / "model" / "weights").unlink()
    with pytest.raises(BadInput, match=r"weights is damaged \(it is missing\)"):
        manifest.check(tmp_path / "model")
