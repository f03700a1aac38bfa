"""Limits on processes and threads, as containers and batch systems set them."""

from __future__ import annotations

from pathlib import Path

from lowvram.config.thread_limits import limits, pids_max


def test_the_limits_of_all_groups_count(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("3:pids:/job/step\n0::/slice/job\n4:cpu:/../up\n")
    counts = {"pids/job/step": "max", "pids/job": "40", "slice/job": "64", "slice": "max", "up": "1"}
    for folder, text in counts.items():
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys/fs/cgroup" / folder / "pids.max").write_text(f"{text}\n")
    assert sorted(pids_max(tmp_path)) == [40, 64]
    assert "pids.max of this container or job is 40" in limits(tmp_path)
    assert pids_max(tmp_path / "nothing") == []
