"""Caches: what is written, what is read back, and which are refused."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lowvram.compress.distillation import cache as module
from lowvram.compress.distillation.cache import ABOUT, ARRAYS, INDEX, Cache, shard_file
from lowvram.compress.distillation.samples import taught
from lowvram.compress.distillation.task import CacheFormat, Distilled
from lowvram.compress.distillation.teach import Teach
from lowvram.config.errors import BadInput
from lowvram.core.assemble import assemble
from lowvram.core.rig import IGNORE, Part
from lowvram.core.step import step
from lowvram.data.bucketed import Bucketed
from lowvram.data.loader import Inline
from lowvram.data.packed import Packed
from lowvram.data.source import Data, Samples
from lowvram.data.spec import DataSpec
from lowvram.results.files import manifest
from tests.compress.distillation.teachers import distilled
from tests.laboratory import CPU, IMAGES, TOKENS, TRANSFORMER, documents, knobs_of, peak_as_measured, peak_as_planned
from tests.loops.sessions import Drawn, Told, session_in

NUM_SAMPLES = 12  # an epoch; the session reads two


def written(
    folder: Path, problem: Distilled, samples: Samples | None = None, told: Told | None = None, steps: int = 6
) -> Path:
    """The folder of a run with mode=teach."""
    session = session_in(folder, told=told or Told(), steps=steps)
    samples = samples or Drawn(problem.spec, NUM_SAMPLES)
    data = Data(problem.spec, samples, samples, "")
    groups = {**session.settings.groups, "task": problem.config, "loader": Inline()}
    session = replace(
        session,
        problem=problem,
        rig=assemble(problem, knobs_of(), CPU),
        data=data,
        settings=replace(session.settings, groups=groups),
    )
    Teach().run(session)
    return folder


def with_cache(problem: Distilled, folder: Path) -> Distilled:
    return Distilled(problem.plain, replace(problem.config, cache=str(folder)), None, Cache(str(folder)))


def batch_of(samples: Samples, cache: Path, seed: int = 0) -> Part:
    data = taught(Data(TOKENS, samples, samples, ""), Cache(str(cache)), seed, None)
    keys = [(index, 0) for index in (3, 1, 10)]
    return Inline().collate(data.train, keys)


@pytest.mark.parametrize(("model", "spec"), [("transformer", TOKENS), ("resnet", IMAGES)])
@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_a_cache_of_all_classes_teaches_as_the_teacher(model: str, spec: DataSpec, logits: str, tmp_path: Path) -> None:
    problem = distilled(model, top=1000, values=CacheFormat.fp32)
    samples = Drawn(spec, NUM_SAMPLES)
    cached = with_cache(problem, written(tmp_path, problem, samples))
    data = taught(Data(spec, samples, samples, ""), Cache(str(tmp_path)), 0, None)
    keys = [(index, 0) for index in (3, 1, 10, 4)]
    found, live = (assemble(task, knobs_of(logits=logits), CPU) for task in (cached, problem))
    assert found.teacher is None
    for _ in range(3):
        loss, _ = step(found, Inline().collate(data.train, keys))
        wanted, _ = step(live, Inline().collate(samples, keys))
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)


def test_16_bits_are_near(tmp_path: Path) -> None:
    problem = distilled("transformer", top=1000)
    samples = Drawn(TOKENS, NUM_SAMPLES)
    cached = with_cache(problem, written(tmp_path, problem, samples))
    loss, _ = step(assemble(cached, knobs_of(), CPU), batch_of(samples, tmp_path))
    wanted, _ = step(assemble(problem, knobs_of(), CPU), replace(batch_of(samples, tmp_path), soft=None))
    torch.testing.assert_close(loss, wanted, rtol=1e-3, atol=1e-3)


def test_targets_that_do_not_count_take_no_room_and_samples_that_stay_the_same_only_once(tmp_path: Path) -> None:
    problem = distilled("transformer", top=3)
    samples = Drawn(TOKENS, NUM_SAMPLES)
    about = Cache(str(written(tmp_path, problem, samples))).about  # two epochs
    assert about.num_samples == 2 * NUM_SAMPLES
    assert about.num_targets == (samples.batch.targets != IGNORE).sum()
    num_bytes = sum(np.load(file).nbytes for file in (tmp_path / "cache").glob("*-*.npy"))
    assert num_bytes == about.num_targets * about.bytes_per_target == about.num_targets * (3 * (2 + 4) + 4)


def test_shards_hold_what_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, samples = distilled("transformer", top=3), Drawn(TOKENS, NUM_SAMPLES)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    one = batch_of(samples, written(tmp_path / "one", problem, samples))
    monkeypatch.setattr(module, "SHARD_BYTES", 200)
    many = batch_of(samples, written(tmp_path / "many", problem, samples))
    assert len(list((tmp_path / "many" / "cache").glob("values-*.npy"))) > 2
    assert all(torch.equal(one.soft[name], many.soft[name]) for name in one.soft)


def test_texts_of_any_length_are_taught_in_trimmed_batches(tmp_path: Path) -> None:
    texts, problem = documents([3, 9, 5, 2, 7, 4], TOKENS), distilled("transformer", top=3)
    written(tmp_path, problem, texts, steps=2)
    data = taught(Data(TOKENS, texts, texts, ""), Cache(str(tmp_path)), 0, None)
    part = Bucketed(multiple=1).collate(data.train, [(0, 0), (3, 0)])
    assert part.soft["values"].shape == (2, 2, 3)
    loss, _ = step(assemble(with_cache(problem, tmp_path), knobs_of(), CPU), part)
    assert torch.isfinite(loss)


def test_after_the_last_sample_of_a_cache_the_first_follows(tmp_path: Path) -> None:
    samples, problem = Drawn(TOKENS, NUM_SAMPLES), distilled("transformer", top=3)
    data = taught(Data(TOKENS, samples, samples, ""), Cache(str(written(tmp_path, problem, samples, steps=2))), 0, 8)
    keys, plain = data.train.keys(0, 5), samples.keys(0, 0)
    first = [next(plain) for _ in range(8)]
    assert [next(keys) for _ in range(8)] == [*first[5:], *first[:5]]


def test_the_key_says_what_was_cached_in_any_order(tmp_path: Path) -> None:
    problem, keys = distilled("transformer", top=3), dict[str, str]()
    for name, changed in {"one": {}, "same": {}, "top": {"top": 2}, "temperature": {"temperature": 1.0}}.items():
        (tmp_path / name).mkdir()
        task = distilled("transformer", **{"top": 3, **changed})
        keys[name] = Cache(str(written(tmp_path / name, task))).about.key
    lines = Cache(str(tmp_path / "one")).lines
    assert Cache(str(tmp_path / "one")).about.key_for(lines[::-1]) == keys["one"] == keys["same"]
    assert len({*keys.values()}) == 3
    assert with_cache(problem, tmp_path / "one").description != with_cache(problem, tmp_path / "top").description


@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_planned_as_measured(logits: str, tmp_path: Path) -> None:
    problem = distilled("transformer", top=4)
    cached = with_cache(problem, written(tmp_path, problem))
    batch = batch_of(Drawn(TOKENS, NUM_SAMPLES), tmp_path)
    measured = peak_as_measured(cached, knobs_of(logits=logits), batch)
    planned = peak_as_planned(cached, knobs_of(logits=logits), batch.num_samples)
    assert (planned.peak_bytes, planned.by_kind_max) == (measured.peak_bytes, measured.by_kind_max)


def other_seed(folder: Path) -> tuple[Samples, int]:
    return Drawn(TOKENS, NUM_SAMPLES), 1


def other_contents(folder: Path) -> tuple[Samples, int]:
    samples = Drawn(TOKENS, NUM_SAMPLES)
    samples.batch.inputs[3, 0] += 1
    return samples, 0


def other_number(folder: Path) -> tuple[Samples, int]:
    return Drawn(TOKENS, NUM_SAMPLES + 1), 0


def without_a_shard(folder: Path) -> tuple[Samples, int]:
    (folder / "cache" / "ids-00000.npy").unlink()
    return Drawn(TOKENS, NUM_SAMPLES), 0


def with_a_changed_shard(folder: Path) -> tuple[Samples, int]:
    shard = folder / "cache" / "values-00000.npy"
    np.save(shard, np.full_like(np.load(shard), -1))
    return Drawn(TOKENS, NUM_SAMPLES), 0


def with_other_lines(folder: Path) -> tuple[Samples, int]:
    lines = np.load(folder / "cache" / INDEX)
    lines["digest"][0] += 1
    np.save(folder / "cache" / INDEX, lines)
    return Drawn(TOKENS, NUM_SAMPLES), 0


def with_other_entries(folder: Path) -> tuple[Samples, int]:
    about = json.loads((folder / "cache" / ABOUT).read_text())
    (folder / "cache" / ABOUT).write_text(json.dumps({**about, "unknown": 1}))
    return Drawn(TOKENS, NUM_SAMPLES), 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (other_seed, "its seed is 0, here 1"),
        (other_contents, "sample 3 of epoch 0 isn't the one that the teacher saw"),
        (other_number, "its number of samples is 12, here 13"),
        (without_a_shard, "ids-00000.npy is missing or damaged"),
        (with_a_changed_shard, "values-00000.npy is missing or damaged"),
        (with_other_lines, "doesn't match cache.json"),
        (with_other_entries, "cache.json or index.npy in it is damaged"),
    ],
)
def test_a_cache_of_something_else_is_refused(change: object, what: str, tmp_path: Path) -> None:
    written(tmp_path, distilled("transformer", top=3))
    samples, seed = change(tmp_path)  # pyright: ignore[reportCallIssue]
    with pytest.raises(BadInput, match=rf"task\.cache=.*{what}"):
        batch_of(samples, tmp_path, seed)


def test_any_flipped_bit_of_the_index_is_a_refusal(tmp_path: Path) -> None:
    """numpy parses the header of the file."""
    folder = written(tmp_path, distilled("transformer", top=3))
    index = folder / "cache" / INDEX if (folder / "cache").is_dir() else folder / INDEX
    whole = index.read_bytes()
    for place in range(8 * min(len(whole), 136)):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        index.write_bytes(content)
        with pytest.raises(BadInput, match=r"^task\.cache="):
            Cache(str(folder))
    index.write_bytes(whole)
    Cache(str(folder))


def test_a_pipe_is_no_file_of_a_cache(tmp_path: Path) -> None:
    """Who opens one waits for ever."""
    written(tmp_path, distilled("transformer", top=3))
    (tmp_path / "cache" / manifest.NAME).unlink()
    keys = [(index, 0) for index in (3, 1, 10)]
    part = Inline().collate(Drawn(TOKENS, NUM_SAMPLES), keys)
    for path in (shard_file(tmp_path / "cache", ARRAYS[0], 0), tmp_path / "cache" / INDEX):
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(BadInput, match=r"^task\.cache="):
            Cache(str(tmp_path)).soft(keys, part)


def test_any_flipped_bit_of_a_shards_header_is_a_refusal_or_changes_nothing(tmp_path: Path) -> None:
    """Also where no list of hashes is beside it, or after the list was compared."""
    written(tmp_path, distilled("transformer", top=3))
    (tmp_path / "cache" / manifest.NAME).unlink()
    keys = [(index, 0) for index in (3, 1, 10)]
    part = Inline().collate(Drawn(TOKENS, NUM_SAMPLES), keys)
    as_written = Cache(str(tmp_path)).soft(keys, part)
    refused = 0
    for name in ARRAYS:
        shard = shard_file(tmp_path / "cache", name, 0)
        whole = shard.read_bytes()
        for place in range(0, 8 * 80, 3):
            content = bytearray(whole)
            content[place // 8] ^= 1 << place % 8
            shard.write_bytes(content)
            try:
                soft = Cache(str(tmp_path)).soft(keys, part)
            except BadInput as error:
                refused += bool(re.match(rf"task\.cache=.*{shard.name} is missing or damaged", str(error)))
            else:
                assert all(torch.equal(soft[each], as_written[each]) for each in ARRAYS), (name, place)
        shard.write_bytes(whole)
    assert refused > 300


def test_a_run_that_reads_more_than_was_taught_is_refused(tmp_path: Path) -> None:
    samples = Drawn(TOKENS, NUM_SAMPLES)
    cache = Cache(str(written(tmp_path, distilled("transformer", top=3), samples, steps=2)))
    with pytest.raises(BadInput, match="a cache of at least 9 samples, which this run reads: it has 8"):
        taught(Data(TOKENS, samples, samples, ""), cache, 0, 9)


def test_rows_that_hold_several_samples_are_refused(tmp_path: Path) -> None:
    texts = documents([3, 9, 5], TOKENS)
    data = Packed().fit(Data(TOKENS, texts, texts, ""), TRANSFORMER)
    written(tmp_path, distilled("transformer", top=3))
    with pytest.raises(BadInput, match=r"loader='packed'.*inline.*with task\.cache"):
        taught(data, Cache(str(tmp_path)), 0, None)


def test_what_is_in_the_way_is_found_before_the_teacher_is_asked(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / INDEX).write_text("the user's")
    told = Told()
    with pytest.raises(
        FileExistsError, match=rf"in the way .*: .* another folder,.* hydra\.run\.dir={tmp_path}_again$"
    ):
        written(tmp_path, distilled("transformer", top=3), told=told)
    assert not told.events
    assert (tmp_path / "cache" / INDEX).read_text() == "the user's"
