"""The table: what it collects, how it compares, what it says below."""

import io
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lowvram.results.columns import Table
from lowvram.results.files.claim import Claim
from lowvram.results.files.run_folder import MARKER, Kind
from lowvram.results.printed_table import to_markdown
from lowvram.results.report.report import main as write_report
from lowvram.results.row import GIB, MIB, Row, empty_row, merge, write
from lowvram.results.table import build, collect, main, render, save


def point(name: str, peak_gib: float | None = 1.0, **fields: Any) -> Row:
    source = None if peak_gib is None else "tensor_ledger"
    memory = {"peak_bytes": None if peak_gib is None else int(peak_gib * GIB), "source": source}
    fields = {"memory": memory, "status": "ok", **fields}
    return merge(empty_row(), {"id": f"id-{name}", "name": name, **fields})


def column(table: Table, title: str) -> list[str]:
    return next(list(c.texts) for c in table.columns if c.title == title)


def best(table: Table, title: str) -> set[str]:
    found = next(c for c in table.columns if c.title == title)
    return {table.columns[0].texts[i] for i in found.best}


def titles(table: Table) -> list[str]:
    return [c.title for c in table.columns]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_come_in_the_order_of_the_points(tmp_path: Path):
    for folder, index in {"a": 10, "b": 2, "c": None, "d": 0}.items():
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, merge(point(folder), {"index": index}))
    assert [row["name"] for row in collect(tmp_path)] == ["d", "b", "a", "c"]


def test_a_row_of_another_point_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for folder, marked in {"a": "id-a", "b": "id-b", "c": None}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / MARKER).write_text(json.dumps({"lowvram": "1", "point": marked}))
        write(tmp_path / folder, point("a"))
    for _ in range(2):
        assert len(collect(tmp_path)) == 3
    told = f"warning: {tmp_path / 'b' / 'result.json'} is the row of another point than the sweep's"
    assert capsys.readouterr().err == f"{told}: exchanged, or resumed with other overrides\n"


def test_points_without_a_row_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Their row was removed, or their program killed; one that a program runs now will have its row."""
    for folder in ("done", "gone", "running", "a_users"):
        (tmp_path / folder).mkdir()
    claims = [Claim(tmp_path / name, Kind.RUN, "hydra.sweep.subdir", name) for name in ("gone", "running")]
    claims[0].release()
    write(tmp_path / "done", point("done"))
    for command in (main, write_report):
        assert command([str(tmp_path)]) == 0
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{tmp_path / 'gone' / 'result.json'} is missing, so this point is left out: ")
    claims[1].release()


def test_only_the_points_of_this_sweep_are_collected(tmp_path: Path):
    for folder in ("point", "inner/point", ".hydra", "torn"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "point", point("mine"))
    write(tmp_path / "inner/point", point("another sweep's"))
    (tmp_path / "torn/result.json").write_text('{"schema": 1,')
    assert [row["name"] for row in collect(tmp_path)] == ["mine"]
    assert [row["name"] for row in collect(tmp_path / "point")] == ["mine"]
    assert collect(tmp_path / ".hydra") == []


def test_a_line_below_says_how_the_peak_was_measured():
    assert build([point("a")]).source == "tensor bytes on CPU"
    on_cuda = build([point("a", memory={"peak_bytes": GIB, "source": "cuda_allocator"})])
    assert (titles(on_cuda)[2], on_cuda.source) == ("peak GiB", "CUDA allocator")
    assert "peak: CUDA allocator" in render([point("a", memory={"peak_bytes": GIB, "source": "cuda_allocator"})])
    assert "\n- peak: CUDA allocator" in to_markdown(on_cuda)
    assert build([point("a", None)]).source is None


def test_peaks_of_different_sources_are_named_and_not_compared():
    compiled = point("compiled", memory={"peak_bytes": 5 * GIB, "source": "process"})
    table = build([point("eager"), compiled])
    assert column(table, "memory source") == ["tensor bytes on CPU", "growth of the process"]
    assert best(table, "peak GiB") == set()
    assert table.source is None


def test_only_columns_with_a_value_are_there():
    bare = titles(build([point("a"), point("b")]))
    assert bare == ["name", "status", "peak GiB"]
    rows = [
        point(
            "a",
            memory={"peak_bytes": GIB, "source": "tensor_ledger", "by_kind_max": {"activations": GIB // 2}},
            config={"vram": "1GiB"},
            plan={"allocated_bytes": GIB, "fits": False, "least_vram_bytes": 2 * GIB, "step_ms": 5.0},
            throughput={"samples_per_s": 3.0, "tokens_per_s": 300.0},
            time={"step_ms_p50": 10.0, "step_ms_p05": 9.0, "step_ms_p95": 12.0},
            loss={"last": 2.0, "eval": 2.5},
            eval={"accuracy": 0.5, "perplexity": 7.0},
        )
    ]
    shown = titles(build(rows))
    assert shown == [
        *(
            "name",
            "status",
            "peak GiB",
            "planned GiB",
            "least vram GiB",
            "fits",
            "activations GiB",
        ),
        *(
            "samples/s",
            "tokens/s",
            "step ms p50",
            "p05-p95",
            "last loss",
            "eval loss",
            "accuracy",
            "perplexity",
        ),
    ]
    assert column(build(rows), "fits") == ["no"]


def test_beside_what_was_measured_one_planned_number_is_enough_without_a_budget():
    plan = {"allocated_bytes": GIB, "fits": True, "least_vram_bytes": 2 * GIB, "reserved_bytes": GIB}
    measured = build([point("a", memory={"peak_bytes": GIB, "source": "tensor_ledger"}, plan=plan)])
    assert [title for title in titles(measured) if "plan" in title or "fit" in title] == ["planned GiB"]
    planned = build([point("a", None, plan=plan)])
    assert titles(planned)[-4:] == ["planned GiB", "planned reserved GiB", "least vram GiB", "fits"]


def test_what_could_not_be_planned_is_noted():
    table = build([point("a", 1.0, plan={"reason": "can't plan this model: it looks"})])
    assert "a: can't plan this model: it looks" in table.notes


def test_small_sizes_are_in_mib_all_of_them():
    memory = {"peak_bytes": 20 * MIB, "source": "tensor_ledger", "by_kind_max": {"activations": 5 * MIB}}
    table = build([point("a", memory=memory)])
    assert column(table, "peak MiB") == ["20.0"]
    assert column(table, "activations MiB") == ["5.00"]
    few, many = memory | {"peak_bytes": 2 * MIB}, memory | {"peak_bytes": 200 * MIB}
    table = build([point("few", memory=few), point("many", memory=many)])
    assert column(table, "peak MiB") == ["2.00", "200.00"]
    table = build([point("a", memory=memory), point("many", memory=many)])
    assert column(table, "peak GiB") == ["0.0195", "0.1953"]


def test_what_moves_and_what_is_reserved_in_vain_is_shown_where_it_is_known():
    memory = {"peak_bytes": GIB, "source": "cuda_allocator", "fragmentation_bytes": GIB // 4, "alloc_retries": 3}
    traffic = {"to_host_bytes": 2 * GIB, "to_device_bytes": GIB, "waited_ms": 5.0}
    table = build([point("a", memory=memory, traffic=traffic)])
    assert column(table, "fragmentation GiB") == ["0.250"]
    assert column(table, "to host GiB/step") == ["2.00"]
    assert column(table, "to device GiB/step") == ["1.00"]
    assert column(table, "copies waited ms") == ["5.00"]
    assert table.notes == ("a: 3 allocations succeeded only after free memory was returned to the driver",)


def test_memory_that_no_tensor_explains_is_told_where_it_is_large():
    memory = {"peak_bytes": GIB, "source": "tensor_ledger"}
    rows = [point(name, memory=memory | {"beyond_tensors_bytes": size}) for name, size in SIZES_BEYOND.items()]
    text = "0.195 GiB more than its tensors were allocated, by kernels, libraries or other threads"
    assert build(rows).notes == (f"large: {text}",)
    small = {"peak_bytes": 10 * MIB, "source": "tensor_ledger", "beyond_tensors_bytes": 20 * MIB}
    assert build([point("small", memory=small)]).notes == ()


SIZES_BEYOND = {"large": 200 * MIB, "little": 90 * MIB, "unknown": None}


def test_numbers_of_a_column_have_the_same_decimals():
    table = build([point("a", 0.1234), point("b", 12.5), point("c", None, status="oom")])
    assert column(table, "peak GiB") == ["0.123", "12.500", ""]


@pytest.mark.parametrize(
    ("title", "path", "less_is_better"),
    [
        ("samples/s", ("throughput", "samples_per_s"), False),
        ("tokens/s", ("throughput", "tokens_per_s"), False),
        ("step ms p50", ("time", "step_ms_p50"), True),
        ("last loss", ("loss", "last"), True),
        ("eval loss", ("loss", "eval"), True),
        ("accuracy", ("eval", "accuracy"), False),
        ("perplexity", ("eval", "perplexity"), True),
        ("planned GiB", ("plan", "allocated_bytes"), True),
    ],
)
def test_the_best_of_a_column_is_marked(title: str, path: tuple[str, str], less_is_better: bool):
    section, key = path
    low = merge(point("low"), {section: {key: 2.0 * GIB}})
    high = merge(point("high"), {section: {key: 3.0 * GIB}})
    assert best(build([low, high]), title) == {"low" if less_is_better else "high"}


def test_fidelity_is_shown_where_it_was_asked_for():
    """Errors lie powers of ten apart, and none of them is the best: what is exact is all noise."""
    assert not {"gradient error", "gradient cosine", "loss gap"} & set(titles(build([point("a"), point("b")])))
    exact = {"gradient_error": 1.26e-7, "gradient_cosine": 1.0, "loss_gap": 0.0, "reason": None}
    unknown = {"gradient_error": None, "gradient_cosine": None, "loss_gap": None, "reason": "the reference\nis too big"}
    rows = [
        point("exact", fidelity=exact),
        point("lossy", fidelity={**exact, "gradient_error": 0.19, "gradient_cosine": 0.98, "loss_gap": 0.031}),
        point("same", fidelity={**exact, "gradient_error": 0.0}),
        point("unknown", fidelity=unknown),
        point("plain"),
    ]
    table = build(rows)
    assert column(table, "gradient error") == ["1.3e-07", "1.9e-01", "0", "", ""]
    assert column(table, "loss gap") == ["0.0000", "0.0310", "0.0000", "", ""]
    assert not best(table, "gradient error") | best(table, "loss gap")
    assert "unknown: its fidelity is not known: the reference is too big" in table.notes
    assert "gradient cosine" not in titles(table)


def test_only_rows_that_went_well_can_be_the_best():
    table = build([point("a", 2.0), point("b", 3.0), point("c", 1.0, status="oom")])
    assert best(table, "peak GiB") == {"a"}


def test_what_reads_the_same_is_marked_the_same():
    table = build([point("a", 2.0), point("b", 2.0 + 1e-6), point("c", 3.0)])
    assert best(table, "peak GiB") == {"a", "b"}


def test_a_single_row_is_not_the_best_of_anything():
    assert best(build([point("a")]), "peak GiB") == set()


def test_everything_that_went_wrong_is_said_in_a_line_each():
    rows = [
        point("fine"),
        point("big", status="oom", reason="out of memory\n  in the backward pass"),
        point("odd", status="killed"),
        point("busy", disturbed="another process held 1 GiB"),
        point("norm", semantics_changed="BatchNorm normalises parts"),
    ]
    assert build(rows).notes == (
        "big: oom: out of memory in the backward pass",
        "odd: killed: no reason is known",
        "busy: disturbed: another process held 1 GiB",
        "norm: semantics changed: BatchNorm normalises parts",
    )


def test_kept_rows_tell_their_revision():
    rows = [point(name, provenance={"git_sha": "abc123", "dirty": name == "b"}) for name in ("a", "b")]
    assert build(rows).notes == ()
    assert build(rows, kept={"id-b"}).notes == ("b: measured at abc123 with uncommitted changes",)
    newer = point("c", provenance={"git_sha": "def456"})
    assert build([rows[0], newer]).notes == ("a: measured at abc123", "c: measured at def456")
    assert build([rows[0], point("early", status="error", reason="x")]).notes == ("early: error: x",)


def test_markdown_marks_and_escapes():
    lines = to_markdown(build([point("a|b", 2.0), point("x_y", 3.0, disturbed="*")])).splitlines()
    assert lines[0] == "| name | status | peak GiB | disturbed |"
    assert lines[1] == "| --- | --- | ---: | --- |"
    assert lines[2:4] == [r"| a\|b | ok | **2.00** |  |", r"| x\_y | ok | 3.00 | yes |"]
    assert lines[4:] == ["", "- peak: tensor bytes on CPU", r"- x\_y: disturbed: \*"]


def test_the_spread_of_the_step_is_shown():
    rows = [point("a", time={"step_ms_p50": 10.0, "step_ms_p05": 9.5, "step_ms_p95": 12.25}), point("b")]
    assert column(build(rows), "p05-p95") == ["9.50-12.25", ""]


def test_nothing_that_is_not_finite_is_shown():
    table = build([point("a", loss={"last": float("nan"), "eval": float("inf")})])
    assert titles(table) == ["name", "status", "peak GiB"]


def test_saved_files_are_rebuilt_as_a_whole(tmp_path: Path):
    rows = [point("a"), point("b", status="nonfinite", loss={"last": float("nan")})]
    save(tmp_path, rows)
    save(tmp_path, rows)
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "table.csv", "rows.jsonl"}
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a", "b"]
    assert "NaN" not in lines[1]
    assert "b: nonfinite" in (tmp_path / "table.md").read_text()


def test_plain_text_is_wide_and_a_terminal_has_colours(monkeypatch: pytest.MonkeyPatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    rows = [point("[bold]" + "n" * 200, 2.0), point("b", 3.0, status="oom", reason="r" * 200)]
    plain = render(rows, io.StringIO())
    assert "\x1b" not in plain
    assert "[bold]" + "n" * 200 in plain
    assert "b: oom: " + "r" * 200 in plain
    assert all(line == line.rstrip() for line in plain.splitlines())
    coloured = render(rows, Terminal())
    assert re.search(r"\x1b\[1;32m *2\.00", coloured)
    assert "3.00" in coloured
    assert not re.search(r"\x1b\[1;32m *3\.00", coloured)


NAMES = ("fp32-every1", "bf16")
LONG_NAMES = tuple(
    f"{dtype}-every1-x2-lr0.0005-batch_size16-dim96-clip1.0-warmup_steps100" for dtype in ("fp32", "bf16")
)


def printed(names: Sequence[str], width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a terminal of `width` columns shows of them."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(width))
    return re.sub(r"\x1b\[[\d;]*m", "", render(rows_of(names), Terminal())).splitlines()


def rows_of(names: Sequence[str]) -> list[Row]:
    """Rows with many figures."""
    time = {"step_ms_p50": 1234.5, "step_ms_p05": 1200.0, "step_ms_p95": 1300.0}
    more: dict[str, Any] = {"time": time, "throughput": {"samples_per_s": 123.4, "tokens_per_s": 15678.0}}
    more |= {"loss": {"last": 5.125, "eval": 4.625}, "eval": {"accuracy": 0.285, "perplexity": 130.5}}
    return [point(name, plan={"allocated_bytes": GIB}, **more) for name in names]


@pytest.mark.parametrize("width", [80, 100, 140, 200])
def test_a_narrow_terminal_drops_columns_and_says_which(width: int, monkeypatch: pytest.MonkeyPatch):
    """Names stay whole, the header is one line, and no column is lost without a word."""
    header, rule, *others = [line for line in printed(NAMES, width, monkeypatch) if line]
    assert set(rule.strip()) == {"─"}
    assert [others[i].split()[0] for i in range(2)] == list(NAMES)
    assert others[2] == "peak: tensor bytes on CPU"
    table = [header, *others[:2]]
    assert max(map(len, table)) <= width
    named = others[3].removeprefix("also in table.csv: ").split(", ") if len(others) > 3 else []
    shown = re.split(r" {2,}", header.strip())
    assert sorted(shown + named) == sorted(titles(build(rows_of(NAMES))))
    assert {"name", "status", "peak GiB", "tokens/s", "eval loss"} <= set(shown)
    assert bool(named) == (width < 200)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_long_names_stay_whole(width: int, monkeypatch: pytest.MonkeyPatch):
    """Those that are longer than half of the terminal continue in the next line."""
    header, _, *others = [line for line in printed(LONG_NAMES, width, monkeypatch) if line]
    assert "peak GiB" in header
    table = others[: others.index("peak: tensor bytes on CPU")]
    assert max(map(len, table)) <= width
    longest = min(width // 2, len(LONG_NAMES[0]))
    assert "".join(line[2 : 2 + longest].strip() for line in table) == "".join(LONG_NAMES)


def test_the_command_prints_and_saves(tmp_path: Path):
    (tmp_path / "p").mkdir()
    write(tmp_path / "p", point("bf16-every2"))
    command = [sys.executable, "-m", "lowvram.table", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "bf16-every2" in done.stdout
    assert "tensor bytes on CPU" in done.stdout
    assert (tmp_path / "table.md").exists()


def test_the_command_refuses_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "full").mkdir()
    write(tmp_path / "full", point("a"))
    (tmp_path / "full/empty").mkdir()
    for folders in ([str(tmp_path / "nowhere")], [str(tmp_path / "full/empty")], []):
        assert main(folders) == 3
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main([str(tmp_path / "full"), str(tmp_path / "nowhere")]) == 3
    assert main([str(tmp_path / "full"), str(tmp_path)]) == 0


def test_a_sweep_without_a_row_that_could_be_written_has_an_empty_table(tmp_path: Path) -> None:
    """Its disk was full; and what the table says isn't worth an error."""
    save(tmp_path, [])
    assert (tmp_path / "rows.jsonl").read_text() == ""
    assert "ok" not in render([])


def test_scores_of_the_users_own_have_their_columns() -> None:
    rows = [point("a", eval={"f1": 0.5}), point("b", eval={"f1": 0.25, "top5": 0.75})]
    columns = {column.title: column.texts for column in build(rows).columns}
    assert columns["f1"] == ("0.500", "0.250")
    assert columns["top5"] == ("", "0.750")
