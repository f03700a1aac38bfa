"""The devices that can be planned for."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from lowvram.config.errors import BadInput
from lowvram.planning.devices import FOLDER, DeviceSpec, device_names, find_device, load_device

GIB = 2**30
CARDS = [name for name in device_names() if name not in ("cpu", "generic")]
SAME_NAME = {"rtx4060ti_16gb": "rtx4060ti"}  # whose driver's name is in the file of the other one
every = pytest.mark.parametrize("name", device_names())
card = pytest.mark.parametrize("name", CARDS)


def test_those_that_the_documentation_names_are_there() -> None:
    assert {"rtx3060", "rtx3070", "rtx4090", "t4", "a100", "h100", "h200", "generic", "cpu"} <= set(device_names())
    older = {"v100", "v100_32gb", "rtx2080ti", "rtx3080", "rtx3090", "rtx3090ti", "a10"}
    ada = {"rtx4060", "rtx4060ti", "rtx4060ti_16gb", "rtx4070", "rtx4070ti_super", "rtx4080", "l4", "l40s"}
    blackwell = {"rtx5060ti_16gb", "rtx5070", "rtx5080", "rtx5090", "b200"}
    assert older | ada | blackwell <= set(device_names())


@every
def test_a_file_says_every_field_with_a_comment(name: str) -> None:
    first, *lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    fields = [line for line in lines if not line.startswith("#")]
    assert re.fullmatch(r"# \w.+", first)
    assert all(re.fullmatch(r"\w+: .*\S +# \S.*", line) for line in fields), fields
    names = [field.name for field in dataclasses.fields(DeviceSpec)]
    assert [line.partition(":")[0] for line in fields] == names


@card
def test_a_card_has_all_figures_and_their_source(name: str) -> None:
    spec = load_device(name)
    assert "https://" in (FOLDER / f"{name}.yaml").read_text()
    assert bool(spec.names) == (name not in SAME_NAME)
    assert spec.memory_bytes is not None
    assert 7 * GIB < spec.memory_bytes < 180 * GIB
    assert spec.memory_bytes % 2**20 == 0  # as many MiB as were read off
    assert spec.bandwidth_bytes_per_s is not None
    assert spec.pcie_bytes_per_s is not None
    assert spec.bandwidth_bytes_per_s > 9 * spec.pcie_bytes_per_s  # the L4: 300 and 31.5 GB/s


@card
def test_rates_go_with_the_capability(name: str) -> None:
    spec = load_device(name)
    rates = spec.peak_flops_per_s
    fp32, fp16 = rates["fp32"], rates["fp16"]
    assert fp32 is not None
    assert fp16 is not None
    assert all(rate >= fp32 for rate in rates.values() if rate is not None)
    has = {"tf32": spec.has_tf32, "bf16": spec.has_bf16, "fp8": spec.has_fp8}
    assert {format: rates[format] is not None for format in has} == has
    assert rates["bf16"] in (None, fp16)


def test_what_a_capability_brings() -> None:
    t4, rtx3060, rtx4090 = load_device("t4"), load_device("rtx3060"), load_device("rtx4090")
    assert (t4.capability, rtx3060.capability, rtx4090.capability) == ((7, 5), (8, 6), (8, 9))
    assert [device.has_flash_attention for device in (t4, rtx3060, rtx4090)] == [False, True, True]
    assert [device.has_fp8 for device in (t4, rtx3060, rtx4090)] == [False, False, True]
    v100, rtx5090, b200 = load_device("v100"), load_device("rtx5090"), load_device("b200")
    assert (v100.capability, rtx5090.capability, b200.capability) == ((7, 0), (12, 0), (10, 0))
    assert not any((v100.has_bf16, v100.has_tf32, v100.has_fp8, v100.has_flash_attention))
    assert DeviceSpec(compute_capability="12.0").has_fp8


def test_without_a_card_nothing_is_made_up() -> None:
    generic, cpu = load_device("generic"), load_device("cpu")
    assert (generic.is_cuda, cpu.is_cuda) == (True, False)
    assert generic.capability == (8, 6)
    assert not any((cpu.has_bf16, cpu.has_tf32, cpu.has_fp8, cpu.has_flash_attention))
    for spec in (generic, cpu):
        assert spec.memory_bytes is spec.bandwidth_bytes_per_s is None
        assert set(spec.peak_flops_per_s.values()) == {None}


def test_a_card_is_found_by_what_its_driver_calls_it() -> None:
    assert find_device("NVIDIA GeForce RTX 4090") == load_device("rtx4090")
    assert find_device("NVIDIA GeForce RTX 4060 Ti") == load_device("rtx4060ti")
    assert find_device("NVIDIA B200") == load_device("b200")
    assert find_device("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert find_device("NVIDIA H100 NVL") is None
    names = [name for each in device_names() for name in load_device(each).names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("name", "named"), SAME_NAME.items())
def test_cards_of_one_driver_name_differ_in_memory_only(name: str, named: str) -> None:
    spec, other = load_device(name), load_device(named)
    assert dataclasses.replace(spec, names=other.names, memory_bytes=other.memory_bytes) == other


# The user's own


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    spec = load_device(written(tmp_path, 'compute_capability: "8.6"\nmemory_bytes: 8000000000\n'))
    assert spec == DeviceSpec(compute_capability="8.6", memory_bytes=8_000_000_000)


@pytest.mark.parametrize("name", ["rtx9999", "../model/gpt2", "", "nowhere.yaml", "RTX3060"])
def test_an_unknown_device_is_reported_the_known_ones(name: str) -> None:
    known = r"^plan\.device='.*': must be one of a10, a100, .*, t4, v100, v100_32gb, or the path of a YAML file"
    with pytest.raises(BadInput, match=known):
        load_device(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_bytes: -1", "plan.device.memory_bytes=-1: must be null"),
        ("memory_bytes: 8GiB", "plan.device.memory_bytes='8GiB': must be a whole number or null"),
        ("bandwidth_bytes_per_s: .nan", "plan.device.bandwidth_bytes_per_s=nan: must be null"),
        ("compute_capability: eight", "plan.device.compute_capability='eight': must be null or a version"),
        ("bandwidth: 1e9", "plan.device.bandwidth=1000000000.0: must be removed: plan.device knows names,"),
        ("memory_bytes: ???", "plan.device.memory_bytes='???': must be given a value"),
        ("- 1", "must be a YAML file of the keys names,"),
        ("a: [", "must be a YAML file that can be read"),
        ("_target_: os.system", "plan.device._target_='os.system': must be a class inside lowvram"),
    ],
)
def test_a_bad_file_ends_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_device(written(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
