"""`metrics.jsonl`: each row once, whatever was damaged, torn or told twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowvram.loops.metrics_log import DAMAGED, Metrics
from lowvram.results.metric_lines import Lines, mark_of, read_lines, to_line

ROWS: list[dict[str, Any]] = [{"step": step, "loss/train": step / 3, "lr": 0.1} for step in (1, 2, 3)]
LAST = {"step": 3, "loss/eval": 0.5}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def begun(folder: Path, step: int, untold: list[dict[str, Any]] | None = None) -> tuple[Metrics, Lines]:
    metrics = Metrics(folder)
    return metrics, metrics.begin(step, untold or [])


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    metrics, _ = begun(folder, 0)
    for row in rows:
        metrics.write(row["step"], {name: value for name, value in row.items() if name != "step"})
    metrics.close()


def test_lines_are_json_with_a_checksum_in_the_end(file: Path) -> None:
    write(file.parent, ROWS)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [list(line) for line in lines] == [["step", "loss/train", "lr", "crc32"]] * 3
    assert read_lines(file) == Lines(ROWS, 0)


def test_any_damaged_byte_costs_its_line_and_is_counted(file: Path) -> None:
    first, damaged, last = (to_line(row).encode() for row in ROWS)
    for index in range(len(damaged) - 1):  # not the end of the line, which two lines share
        for bit in (0, 1, 7):
            flipped = damaged[:index] + bytes([damaged[index] ^ 1 << bit]) + damaged[index + 1 :]
            file.write_bytes(first + flipped + last)
            found = read_lines(file)
            assert found.rows == [ROWS[0], ROWS[2]], flipped
            assert found.num_damaged >= 1
    file.write_bytes(first + damaged[:-1] + b"\0" + last)
    assert read_lines(file) == Lines([ROWS[0]], 1)


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe\n", b"[" * 100_000 + b"\n", b"7\n", b'{"step": "x"}\n', b'{"crc33": "x"}\n']
)
def test_junk_is_counted(file: Path, junk: bytes) -> None:
    file.write_bytes(junk + to_line(ROWS[0]).encode())
    assert read_lines(file) == Lines(ROWS[:1], 1)


def test_lines_of_early_versions_are_read(file: Path) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]) + to_line(ROWS[2]))
    assert read_lines(file) == Lines(ROWS, 0)
    file.write_text(to_line(ROWS[0]) + json.dumps(ROWS[1]) + "\n")  # its checksum is lost
    assert read_lines(file) == Lines(ROWS[:1], 1)


def test_a_line_that_is_half_written_is_no_damage_and_never_grows_into_the_next(file: Path) -> None:
    write(file.parent, ROWS[:2])
    with file.open("a") as end:
        end.write(to_line(ROWS[2])[:20])
    assert read_lines(file) == Lines(ROWS[:2], 0)
    metrics, found = begun(file.parent, 2)
    metrics.write(3, {"loss/train": 1.0, "lr": 0.1})
    metrics.close()
    assert found.num_damaged == 0
    assert read_lines(file) == Lines([*ROWS[:2], ROWS[2]], 0)
    file.write_text("".join(map(to_line, ROWS)).rstrip("\n"))  # as an editor may leave it
    assert read_lines(file) == Lines(ROWS, 0)


def test_damaged_lines_are_left_out_and_kept_aside(file: Path) -> None:
    write(file.parent, ROWS)
    damaged = file.read_bytes().replace(b"step", b"stop", 1)
    file.write_bytes(damaged)
    metrics, found = begun(file.parent, 2)
    metrics.close()
    assert found == Lines([], 1)
    assert read_lines(file) == Lines([ROWS[1]], 0)
    assert (file.parent / DAMAGED).read_bytes() == damaged


def test_rows_that_a_snapshot_has_carried_are_there_once(file: Path) -> None:
    write(file.parent, ROWS[:2])
    metrics, found = begun(file.parent, 3, [ROWS[1], ROWS[2], LAST])
    metrics.close()
    assert found == Lines([ROWS[2], LAST], 0)
    assert read_lines(file) == Lines([*ROWS, LAST], 0)


def test_an_evaluation_that_is_made_again_is_there_once(file: Path) -> None:
    """The newer one, which is the row's."""
    write(file.parent, [*ROWS, LAST])
    metrics, _ = begun(file.parent, 3)
    for _ in range(2):
        metrics.write(3, {"loss/eval": 0.25})
    metrics.write(4, {"loss/eval": 0.125})
    metrics.close()
    assert read_lines(file).rows == [*ROWS, {"step": 3, "loss/eval": 0.25}, {"step": 4, "loss/eval": 0.125}]


def test_the_lines_of_another_run_are_put_aside(tmp_path: Path, file: Path) -> None:
    """What a snapshot knows of its own doesn't match."""
    write(tmp_path, ROWS)
    before = file.read_bytes()
    metrics = Metrics(tmp_path)
    known = [{"step": 1, "loss/train": 1 / 3}, {"step": 2, "loss/train": 0.7}]
    found = metrics.begin(2, ROWS[1:2], known)
    metrics.close()
    assert found == Lines(ROWS[1:2], 0, is_foreign=True)
    assert found.wrong == "its lines are another run's: all are left out"
    assert read_lines(file) == Lines(ROWS[1:2], 0)
    assert (tmp_path / DAMAGED).read_bytes() == before


def test_the_lines_of_the_run_itself_stay(tmp_path: Path, file: Path) -> None:
    write(tmp_path, [*ROWS, LAST])
    metrics = Metrics(tmp_path)
    known = [{"step": 1, "loss/train": 1 / 3}, {"step": 3, "loss/train": 1.0}, {"step": 9, "loss/train": 5.0}]
    assert metrics.begin(3, [], known) == Lines([], 0)
    metrics.close()
    assert read_lines(file) == Lines([*ROWS, LAST], 0)


DAMAGES: dict[str, Any] = {  # of four lines up to step 3, and one of a later step: how many are missing then
    "none": (lambda data: data, 0),
    "emptied": (lambda data: b"", 4),
    "removed": (None, 4),
    "cut": (lambda data: data[: data.index(b'{"step": 3') + 9], 2),
    "a line less": (lambda data: data[data.index(b'{"step": 2') :], 1),
    "a flipped bit": (lambda data: data.replace(b"0.1", b"0.3", 1), 1),  # the checksum fails, too
    "altered": (lambda data: data.replace(to_line(ROWS[0]).encode(), to_line({**ROWS[0], "lr": 1.0}).encode()), 1),
}


@pytest.mark.parametrize(("damage", "num_missing"), DAMAGES.values(), ids=DAMAGES)
def test_lines_that_a_snapshot_knows_are_looked_for(tmp_path: Path, file: Path, damage: Any, num_missing: int) -> None:
    later = {"step": 4, "loss/train": 1.5, "lr": 0.1}
    write(tmp_path, [*ROWS, LAST, later])
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    metrics = Metrics(tmp_path)
    found = metrics.begin(3, [], [], [mark_of(row) for row in [*ROWS, LAST]])
    metrics.close()
    assert found.num_missing == num_missing


def test_lines_that_the_snapshot_carries_are_not_missing(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    found = metrics.begin(3, [*ROWS[1:], LAST], [], [mark_of(row) for row in [*ROWS, LAST]])
    metrics.close()
    assert found.num_missing == 1


def test_a_line_that_finds_no_room_tells_the_file(file: Path) -> None:
    metrics, _ = begun(file.parent, 0)
    metrics.drop()
    metrics._file = Path("/dev/full").open("a")  # noqa: SIM115 (closed below)
    with pytest.raises(OSError, match="No space left") as told:
        metrics.write(1, {"loss/train": 1.0})
    assert told.value.filename == str(file)
    metrics.drop()
