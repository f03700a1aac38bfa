"""scripts/benchmarks/bench_headline.py: which points it makes of a waterfall, and what its page says of rows."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from omegaconf import OmegaConf

from lowvram.config.defaults import CONF
from lowvram.config.identity import ROOT
from lowvram.results.row import Row, empty_row, merge
from scripts.benchmarks.bench_headline import (
    BANDS,
    WATERFALL,
    asked,
    band_lines,
    group_of,
    smallest_lines,
    waterfall_lines,
)


def test_each_point_adds_one_knob() -> None:
    points = list(asked(["scaled"]).points(16).items())
    assert points[0] == ("baseline", "")
    assert points[1] == ("+accum", "accum=x16")
    assert [name for name, _ in points] == list(WATERFALL)
    assert points[-1][0] == "+offload"
    for (_, fewer), (name, more) in pairwise(points):
        (added,) = set(more.split()) - set(fewer.split())
        assert f"+{group_of(added)}" == name


def test_knobs_come_last_or_not_at_all() -> None:
    last = asked(["last=precision"]).points(64)
    assert list(last)[-1] == "+precision"
    assert last["+accum"] == "accum=x32"
    assert "bf16" not in str(asked(["without=precision,ckpt"]).points(8))


def test_words_are_those_of_train_py() -> None:
    words = asked(["scaled", "case=transformer", "train.batch_size=4"]).words("transformer")
    assert words[0] == "-m"
    assert "train.batch_size=4" in words
    assert "+accum: 'accum=x4'" in words[-2]
    assert words[-1] == "hydra.sweep.dir=outputs/bench_headline/transformer_scaled"
    (band,) = (word for word in asked([]).words("resnet_band") if word.startswith("hydra.sweeper.points"))
    assert band.count("accum") == 1
    assert set(BANDS) == {"transformer_band", "resnet_band"}


def test_the_smallest_peaks_are_those_of_the_preset() -> None:
    words = asked(["case=transformer_smallest"]).words("transformer_smallest")
    assert words[0] == "sweep=smallest"
    assert "model=gpt2_medium" in words
    rows = [
        row(name, peak_bytes, plan={"allocated_bytes": peak_bytes, "step_ms": 12.0})
        for name, peak_bytes in (("baseline", 2**30), ("+accum", 2**28), ("device", 2**26))
    ]
    refused = row("weights on the host", 0, status="incompatible", reason="no")
    lines = [line for line in smallest_lines([*rows, refused], "smallest") if line.startswith("|")][2:]
    assert lines[0] == "| baseline | 1.000 GiB | 1.0 x | 0.2 x | 1.000 GiB | 0.00 MiB | 12 |"
    assert lines[2] == "| device | 0.062 GiB | 16.0 x | 4.0 x | 0.062 GiB | 0.00 MiB | 12 |"
    assert lines[3].startswith("| weights on the host | incompatible: no |")


def test_a_resnet_has_a_preset_of_its_own_which_names_the_norm() -> None:
    words = asked(["case=resnet_smallest"]).words("resnet_smallest")
    assert words[0] == "sweep=smallest_resnet"
    assert "model=resnet50" in words
    assert not any(word.startswith("model.norm=") for word in words)
    points = OmegaConf.load(CONF / "sweep" / "smallest_resnet.yaml").hydra.sweeper.points
    assert {words.split()[0] for words in points.values()} == {"model.norm=group", "model.norm=batch"}


def rows_of(name: str) -> list[Row]:
    return [json.loads(line) for line in (ROOT / "docs" / "results" / name).read_text().splitlines()]


def test_the_readme_has_the_peaks_of_the_cards() -> None:
    """Those of an H200 with their times, and of the emulated one that of the last point."""
    readme = (ROOT / "README.md").read_text()
    item = next(item for item in rows_of("h200/agenda.jsonl") if item["key"] == "smallest")
    points = {row["name"]: row for row in item["found"]}
    measured = [points[name] for name in ("baseline", "+accum", "device", "state on the host")]
    peaks = [row["memory"]["peak_bytes"] for row in measured]
    times = [f"{row['time']['step_ms_p50']:,.0f} | {row['plan']['step_ms']:,.0f}" for row in measured]
    assert f" {peaks[0] / 2**30:.2f} | | {times[0]} |" in readme
    assert f" {peaks[1] / 2**30:.2f} | {peaks[0] / peaks[1]:.1f} × | {times[1]} |" in readme
    for peak_bytes, time in zip(peaks[2:], times[2:], strict=True):
        assert f" {peak_bytes / 2**30:.2f} | {peaks[0] / peak_bytes:.0f} × | {time} |" in readme
    emulated = rows_of("emulated/bench_headline_transformer_smallest_full.jsonl")
    first, *_, last = (row["memory"]["peak_bytes"] for row in emulated)
    assert f" {last / 2**30:.2f} | {first / last:.0f} × | |" in readme


def test_a_case_that_nobody_knows() -> None:
    with pytest.raises(SystemExit, match="case=vision: must be some of transformer, resnet, transformer_band"):
        asked(["case=vision"])


def row(name: str, peak_bytes: int, **more: Any) -> Row:
    known = {"name": name, "status": "ok", "memory": {"peak_bytes": peak_bytes, "source": "tensor_ledger"}}
    known |= {"throughput": {"samples_per_s": 2.0}, "loss": {"last": 3.0}}
    return merge(merge(empty_row(), known), more)


def test_the_page_tells_what_is_beyond_accumulation() -> None:
    rows = [row("baseline", 2**30), row("+accum", 2**28), row("+ckpt", 2**26, disturbed="noise")]
    first, second, third = [line for line in waterfall_lines(rows) if line.startswith("|")][2:]
    assert first == "| baseline | 1.000 GiB | 1.00 x |  | 2 | 1.00 | 3.0000 |  |"
    assert second == "| +accum | 0.250 GiB | 4.00 x | 1.00 x | 2 | 1.00 | 3.0000 |  |"
    assert third == "| +ckpt* | 0.062 GiB | 16.00 x | 4.00 x | 2 | 1.00 | 3.0000 |  |"
    failed = list(waterfall_lines([*rows[:2], row("+logits", 1, status="oom", reason="full")]))
    assert "| +logits | oom: full |  |" in "".join(failed)


def test_the_page_tells_how_far_losses_are_from_the_band() -> None:
    found = {"steps": 2, "losses": [4.0, 3.0], "band": [[3, 4, 5], [2, 2.5, 3]], "loss_gap": 0.015}
    found |= {"gradient_error": 1e-3, "gradient_cosine": 0.999999, "reason": None}
    text = " ".join(band_lines([row("+all", 1, fidelity=found, choices={"accum": "x32", "model": "transformer"})]))
    assert "All knobs (`accum=x32`): in 2 steps" in text
    assert "by 1.50% at most" in text
    assert list(band_lines([row("+all", 1, fidelity={"reason": "no room"})])) == ["+all: no room"]
