"""Which device a point gets, and what a machine lacks."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch

from lowvram.config.errors import BadInput
from lowvram.core import device as device_module
from lowvram.core.device import Card, absent_facts, absent_from, choose_device
from lowvram.core.fact import Fact
from tests.laboratory import CPU, needs_gpu


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without any card, whatever it really has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "has_nvidia_card", lambda: False)
    return monkeypatch


def with_cards(machine: pytest.MonkeyPatch, *, num_usable: int) -> None:
    """An NVIDIA card is there; torch can use this many."""
    machine.setattr(device_module, "has_nvidia_card", lambda: True)
    machine.setattr(torch.cuda, "is_available", lambda: num_usable > 0)
    machine.setattr(torch.cuda, "device_count", lambda: num_usable)


def test_auto_is_the_cpu_where_there_is_no_card(machine: pytest.MonkeyPatch) -> None:
    assert choose_device("auto") == choose_device("cpu") == CPU


def test_auto_is_cuda_where_there_is_a_card(machine: pytest.MonkeyPatch) -> None:
    with_cards(machine, num_usable=2)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)  # torch's limits want an index
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == CPU


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_card_that_torch_cannot_use_is_never_a_silent_cpu_run(machine: pytest.MonkeyPatch, asked: str) -> None:
    with_cards(machine, num_usable=0)
    with pytest.raises(
        BadInput, match=rf"device='{asked}': must be usable: torch .* sees no CUDA .* or say device=cpu"
    ):
        choose_device(asked)


def test_cuda_without_a_card_is_refused(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="device='cuda': must be usable"):
        choose_device("cuda")


def test_a_card_that_is_not_there_is_refused(machine: pytest.MonkeyPatch) -> None:
    with_cards(machine, num_usable=2)
    with pytest.raises(BadInput, match="device='cuda:2': must be one of the 2 visible CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_cards_are_not_meant_to_be_used(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not device_module.has_nvidia_card()


def test_a_cpu_lacks_what_only_cards_have() -> None:
    absent = absent_facts(CPU)
    assert absent.keys() >= {Fact.CUDA, Fact.TF32, Fact.FP8, Fact.MANY_RANKS}
    assert absent[Fact.FP8] == "it is the CPU here: use precision=bf16"
    assert absent.keys().isdisjoint({Fact.CPU, Fact.BF16})


@pytest.mark.parametrize(("num_ranks", "lacks"), [(1, Fact.MANY_RANKS), (3, Fact.ONE_RANK)])
def test_ranks_are_counted(num_ranks: int, lacks: Fact) -> None:
    """And what the user can do is told."""
    absent = absent_facts(CPU, num_ranks)
    assert absent.keys() & {Fact.ONE_RANK, Fact.MANY_RANKS} == {lacks}
    assert "sharding" in absent[lacks]


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert absent_facts(CPU)[Fact.C_COMPILER].startswith("none of g++ was found: install g++")
    monkeypatch.setenv("CXX", "my-c++")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "my-c++" else None)
    assert Fact.C_COMPILER not in absent_facts(CPU)


def test_kernels_of_our_own_are_compiled_for_cards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA GeForce RTX 3090", (8, 6))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert Fact.KERNEL_COMPILER not in absent_facts(CPU)
    assert absent_facts(torch.device("cuda"))[Fact.KERNEL_COMPILER].startswith("none of gcc")


def test_triton_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA GeForce RTX 3090", (8, 6))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    for is_there in (False, True):
        monkeypatch.setattr(device_module, "find_spec", lambda name, is_there=is_there: is_there or None)
        assert (Fact.KERNEL_COMPILER not in absent_facts(torch.device("cuda"))) is is_there
    assert Fact.C_COMPILER not in absent_facts(CPU)


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """A card of this kind."""
    properties = SimpleNamespace(name=name, major=capability[0], minor=capability[1], multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_a_card_of_2018_only_emulates_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "Tesla T4", (7, 5))
    absent = absent_facts(torch.device("cuda"))
    assert absent[Fact.BF16] == "Tesla T4 only emulates it: use precision=fp16"
    assert absent[Fact.TF32] == "Tesla T4 has compute capability 7.5, it takes 8.0: use precision=fp32"
    assert absent[Fact.FP8] == "Tesla T4 has compute capability 7.5, it takes 8.9: use precision=fp16"
    assert absent.keys().isdisjoint({Fact.CUDA})
    assert Fact.CPU in absent


def test_a_newer_card_lacks_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA A100", (8, 0))
    absent = absent_facts(torch.device("cuda"))
    assert absent.keys().isdisjoint({Fact.BF16, Fact.TF32, Fact.CUDA})
    assert absent[Fact.FP8] == "NVIDIA A100 has compute capability 8.0, it takes 8.9: use precision=bf16"


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_the_newest_cards_multiply_in_fp8(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    pretend(monkeypatch, "a card", capability)
    assert Fact.FP8 not in absent_facts(torch.device("cuda"))


def test_a_card_that_is_not_here_can_be_described() -> None:
    absent = absent_from(Card("Tesla V100", (7, 0)), 2, "a V100")
    assert absent.keys() == {Fact.CPU, Fact.TF32, Fact.BF16, Fact.FP8, Fact.ONE_RANK}
    assert absent[Fact.CPU] == "it is a V100 here"
    assert absent[Fact.BF16] == "Tesla V100 only emulates it: use precision=fp16"


@pytest.mark.gpu
@needs_gpu[1]
def test_what_a_card_says_of_bf16_is_what_torch_says() -> None:
    with torch.cuda.device(device := choose_device("auto")):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    assert (Fact.BF16 not in absent_facts(device)) is has_bf16


@pytest.mark.gpu
@needs_gpu[1]
def test_this_card_can_be_asked() -> None:
    absent = absent_facts(choose_device("auto"))
    assert Fact.CUDA not in absent
    assert Fact.CPU in absent
