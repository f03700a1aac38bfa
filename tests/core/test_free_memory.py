"""How much memory the host could still give: the kernel's figure, or what the tightest limit leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowvram.core.free_memory import free_host_bytes

KIB, GIB = 2**10, 2**30


def host(root: Path, cgroup: str = "0::/job/step\n") -> Path:
    """A host with 8 GiB to give, and cgroups without limits."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:  99 kB\nMemAvailable:  {8 * GIB // KIB} kB\nMemFree:  1 kB\n")
    (root / "proc/self/cgroup").write_text(f"4:memory:/elsewhere\n{cgroup}")
    for name in ("", "job", "job/step", "other"):
        limit(root, name, "max", used=GIB)
    return root


def limit(root: Path, name: str, most: int | str, used: int, of_files: tuple[int, int] = (0, 0)) -> None:
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 5\ninactive_file {}\nactive_file {}\n".format(*of_files))


def test_without_limits_it_is_the_kernels_figure(tmp_path: Path) -> None:
    assert free_host_bytes(host(tmp_path)) == 8 * GIB


@pytest.mark.parametrize("name", ["", "job", "job/step"])
def test_a_limit_leaves_less_and_cached_files_do_not_count(tmp_path: Path, name: str) -> None:
    limit(host(tmp_path), name, 4 * GIB, used=3 * GIB, of_files=(GIB // 4, GIB // 4))
    assert free_host_bytes(tmp_path) == 1.5 * GIB


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    limit(host(tmp_path), "job", 6 * GIB, used=GIB)
    limit(tmp_path, "job/step", 7 * GIB, used=GIB)
    assert free_host_bytes(tmp_path) == 5 * GIB


def test_nothing_is_left_above_a_limit(tmp_path: Path) -> None:
    limit(host(tmp_path), "job", GIB, used=2 * GIB)
    assert free_host_bytes(tmp_path) == 0


def test_limits_of_others_and_wide_ones_change_nothing(tmp_path: Path) -> None:
    limit(host(tmp_path), "other", GIB, used=0)
    limit(tmp_path, "job", 64 * GIB, used=0)
    assert free_host_bytes(tmp_path) == 8 * GIB


@pytest.mark.parametrize("cgroup", ["", "0::/gone\n", "0::/../beside\n"])
def test_hosts_without_cgroups_of_version_2(tmp_path: Path, cgroup: str) -> None:
    limit(tmp_path, "../beside", GIB, used=0)
    assert free_host_bytes(host(tmp_path, cgroup)) == 8 * GIB


@pytest.mark.parametrize("name", ["memory.max", "memory.current", "memory.stat"])
@pytest.mark.parametrize("text", [None, "", "anon 5\n"])
def test_limits_that_can_not_be_read_do_not_count(tmp_path: Path, name: str, text: str | None) -> None:
    limit(host(tmp_path), "job", GIB, used=0)
    file = tmp_path / "sys/fs/cgroup/job" / name
    file.unlink() if text is None else file.write_text(text)
    assert free_host_bytes(tmp_path) == 8 * GIB


def test_a_kernel_without_cgroups(tmp_path: Path) -> None:
    (host(tmp_path) / "proc/self/cgroup").unlink()
    assert free_host_bytes(tmp_path) == 8 * GIB


def test_this_host() -> None:
    assert 0 < free_host_bytes() < 2**50
