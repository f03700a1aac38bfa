"""docs/techniques.md says what its rows say, and its maker says what rows that were made up say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lowvram.config.defaults import CONF
from lowvram.config.errors import Refused
from lowvram.config.registry import neutral_options, node_of
from lowvram.results import row as rows
from lowvram.results.row import MIB, Row, empty_row, merge
from scripts.pages.technique_claims import CLAIMS, NOT_MEASURED
from scripts.pages.technique_page import WHEN, page
from scripts.pages.technique_rows import Sweep, keep, read, sweeps
from scripts.pages.technique_table import main

SIZES = {"parameters": 10, "gradients": 10, "optimizer": 20, "activations": 60, "host": 0}


def test_the_page_is_what_its_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def point(words: str, preset: str = "one_at_a_time", speed: float = 100.0, **more: Any) -> Row:
    """A row, as a sweep's point leaves it; `more` are MiB of kinds."""
    chosen = dict(word.split("=") for word in words.split() if "." not in word)
    kinds = {kind: size * MIB for kind, size in {**SIZES, **more}.items()}
    return merge(
        empty_row(),
        {
            "name": words or "baseline",
            "status": "ok",
            "choices": {**neutral_options(), "model": "transformer", **chosen},
            "config": {"paths": {"outputs": "/home/somebody"}, "seed": 0, "train": {"batch_size": 32, "steps": 100}},
            "memory": {"peak_bytes": sum(kinds.values()), "by_kind_max": kinds},
            "throughput": {"samples_per_s": speed},
            "model": {"parameters": 1_250_000, "blocks": "4 Block"},
            "time": {"step_ms_p50": 10.0, "step_ms_p05": 9.0, "step_ms_p95": 12.0},
            "fidelity": {"gradient_error": 0.0, "loss_gap": 0.0, "losses": [1.0], "band": [[1.0]]},
            "provenance": {
                "device_name": "A Processor",
                "torch": "2.13.0",
                "threads": 1,
                "command": f"python train.py sweep={preset} logger=none hydra.sweep.dir=/home/somebody/x {words}",
            },
        },
    )


def of(preset: str, *points: Row) -> dict[str, Sweep]:
    return {preset: Sweep(f"python train.py sweep={preset} logger=none hydra.sweep.dir=/home", points)}


def page_of(found: dict[str, Sweep]) -> str:
    return page({"cpu": {"transformer": found}})


def line(text: str, start: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(f"| {start}"))


ALONE = (
    point(""),
    point("ckpt=every1", activations=30, speed=80.0),
    point("optimizer=sgd", optimizer=10),
    point("optimizer=sgd optimizer.momentum=0.0", optimizer=0),
)


def test_each_point_is_reported_by_what_it_changes_of_the_baseline() -> None:
    text = page_of(of("one_at_a_time", *ALONE))
    assert line(text, "baseline") == ("| baseline | 100.0 | 10.0 | 10.0 | 20.0 | 60.0 | 0.0 | 1 | 10 (9–12) | 0 | 0 |")
    assert line(text, "`ckpt=every1`") == (
        "| `ckpt=every1` | 70.0 (−30 %) | · | · | · | −30.0 | · | 0.80 | 10 (9–12) | 0 | 0 |"
    )
    assert "A Processor, torch 2.13.0, 1 thread a process; 4 Block, 1.25 million parameters; 4 points." in text


def test_claims_are_computed() -> None:
    text = page_of(of("one_at_a_time", *ALONE))
    assert "| `ckpt=every1`: −50 % |" in line(text, "Checkpointing")
    assert line(text, "SGD for Adam: about").endswith(
        "`optimizer=sgd`: −25 %; `optimizer=sgd optimizer.momentum=0.0`: −50 % |"
    )


def test_what_all_do_together_is_reported_beside_plain_accumulation() -> None:
    together = "accum=x32 ckpt=every1"
    points = point("", "waterfall"), point("accum=x32", "waterfall", activations=10)
    last = point(together, "waterfall", activations=0, parameters=0, gradients=0, speed=50.0)
    text = page_of(of("waterfall", *points, last))
    wanted = "5.0 times less, 2.5 times beyond plain accumulation, at 0.50 of the speed, gradient error 0.0e+00"
    assert wanted in line(text, "All together")
    disturbed = merge(last, {"disturbed": "others"})
    wanted = "5.0 times less, 2.5 times beyond plain accumulation, gradient error 0.0e+00"
    assert wanted in line(page_of(of("waterfall", *points, disturbed)), "All together")


def test_what_ranks_hold_is_over_what_one_process_holds() -> None:
    alone, shared = point("", "sharding"), point("sharding=fsdp sharding.ranks=2", "sharding", optimizer=0)
    whole = point("sharding=ddp sharding.ranks=2", "sharding")
    assert "| 2.0 times less on 2 ranks |" in line(page_of(of("sharding", alone, whole, shared)), "FSDP")


def test_of_each_way_to_share_out_a_model_its_own_rows_count() -> None:
    rows = [
        point("", "sharding"),
        point("sharding=fsdp sharding.ranks=4 sharding.replicate=2", "sharding", optimizer=5),
        point("sharding=tensor sharding.ranks=2", "sharding", optimizer=0),
        point("sharding=tensor sharding.ranks=4 sharding.tensor=2", "sharding", optimizer=0),
        point("sharding=pipeline sharding.ranks=4 accum=x4", "sharding", optimizer=0, gradients=0),
        merge(point("sharding=context sharding.ranks=2", "sharding"), {"status": "incompatible", "reason": "why"}),
    ]
    text = page_of(of("sharding", *rows))
    assert "| not measured here |" in line(text, "FSDP")
    assert "| 2.0 times less on 2 ranks |" in line(text, "Tensor parallelism")
    assert "| 4.0 times less on 4 ranks |" in line(text, "Pipeline parallelism")
    assert "| refused on 2 ranks |" in line(text, "Context parallelism")
    assert "| [measured there](knobs.md#measured) |" in line(page_of(of("sharding", *rows[:-1])), "Context parallelism")
    rows[-1] = point("sharding=context sharding.ranks=2", "sharding", activations=20)
    assert "| 3.0 times less on 2 ranks |" in line(page_of(of("sharding", *rows)), "Context parallelism")


def batch(size: int, seed: int, loss: float, peak_mib: int) -> Row:
    about = {"train": {"batch_size": size, "steps": 3200 // size}}
    row = point(f"seed={seed} train.batch_size={size}", "batch_size")
    return merge(row, {"config": about, "loss": {"eval": loss}, "memory": {"peak_bytes": peak_mib * MIB}})


def test_batches_are_compared_over_seeds() -> None:
    text = page_of(
        of("batch_size", *(batch(size, seed, size / 10 + seed, size) for size in (8, 16) for seed in (0, 1)))
    )
    assert line(text, "8 |") == "| 8 | 400 | 8.0 | 1.300 (0.800–1.800) | 2 |"
    assert "batch 8 to 16: evaluation loss 1.300 to 2.100, peak 8.0 to 16.0 MiB" in line(text, "Small batches")


def compressed(name: str, words: str, file_mib: float, loss: float, **more: Any) -> Row:
    row = point("", "compression", **more)
    about = {"name": name, "id": f"id-{name}", "export": {"file_bytes": file_mib * MIB}, "loss": {"eval": loss}}
    command = f"{row['provenance']['command']} {words}"
    return merge(row, {**about, "provenance": {"command": command}})


def test_smaller_models_are_compared_by_file_and_loss() -> None:
    exported = {"export": {"latency_ms": 3.0, "latency_fp32_ms": 2.0}, "eval": {"loss_exported": 2.125}}
    small = merge(compressed("8 bits", "", 0.5, 2.0), exported)
    pruned = merge(compressed("pruned", "", 1.0, 2.5), {"memory": {"by_kind_max": dict.fromkeys(SIZES)}})
    text = page_of(of("compression", compressed("baseline", "", 2.0, 2.0), small, pruned))
    assert line(text, "baseline") == "| baseline | 100.0 | 2.00 | 2.0000 |  |  |"
    assert line(text, "8 bits |") == "| 8 bits | 100.0 (0 %) | 0.50 (−75 %) | 2.0000 | 2.1250 | 1.50 |"
    assert line(text, "pruned |") == "| pruned | trains nothing | 1.00 (−50 %) | 2.5000 |  |  |"
    assert "| 8 bits: peak 0 %, file −75 %, loss 2.000 to 2.125 |" in line(text, "8 bits:")
    refused = merge(small, {"status": "incompatible", "reason": "why", "provenance": {"threads": None}})
    text = page_of(of("compression", compressed("baseline", "", 2.0, 2.0), refused))
    assert "| 8 bits: refused |" in line(text, "8 bits:")
    assert "None threads" not in text


def test_an_early_exit_is_reported_by_the_blocks_that_are_used() -> None:
    row = merge(compressed("early exit", "", 2.0, 2.0), {"eval": {"blocks_used": 0.84, "loss_early": 2.125}})
    text = page_of(of("compression", compressed("baseline", "", 2.0, 2.0), row))
    assert "| 84.0% of the blocks, loss 2.000 to 2.125 |" in line(text, "Early exits")


def test_a_folder_that_a_point_goes_on_from_is_kept_by_the_points_name(tmp_path: Path) -> None:
    points = (
        compressed("baseline", "", 2.0, 2.0),
        compressed("on", "model.init=/home/somebody/id-baseline/model", 2.0, 1.0),
    )
    path = keep(left(tmp_path / "sweep", points), tmp_path / "results" / "cpu")
    assert "somebody" not in path.read_text()
    assert read(path).words(read(path).rows[1]) == "model.init=point:baseline"


def test_what_has_no_row_says_so() -> None:
    text = page_of(of("one_at_a_time", point("")))
    num_elsewhere = text.count("| [measured there](")
    assert 0 < num_elsewhere < len(CLAIMS) / 2
    assert text.count(f"| {NOT_MEASURED} |") == text.count(NOT_MEASURED) == len(CLAIMS) - num_elsewhere


def test_a_point_that_failed_is_no_measurement() -> None:
    failed = merge(point("ckpt=every1"), {"status": "oom", "reason": "too large"})
    text = page_of(of("one_at_a_time", point(""), failed))
    assert "oom: too large" in line(text, "`ckpt=every1`")
    assert NOT_MEASURED in line(text, "Checkpointing")


def left(folder: Path, points: Sequence[Row]) -> Path:
    """A sweep's folder."""
    for number, row in enumerate(points):
        (folder / str(number)).mkdir(parents=True)
        rows.write(folder / str(number), merge(row, {"index": number}))
    task = ["sweep=one_at_a_time", "logger=none", "hydra.sweep.dir=/home/somebody/x"]
    (folder / "multirun.yaml").write_text(json.dumps({"hydra": {"overrides": {"task": task}}}))
    return folder


def test_rows_are_kept_without_where_they_were_made(tmp_path: Path) -> None:
    path = keep(left(tmp_path / "sweep", ALONE), tmp_path / "results" / "cpu", "taskset -c 1")
    assert path.name == "one_at_a_time_transformer.jsonl"
    assert "somebody" not in path.read_text()
    sweep = read(path)
    assert sweep.command == "taskset -c 1 python train.py sweep=one_at_a_time"
    assert [sweep.words(row) for row in sweep.rows] == [row["name"].replace("baseline", "") for row in ALONE]
    found = sweeps(tmp_path / "results")["cpu"]["transformer"]
    assert page_of(found) == page_of({"one_at_a_time": sweep})
    assert "−30.0" in page_of(found)


def test_a_changed_row_changes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, target = tmp_path / "results", tmp_path / "page.md"
    path = keep(left(tmp_path / "sweep", ALONE), results / "cpu")
    assert main(["--check"], results, target) == 1  # there is none yet
    assert main([], results, target) == 0
    assert main(["--check"], results, target) == 0
    path.write_text(path.read_text().replace(f'"peak_bytes": {70 * MIB}', f'"peak_bytes": {71 * MIB}'))
    assert main(["--check"], results, target) == 1
    assert "run scripts/python scripts/pages/technique_table.py" in capsys.readouterr().err


def test_a_folder_without_a_sweep_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="holds no sweep"):
        keep(tmp_path, tmp_path)
    models = merge(point(""), {"choices": {"model": "resnet"}}), point("")
    with pytest.raises(Refused, match="several models"):
        keep(left(tmp_path / "sweep", models), tmp_path)
    assert main(["--keep", str(tmp_path / "nothing")], tmp_path, tmp_path / "page.md") == 3


def test_every_technique_that_is_tried_says_when_to_take_it() -> None:
    points = node_of("sweep", "one_at_a_time").hydra.sweeper.points
    assert {words for words in points.values() if words} <= set(WHEN), f"see {CONF}"
