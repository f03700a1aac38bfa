"""The report: one file with all in it, in which nothing from outside can be more than text."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import time
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lowvram.results import memory_over_step
from lowvram.results.report.report import SCRIPTS, main, save
from lowvram.results.row import GIB, Row, merge
from tests import synthetic
from tests.synthetic import HOSTILE, HOSTILE_FOLDER, failed, leave, point

MOST_BYTES, MOST_S = 6_000_000, 30  # it takes about 2 s; this is for machines that do other things too


class Page(HTMLParser):
    """What a browser would find: elements, attributes, and the text of each kind of element."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str | None]] = {}
        self.texts: dict[str, list[str]] = {}
        self._now = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.data: dict[str, Any] = json.loads(self.texts["data"][0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value)
        self._now = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._now, []).append(data)

    def points(self, key: str) -> list[Any]:
        return [each[key] for each in self.data["points"]]


def page(folder: Path, rows: list[Row]) -> Page:
    path = save(leave(folder, rows))
    assert path is not None
    return Page(path)


def test_all_is_in_one_file(tmp_path: Path) -> None:
    found = page(tmp_path, synthetic.waterfall())
    assert not {"src", "href", "style"} & found.attributes.keys()
    addresses = re.findall(r"https?://[^\s\"']*", (tmp_path / "report.html").read_text())
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert "@import" not in found.texts["style"][0]
    assert "url(" not in found.texts["style"][0]


def test_only_its_own_script_and_style_may_run(tmp_path: Path) -> None:
    found = page(tmp_path, [point(0, {})])
    (policy,) = [each for each in found.attributes["content"] if each and "default-src" in each]
    assert "default-src 'none'" in policy
    for kind in ("script", "style"):
        digest = hashlib.sha256(found.texts[kind][0].encode()).digest()
        assert f"{kind}-src 'sha256-{b64encode(digest).decode()}'" in policy


def test_what_comes_from_outside_is_only_text(tmp_path: Path) -> None:
    plain = page(tmp_path / "plain", [point(0, {}), failed(1, "error", "x")])
    rows = [
        point(
            0,
            {"model": HOSTILE},
            name=HOSTILE,
            config={"seed": 0},
            provenance={"command": HOSTILE, "device_name": HOSTILE},
        ),
        failed(1, "error", HOSTILE, choices={"precision": HOSTILE}, config={"seed": HOSTILE}),
    ]
    hostile = page(tmp_path / HOSTILE_FOLDER, rows)
    assert hostile.tags == plain.tags
    assert hostile.attributes.keys() == plain.attributes.keys()
    assert hostile.data["sweeps"][0]["name"] == HOSTILE_FOLDER
    expected = HOSTILE.replace("\u2028", "\\u2028")  # it would end a line
    assert hostile.points("command")[0] == hostile.points("name")[0] == hostile.points("reason")[1] == expected
    single = page(tmp_path / "single", [rows[0]])
    assert "".join(single.texts["title"]).strip() == expected
    assert single.tags == plain.tags
    assert hostile.points("settings")[1] == {"model": "transformer", "precision": expected, "seed": expected}


def test_the_script_never_makes_markup_of_text() -> None:
    ways = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|setTimeout\(\""
    )
    folder = Path(sys.modules[save.__module__].__file__ or "").parent / "page"
    assert {path.stem for path in folder.glob("*.js")} == set(SCRIPTS)
    assert not [path.name for path in folder.glob("*.js") if ways.search(path.read_text())]


def test_every_ending_is_shown_with_its_reason(tmp_path: Path) -> None:
    endings = {
        "oom": "out of memory in the backward pass",
        "incompatible": "fp8 needs a card",
        "killed": "ended by signal 9",
        "skipped": "planned not to fit",
        "interrupted": "stopped in the forward pass",
    }
    rows = [point(0, {}), *(failed(i, *each) for i, each in enumerate(endings.items(), start=1)), failed(6, "", None)]
    rows[-1]["status"] = None
    found = page(tmp_path, rows)
    assert found.points("status") == ["ok", *endings, "unfinished"]
    assert found.points("reason") == [None, *endings.values(), None]
    assert found.points("memory")[1:] == [None] * 6
    assert found.data["baseline"] == 0


def test_figures_hold_what_the_rows_do(tmp_path: Path) -> None:
    fidelity = {"fidelity": {"gradient_error": 0.002, "loss_gap": 0.1}}
    rows = [point(0, {}), merge(point(1, {"ckpt": "every1"}), fidelity)]
    found = page(tmp_path, rows)
    assert (found.data["unit"], found.data["memory_source"]) == ("GiB", "tensor bytes on CPU")
    assert found.points("memory") == [0.390625, 0.140625]
    assert found.points("planned") == pytest.approx([0.390625 * 1.02, 0.140625 * 1.02], rel=1e-5)
    assert [sum(kinds) for kinds in found.points("by_kind")] == pytest.approx([0.390625, 0.140625], rel=1e-4)
    assert found.points("speed") == [25600, 25600 * 0.8]
    assert found.points("gradient_error") == [None, 0.002]
    assert found.points("command") == ["python train.py 0", "python train.py 1"]
    assert found.points("curve")[0]["seen"][-1] == 60 * 32 * 128
    titles = [column["title"] for column in found.data["columns"]]
    assert titles[:4] == ["name", "status", "ckpt", "peak GiB"]
    assert [column["rank"] for column in found.data["columns"]][3] == 0
    assert titles[-1] == "command"


def test_the_head_says_what_was_swept_when_and_how(tmp_path: Path) -> None:
    about = {"started": "2026-11-25T08:10:00Z"}
    rows = [
        point(i, {"ckpt": option}, provenance={**about, "command": f"python train.py ckpt={option}"})
        for i, option in enumerate(("none", "every1"))
    ]
    found = page(tmp_path / "sweep", rows)
    assert "".join(found.texts["title"]).strip() == found.data["title"] == "ckpt none, every1"
    told = {"name": "sweep", "date": "2026-11-25 08:10 UTC", "command": "python train.py -m ckpt=none,every1"}
    assert found.data["sweeps"] == [told]


def test_speeds_have_their_spread_and_the_mark_of_disturbed_points(tmp_path: Path) -> None:
    time = {"step_ms_p50": 100.0, "step_ms_p05": 80.0, "step_ms_p95": 200.0}
    rows = [point(0, {}, disturbed="other processes", time=time), point(1, {"ckpt": "every1"})]
    found = page(tmp_path, rows)
    assert found.points("disturbed") == ["other processes", None]
    assert found.points("speed_range") == [[12800, 32000], None]


def test_the_memory_over_a_step_is_that_of_its_file(tmp_path: Path) -> None:
    rows = [point(0, {}), point(1, {"ckpt": "every1"})]
    leave(tmp_path, rows)
    moments = [[0, "between", GIB, 0, 7], [4, "forward", GIB, GIB // 2, 7], [5, "forward", GIB, 0, 7]]
    memory_over_step.write(tmp_path / rows[0]["id"], ["parameters", "activations", "host"], moments)
    path = save(tmp_path)
    assert path is not None
    told, none = Page(path).points("over_step")
    assert none is None
    assert told["events"] == [0, 4, 5]
    assert told["phases"] == [["between", 0, 0], ["forward", 1, 2]]
    sizes = dict(zip(Page(path).data["kinds"], told["sizes"], strict=True))
    assert (sizes["parameters"], sizes["activations"], sizes["gradients"]) == (1, [0, 0.5, 0], 0)


def test_plans_are_shown_as_plans(tmp_path: Path) -> None:
    plan = {"plan": {"step_ms": 100.0, "allocated_bytes": 2**30, "by_kind": {"activations": 2**30}}}
    row = failed(0, "ok", None, choices={"mode": "plan"}, **plan)
    found = page(tmp_path, [row])
    assert found.data["memory_title"] == "planned memory"
    assert (found.points("memory"), found.points("speed")) == ([1.0], [320.0])
    assert sum(found.points("by_kind")[0]) == 1.0


@pytest.mark.slow
def test_two_hundred_points_are_soon_made_and_small(tmp_path: Path) -> None:
    leave(tmp_path, synthetic.grid(200), num_steps=1000)
    started_s = time.monotonic()
    path = save(tmp_path)
    took_s = time.monotonic() - started_s
    assert path is not None
    assert len(Page(path).data["points"]) == 200
    assert path.stat().st_size <= MOST_BYTES
    assert took_s <= MOST_S


def test_a_folder_without_rows_gets_none(tmp_path: Path) -> None:
    assert save(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_several_sweeps_make_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(leave(tmp_path / name, [point(i, {}), point(2, {"ckpt": "every1"})])) for i, name in enumerate("ab")]
    assert main([*folders, "--to", str(tmp_path / "both")]) == 0
    assert "report.html" in capsys.readouterr().out
    found = Page(tmp_path / "both" / "report.html")
    assert found.points("sweep") == ["a", "a", "b", "b"]
    assert "sweep" in [column["title"] for column in found.data["columns"]]
    assert main([folders[0]]) == 0
    assert (tmp_path / "a" / "report.html").exists()


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(leave(tmp_path / "good", [point(0, {})]))
    (tmp_path / "empty").mkdir()
    for words, said in {
        (str(tmp_path / "none"),): "is not a folder",
        (str(tmp_path / "empty"),): "holds no result.json",
        (good, str(tmp_path / "empty")): "holds no result.json",
        (good, str(tmp_path)): "--to FOLDER",
    }.items():
        if words == (good, str(tmp_path)):
            leave(tmp_path, [point(1, {})])
        assert main(words) == 3
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


@pytest.mark.slow
def test_figures_for_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="--png needs lowvram[report]")
    from PIL import Image

    rows = [merge(row, {"fidelity": {"gradient_error": 0.001}}) for row in synthetic.waterfall()]
    rows[1]["name"] = "a $name^ of_many"
    assert main([str(leave(tmp_path, [*rows, failed(9, "oom", "out of memory")])), "--png"]) == 0
    said = capsys.readouterr().out
    # With the failed point it is a waterfall no more.
    names = {"memory_and_speed", "choices", "kinds", "loss_over_time", "loss_over_tokens"}
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} == names
    for path in (tmp_path / "figures").iterdir():
        assert path.name in said
        with Image.open(path) as image:
            assert image.width == 1280
            assert len(image.convert("L").getcolors() or ()) > 10  # something is drawn
    leave(tmp_path / "waterfall", rows)
    assert main([str(tmp_path / "waterfall"), "--png"]) == 0
    assert (tmp_path / "waterfall" / "figures" / "waterfall.png").exists()


def test_figures_without_matplotlib_say_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(leave(tmp_path, [point(0, {})])), "--png"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'lowvram[report]'" in line
