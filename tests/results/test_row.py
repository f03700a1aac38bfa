"""The row: its schema, its file, the exit codes that follow from it."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowvram.results.files.durable import write_text
from lowvram.results.metrics import METRICS
from lowvram.results.row import (
    GIB,
    Status,
    empty_row,
    exit_code,
    held_by_another_process,
    is_final,
    merge,
    read,
    size_text,
    to_json,
    write,
)
from lowvram.results.row_fields import NUMBER, TEXT, TRUTH, row_fields

RERUN = ("step_ms_p50", "reason", "status", "disturbed")
SECTIONS = {
    "logged": "name group",
    "model": "parameters trainable blocks",
    "memory": "peak_bytes source steady_peak_bytes reserved_bytes fragmentation_bytes inactive_split_bytes "
    "device_bytes free_at_start_bytes alloc_retries process_peak_bytes host_peak_bytes "
    "by_kind by_kind_max by_kind_reason",
    "throughput": "samples_per_s tokens_per_s mfu",
    "data": "padding",
    "time": "step_ms_p50 step_ms_p05 step_ms_p95 steps is_cut forward_ms backward_ms update_ms "
    "setup_s compile_s total_s data_wait_frac",
    "traffic": "to_host_bytes to_device_bytes waited_ms",
    "loss": "first last eval",
    "eval": "accuracy perplexity",
    "precision": "skipped_steps scale",
    "training": "steps skipped_steps exported_step best_step best_value ended_by",
    "gradient": "noise_scale noise_scale_reason",
    "pruning": "left",
    "growing": "left",
    "provenance": (
        "git_sha dirty lowvram torch device_name device_memory_bytes driver threads seed python started command"
    ),
}
# status: (a re-run skips it, exit code of a single run, exit code of a sweep with an ok row beside it)
MATRIX = {
    "ok": (True, 0, 0),
    "oom": (True, 1, 0),
    "incompatible": (True, 3, 0),
    "nonfinite": (True, 1, 1),
    "timeout": (False, 1, 1),
    "killed": (False, 1, 1),
    "error": (False, 1, 1),
    "interrupted": (False, 75, 75),
    "skipped": (False, 1, 0),
}


def strict(text: str):
    """JSON as the standard has it: Python's own reader would let NaN pass."""

    def refuse(constant: str):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def ended(status: str | None, **fields):
    return merge(empty_row(), {"status": status, **fields})


def full_row():
    """A row with a value of its own under every key of the schema."""
    row, kinds = empty_row(), row_fields()
    number = iter(range(1, 1000))

    def made(path: str) -> Any:
        plain = {NUMBER.words: next(number) / 7, TEXT.words: f"{path} ü {next(number)}", TRUTH.words: True}
        return plain.get(kinds[path].words, {"activations": 123})

    for key, value in row.items():
        if isinstance(value, dict):
            row[key] = {name: made(f"{key}.{name}") for name in value} or {"ckpt": "every2"}
        elif key != "schema":
            row[key] = made(key)
    lists = {"ranks": {"rank": 0, "peak_bytes": 5}, "attempts": {"parts": 2}, "reruns": dict.fromkeys(RERUN)}
    return row | {"status": "ok"} | {key: [item] for key, item in lists.items()}


def test_every_key_of_the_schema_is_there_and_null():
    """No key of the first rows has gone. Those of figures are held by tests/results/test_metrics.py."""
    row, figures = empty_row(), {metric.path for metric in METRICS}
    for section in {path.partition(".")[0] for path in figures} - {*SECTIONS, "plan", "fidelity"}:
        del row[section]
    for section, names in SECTIONS.items():
        fields = row.pop(section)
        assert fields == dict.fromkeys(fields)
        assert {*names.split()} <= fields.keys()
        assert {f"{section}.{name}" for name in fields.keys() - {*names.split()}} <= figures
    assert row.pop("schema") == 1
    assert row.pop("choices") == row.pop("config") == {}
    names = "id name index status reason compiled plan attempts fidelity semantics_changed disturbed reruns ranks"
    assert row == dict.fromkeys(names.split())


def test_empty_rows_share_nothing():
    empty_row()["memory"]["peak_bytes"] = 1
    assert empty_row()["memory"]["peak_bytes"] is None


def test_a_full_row_comes_back_from_strict_json(tmp_path: Path):
    row = full_row()
    write(tmp_path, row)
    stored = strict((tmp_path / "result.json").read_text())
    assert stored.pop("crc32")
    assert stored == row
    assert read(tmp_path) == row
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_null(tmp_path: Path, value: float):
    row = ended("nonfinite", loss={"last": value}, plan={"largest": [{"bytes": value}], "lines": (value, 1.0)})
    write(tmp_path, row)
    stored = strict((tmp_path / "result.json").read_text())
    assert stored["loss"]["last"] is None
    assert stored["plan"] == {"largest": [{"bytes": None}], "lines": [None, 1.0]}
    assert stored["status"] == "nonfinite"


def test_merge_goes_deep_and_leaves_its_arguments_alone():
    row = ended(None, plan={"fits": True, "largest": [1, 2]}, choices={"ckpt": "none"})
    merged = merge(row, {"plan": {"error": {"median": 0.1}, "largest": [3]}, "choices": {"allocator": "tight"}})
    assert merged["plan"] == {"fits": True, "largest": [3], "error": {"median": 0.1}}
    assert merged["choices"] == {"ckpt": "none", "allocator": "tight"}
    assert row["plan"] == {"fits": True, "largest": [1, 2]}
    merged["plan"]["largest"].append(4)
    assert row["plan"]["largest"] == [1, 2]


def test_merge_refuses_what_the_schema_does_not_know():
    with pytest.raises(KeyError, match="peak_bytes"):
        merge(empty_row(), {"peak_bytes": 1})
    with pytest.raises(TypeError, match="memory"):
        merge(empty_row(), {"memory": None})


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "status": "o', "[]", "null", '{"status": "ok"}', "\x00\xff"])
def test_a_torn_or_foreign_file_is_no_row(tmp_path: Path, text: str):
    (tmp_path / "result.json").write_bytes(text.encode("latin-1"))
    assert read(tmp_path) is None


def test_every_prefix_of_a_row_is_no_row(tmp_path: Path):
    write(tmp_path, full_row())
    whole = (tmp_path / "result.json").read_bytes().rstrip()
    for length in range(len(whole)):
        (tmp_path / "result.json").write_bytes(whole[:length])
        assert read(tmp_path) is None, length


def test_a_missing_file_is_no_row(tmp_path: Path):
    assert read(tmp_path) is None
    assert read(tmp_path / "nowhere") is None
    (tmp_path / "file").touch()
    assert read(tmp_path / "file") is None


def test_a_reader_in_the_middle_of_a_write_keeps_the_old_row(tmp_path: Path):
    write(tmp_path, ended("interrupted"))
    with (tmp_path / "result.json").open() as reader:
        write(tmp_path, ended("ok"))
        assert json.load(reader)["status"] == "interrupted"
    assert read(tmp_path) == ended("ok")


def test_a_foreign_nan_is_read_as_null(tmp_path: Path):
    (tmp_path / "result.json").write_text('{"schema": 1, "status": "ok", "loss": {"last": NaN, "eval": -Infinity}}')
    assert read(tmp_path) == ended("ok")


def test_an_older_row_gets_the_keys_that_it_lacks(tmp_path: Path):
    (tmp_path / "result.json").write_text('{"schema": 1, "status": "ok", "loss": {"last": 2.0}}')
    assert read(tmp_path) == ended("ok", loss={"last": 2.0})


def test_a_failed_write_keeps_the_old_row_and_leaves_no_litter(tmp_path: Path):
    write(tmp_path, ended("ok"))
    with pytest.raises(TypeError):
        write(tmp_path, ended("error", reason=object()))
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "folder", "text")
    assert read(tmp_path) == ended("ok")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "result.json"]


@pytest.mark.parametrize("status", MATRIX)
def test_final_and_exit_code(status: str):
    final, single, sweep = MATRIX[status]
    assert is_final(ended(status)) is final
    assert exit_code([ended(status)], sweep=False) == single
    assert exit_code([ended("ok"), ended(status), ended("ok")], sweep=True) == sweep


def test_the_matrix_knows_every_status():
    assert set(MATRIX) == set(Status)
    assert to_json({"status": Status.OOM}) == '{"status": "oom"}'


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["oom", "oom"], 0),
        (["incompatible", "incompatible"], 3),
        (["incompatible", "oom"], 0),
        (["incompatible", "error"], 1),
        (["error", "interrupted", "incompatible"], 75),
        ([], 0),
    ],
)
def test_exit_code_of_a_sweep(statuses: list[str], code: int):
    assert exit_code(map(ended, statuses), sweep=True) == code


def test_a_row_without_a_status_is_not_final():
    assert not is_final(empty_row())


def test_out_of_memory_beside_another_process_is_measured_again():
    crowded = held_by_another_process(3 * GIB)
    assert "3.000 GiB" in crowded
    assert not is_final(ended("oom", disturbed=crowded))
    assert is_final(ended("oom", disturbed="the load was 9"))
    assert is_final(ended("ok", disturbed=crowded))


def test_sizes_keep_their_digits():
    assert size_text(0.1234 * GIB) == "0.123 GiB"
    assert size_text(0.001 * GIB) == "1.02 MiB"


@pytest.mark.parametrize("module", ["row", "table", "loggers", "terminal", "advice"])
def test_importing_the_results_imports_nothing_heavy(module: str):
    heavy = "{'torch', 'numpy', 'rich', 'hydra', 'wandb', 'omegaconf'}"
    code = f"import sys, lowvram.results.{module}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
