"""The emulated device keeps what its README.md promises."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif("EMULATED_VALUES" not in os.environ, reason="not the emulated device"),
]
ROOT = Path(__file__).resolve().parents[2]
CARDS = {
    "t4": (7, 5, "Tesla T4"),
    "rtx3060": (8, 6, "NVIDIA GeForce RTX 3060"),
    "h100": (9, 0, "NVIDIA H100 80GB HBM3"),
}
MIB = 2**20


def printed(program: str, **environment: str) -> str:
    """What a Python program prints in a process with its own emulated device."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("EMULATED_")}
    variables = {**known, "EMULATED_VALUES": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", program], env=variables, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize("card", CARDS)
def test_it_is_the_card_that_was_asked_for(card: str) -> None:
    program = "import torch; print(*torch.cuda.get_device_capability(), torch.cuda.get_device_name(), sep=',')"
    assert printed(program, EMULATED_CARD=card).strip() == ",".join(map(str, CARDS[card]))


FULL = """
import torch
kept = []
try:
    while True:
        kept.append(torch.empty(100 * 2**20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError as error:
    print(len(kept), torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0] < 100 * 2**20)
"""


def test_a_full_card_is_out_of_memory() -> None:
    """2,000 MiB less a context of 512: 14 tensors of 100 MiB."""
    text = printed(FULL, EMULATED_BYTES=str(2000 * MIB), EMULATED_CONTEXT_MIB="512")
    assert text.split() == ["14", str(14 * 100 * MIB), "True"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_are_the_cpus(dtype: torch.dtype) -> None:
    query, key, value = (torch.randn(2, 4, 16, 32, dtype=dtype) for _ in range(3))
    results = []
    for device in ("cpu", "cuda"):
        inputs = [each.detach().clone().to(device).requires_grad_() for each in (query, key, value)]
        attended = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=True)
        attended.square().sum().backward()
        results.append([each.grad.cpu().float() for each in inputs if each.grad is not None])
    for on_cpu, on_card in zip(*results, strict=True):
        torch.testing.assert_close(on_card, on_cpu, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bits_in_and_fp32_out_is_had_on_the_device_alone(dtype: torch.dtype) -> None:
    logits, weight = torch.randn(4, 7, dtype=dtype), torch.randn(7, 5, dtype=dtype)
    written = torch.empty(4, 7, device="cuda")
    torch.log_softmax(logits.cuda(), -1, dtype=torch.float32, out=written)
    torch.testing.assert_close(written.cpu(), logits.float().log_softmax(-1))
    product = torch.mm(logits.cuda(), weight.cuda(), out_dtype=torch.float32)
    torch.testing.assert_close(product.cpu(), logits.float() @ weight.float())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 3)), lambda: torch.randn(6, 10)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        lambda: torch.randn(6, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_the_cpu(name: str) -> None:
    make_model, make_inputs = MODELS[name]
    losses = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, inputs, targets = make_model(), make_inputs().to(device), torch.tensor([0, 1, 2, 0, 1, 2], device=device)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loss = torch.zeros(())
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        losses[device] = loss.item()
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=1e-5)


def test_a_fresh_generator_draws_what_the_cpus_does() -> None:
    """So weights that are drawn on the device are the CPU's."""
    on_cpu, on_card = (torch.Generator(device).manual_seed(5) for device in ("cpu", "cuda"))
    first, second = (torch.randn(20, generator=on_card, device="cuda") for _ in range(2))
    assert torch.equal(first.cpu(), torch.randn(20, generator=on_cpu))
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.randn(20, generator=on_card.manual_seed(5), device="cuda"))


WITHOUT_WAITING = """
import torch
side = torch.cuda.Stream()
source = torch.arange(1000.0).pin_memory()
with torch.cuda.stream(side):
    here = source.to("cuda", non_blocking=True)
if {waits}:
    torch.cuda.current_stream().wait_stream(side)
print((here * 2).sum().item())
"""


def test_a_wait_that_is_missing_shows_in_values() -> None:
    late = {"EMULATED_LATE": "1"}
    assert float(printed(WITHOUT_WAITING.format(waits=True), **late)) == 999000.0
    assert float(printed(WITHOUT_WAITING.format(waits=False), **late)) != 999000.0


USED_AGAIN = """
import torch
side, source = torch.cuda.Stream(), torch.full((1000,), 7.0, device="cuda")
torch.cuda.synchronize()
host = torch.empty(1000, pin_memory=True)
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    host.copy_(source, non_blocking=True)
if {is_recorded}:
    source.record_stream(side)
del source
other = torch.zeros(1000, device="cuda")
torch.cuda.synchronize()
print(host.sum().item())
"""


def test_memory_that_is_used_again_too_early_shows_in_values() -> None:
    late = {"EMULATED_LATE": "1"}
    assert float(printed(USED_AGAIN.format(is_recorded=True), **late)) == 7000.0
    assert float(printed(USED_AGAIN.format(is_recorded=False), **late)) != 7000.0


RANK = """
import os, sys, torch
import torch.distributed as dist
rank = int(sys.argv[1])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2], RANK=str(rank), WORLD_SIZE="3")
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
"""


def printed_by_ranks(code: str) -> list[str]:
    """What each of three ranks prints, on devices of their own."""
    port = str(20000 + os.getpid() % 20000)
    variables = {**os.environ, "EMULATED_VALUES": "1", "EMULATED_DEVICES": "3"}
    command = [sys.executable, "-c", RANK + code]
    started = [
        subprocess.Popen([*command, str(rank), port], env=variables, stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    return [process.communicate(timeout=120)[0].strip() for process in started]


COLLECTIVES = """
big = torch.full((2_000_000,), float(rank + 1), device="cuda")
dist.all_reduce(big)
half = torch.full((5,), rank + 1.0, device="cuda", dtype=torch.bfloat16)
dist.all_reduce(half, dist.ReduceOp.AVG)
gathered = torch.empty(6, dtype=torch.long, device="cuda")
dist.all_gather_into_tensor(gathered, torch.tensor([rank, 10 * rank], device="cuda"))
scattered = torch.empty(2, device="cuda")
dist.reduce_scatter_tensor(scattered, torch.arange(6.0, device="cuda") * (rank + 1))
told = torch.tensor([float(rank)], device="cuda")
dist.broadcast(told, 2)
print(big.unique().tolist(), half.unique().tolist(), gathered.tolist(), scattered.tolist(), told.item())
dist.destroy_process_group()
"""


def test_collectives_move_bytes_between_processes() -> None:
    for rank, text in enumerate(printed_by_ranks(COLLECTIVES)):
        scattered = [6.0 * (2 * rank), 6.0 * (2 * rank + 1)]
        assert text == f"[6.0] [2.0] [0, 0, 1, 10, 2, 20] {scattered} 2.0"


# Each rank asks for what it is to get before it sends anything, and computes while that is on its way.
MESSAGES = """
after, before = (rank + 1) % 3, (rank - 1) % 3
got = torch.zeros(2_000_000, device="cuda")
coming = dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, before)]) if rank else []
made = torch.full((2_000_000,), float(rank), device="cuda") * 2
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, made, after)]):
    work.wait()
for work in coming or dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, before)]):
    work.wait()
swapped = torch.zeros(3, device="cuda")
dist.all_to_all_single(swapped, torch.arange(3.0, device="cuda") + 10 * rank)
uneven = torch.zeros(rank * 3, device="cuda")
dist.all_to_all_single(uneven, torch.full((3,), rank + 1.0, device="cuda"), [rank] * 3, [0, 1, 2])
print((got + 1).unique().tolist(), swapped.tolist(), uneven.tolist())
"""


def test_messages_arrive_behind_the_computation() -> None:
    for rank, text in enumerate(printed_by_ranks(MESSAGES)):
        uneven = [other + 1.0 for other in range(3) for _ in range(rank)]
        assert text == f"[{2.0 * ((rank - 1) % 3) + 1}] {[rank + 10.0 * other for other in range(3)]} {uneven}"


# The first would send once it has got something, and so would the second, in whose stream that comes first.
NEVER = """
other = torch.zeros(4, device="cuda")
work = dist.batch_isend_irecv([dist.P2POp(dist.irecv, other, (rank + 1) % 2)]) if rank < 2 else []
work += dist.batch_isend_irecv([dist.P2POp(dist.isend, other + 1, (rank + 1) % 2)]) if rank < 2 else []
time.sleep(2)
print([each.is_completed() for each in work])
sys.stdout.flush()
os._exit(0)
"""


def test_what_would_wait_for_ever_on_a_card_does_so_here() -> None:
    """Messages of a stream are sent and taken in their order."""
    assert printed_by_ranks("import time" + NEVER) == ["[False, False]", "[False, False]", "[]"]


LEFT_OUT = """
import torch
old = torch.full((8,), float("nan"), device="cuda")
del old  # its memory is used again
print(torch.empty(2**20, device="cuda").sum().item(), torch.ones(8, device="cuda").sum().item())
"""


def test_what_comes_of_too_large_an_operator_is_finite() -> None:
    """So that a large model's loss doesn't end its run."""
    assert printed(LEFT_OUT, EMULATED_VALUES_MAX="65536").split() == ["0.0", "8.0"]
