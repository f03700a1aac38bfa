"""What `scripts/gpu_check agenda` measures of a card beside points: each function yields lines of figures.

    scripts/python scripts/benchmarks/card_probes.py context|cudnn|nccl|sum_kernels|sum_steps|flex [trial]

Prints JSON lines. Times of the device are those of CUDA's events; `host_us` is how long a call keeps the host.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lowvram.config.defaults import CONF
from lowvram.config.schema import build
from lowvram.config.settings import KNOB_GROUPS, settings
from lowvram.core.assemble import assemble
from lowvram.core.rig import Part, Rig
from lowvram.core.step import step
from lowvram.data.spec import DataSpec, Modality
from lowvram.knobs.stepping.totals import Bf16, Fp32, Int8, Total
from lowvram.loops.setup import open_data
from lowvram.models.attention import Reach
from lowvram.models.local_attention import LocalAttention, LocalKernel
from lowvram.tasks import Auto
from scripts.benchmarks.book import Line
from scripts.benchmarks.runs import Runs

CUDA, CUDA0, MIB = torch.device("cuda"), torch.device("cuda", 0), 2**20
IN_PARTS = ("accum=x8", "ckpt=every1", "precision=bf16_pure", "logits=tiled", "train.batch_size=8", "data=synthetic")
STEPPERS = {
    "after_backward": (),
    "in_backward sums int8": ("stepping=in_backward", "stepping.sums=int8"),
    "in_backward sums bf16": ("stepping=in_backward", "stepping.sums=bf16"),
}
SMALL = ("model=transformer", "model.width=32", "model.num_heads=2", "model.num_layers=2", "data.sequence_length=16")


def context(is_trial: bool) -> Iterator[Line]:
    """What is taken of the card outside of torch's allocator, after each first use of a library."""
    conv = nn.Conv2d(8, 8, 3)
    uses: dict[str, Callable[[], object]] = {
        "the context": lambda: torch.empty(1, device=CUDA),
        "a product, fp32": lambda: product(torch.float32),
        "a product, bf16": lambda: product(torch.bfloat16),
        "a convolution": lambda: conv.to(CUDA)(torch.randn(2, 8, 16, 16, device=CUDA)).sum().backward(),
        "attention": attention,
        "a fused AdamW": lambda: torch.optim.AdamW(conv.parameters(), fused=True).step(),
    }
    before = 0
    for name, use in uses.items():
        use()
        now = outside_bytes()
        yield {
            "after": name,
            "outside_mib": now / MIB,
            "more_mib": (now - before) / MIB,
            "allocated_mib": torch.cuda.memory_allocated() / MIB,
            "reserved_mib": torch.cuda.memory_reserved() / MIB,
        }
        before = now


def product(dtype: torch.dtype) -> Tensor:
    values = torch.randn(256, 256, device=CUDA, dtype=dtype)
    return values @ values


def attention() -> Tensor:
    q, k, v = heads(1, 256, 4, torch.bfloat16)
    return scaled_dot_product_attention(q, k, v)


def heads(batch: int, length: int, num_heads: int, dtype: torch.dtype) -> list[Tensor]:
    shape = (batch, num_heads, length, 64)
    return [torch.randn(shape, device=CUDA, dtype=dtype, requires_grad=True) for _ in range(3)]


def cudnn(is_trial: bool) -> Iterator[Line]:
    """What each convolution of a ResNet takes beside its results, for 8 images."""
    for (about, conv), shape in convolutions("resnet" if is_trial else "resnet50", 32 if is_trial else 224).items():
        for dtype in (torch.float32, torch.bfloat16):
            layer = conv.to(CUDA, dtype)
            inputs = torch.randn(8, *shape, device=CUDA, dtype=dtype, requires_grad=True)
            outputs, forward_bytes = peak_beyond(partial(layer, inputs))
            ones = torch.ones_like(outputs)
            _, backward_bytes = peak_beyond(partial(torch.autograd.grad, outputs, [inputs, layer.weight], ones))
            mib = {"forward_mib": forward_bytes / MIB, "backward_mib": backward_bytes / MIB}
            yield {"convolution": about, "dtype": str(dtype).removeprefix("torch."), **mib}


def convolutions(model: str, size: int) -> dict[tuple[str, nn.Conv2d], tuple[int, ...]]:
    """One of each kind: with words about it, and the shape of an image that it is given."""
    config = build(DictConfig(OmegaConf.load(CONF / "model" / f"{model}.yaml")), "model")
    net = Auto().pose(config, DataSpec(Modality.IMAGES, 1000, (3, size, size))).make_model()
    found: dict[str, tuple[nn.Conv2d, tuple[int, ...]]] = {}

    def note(conv: nn.Conv2d, args: tuple[Tensor, ...], outputs: Tensor) -> None:
        _, *shape = args[0].shape
        kernel, stride = conv.kernel_size[0], conv.stride[0]
        about = f"{'x'.join(map(str, shape))} to {conv.out_channels}, {kernel}x{kernel}, stride {stride}"
        found.setdefault(about, (conv, tuple(shape)))

    convs = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    hooks = [conv.register_forward_hook(note) for conv in convs]
    net(torch.zeros(2, 3, size, size))
    for hook in hooks:
        hook.remove()
    return {(about, conv): shape for about, (conv, shape) in found.items()}


def peak_beyond(call: Callable[[], Any]) -> tuple[Any, int]:
    """The tensors that a call returns, and the most bytes that were allocated at a time beside them."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    tensors = [results] if isinstance(results, Tensor) else list(results)
    own_bytes = sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)
    return results, torch.cuda.max_memory_allocated() - before - own_bytes


def nccl(is_trial: bool) -> Iterator[Line]:
    """NCCL with one rank: collectives keep the values, what they take beside tensors, and how long they take."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=CUDA0)
        values = torch.randn(2**12 if is_trial else 2**26, device=CUDA)
        outputs, before = torch.empty_like(values), outside_bytes()
        collectives: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(outputs.copy_(values)),
            "all_gather": lambda: dist.all_gather_into_tensor(outputs, values),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(outputs, values),
        }
        for name, call in collectives.items():
            outputs.zero_()
            device_us, host_us = times_of(call, 8)
            yield {
                "collective": f"{name}, {values.nbytes / MIB:.3g} MiB",
                "keeps_values": torch.equal(outputs, values),
                "device_us": device_us,
                "host_us": host_us,
                "outside_mib": (outside_bytes() - before) / MIB,
            }
        dist.destroy_process_group()


def outside_bytes() -> int:
    """What is taken of the card, but not by torch's allocator: this process's context, and other processes."""
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes - torch.cuda.memory_reserved()


def sum_kernels(is_trial: bool) -> Iterator[Line]:
    """The addition of a matrix of GPT-2 medium to sums, beside torch's own addition in fp32."""
    shapes = [(64, 64)] if is_trial else [(1024, 1024), (1024, 4096), (50257, 1024)]
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(shape, device=CUDA, dtype=dtype)
            totals: dict[str, Total] = {
                "fp32": Fp32(torch.zeros(values.numel(), device=CUDA)),
                "bf16": Bf16(values.numel(), CUDA),
                "int8": Int8(values.numel(), CUDA),
            }
            for name, total in totals.items():
                device_us, host_us = times_of(lambda total=total, values=values: total.add(values, 7))
                moved_bytes = values.nbytes + 2 * sum(
                    each.nbytes for each in vars(total).values() if torch.is_tensor(each)
                )
                gradient = "x".join(map(str, shape)) + " " + str(dtype).removeprefix("torch.")
                yield {
                    "gradient": gradient,
                    "sums": name,
                    "device_us": device_us,
                    "host_us": host_us,
                    "gb_per_s": moved_bytes / device_us / 1e3,
                }


def times_of(call: Callable[[], object], rounds: int = 30) -> tuple[float, float]:
    """Medians in microseconds: of the device, and of the host, which doesn't wait for the device."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    device_us, host_us = [], []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        began = time.perf_counter()
        call()
        host_us.append(1e6 * (time.perf_counter() - began))
        last.record()
        torch.cuda.synchronize()
        device_us.append(1e3 * first.elapsed_time(last))
    return statistics.median(device_us), statistics.median(host_us)


def sum_steps(is_trial: bool) -> Iterator[Line]:
    """Steps of GPT-2 medium in 8 parts of 1 x 1,024 tokens, in turns in one process."""
    model = SMALL if is_trial else ("model=gpt2_medium", "data.sequence_length=1024")
    with tempfile.TemporaryDirectory() as folder, Runs(Path(folder) / "points") as runs:
        rigs = {name: rig_of(runs, [*IN_PARTS, *model, *words]) for name, words in STEPPERS.items()}
    times: dict[str, list[float]] = {name: [] for name in rigs}
    for number in range(3 if is_trial else 22):
        for name in list(rigs) if number % 2 else reversed(rigs):
            took_ms = step_ms(*rigs[name])
            if number > 1:  # the first two warm up
                times[name].append(took_ms)
    base = times["after_backward"]
    for name, each in times.items():
        ratio = statistics.median(own / other for own, other in zip(base, each, strict=True))
        yield {
            "stepper": name,
            "ms": statistics.median(each),
            "least_ms": min(each),
            "most_ms": max(each),
            "speed_of_after_backward": ratio,
        }


def rig_of(runs: Runs, words: list[str]) -> tuple[Rig, Part]:
    """The rig of these words, and a batch for it."""
    whole = settings(runs.settings_of(words))
    problem = whole.groups["task"].pose(whole.groups["model"], open_data(whole).spec)
    knobs = {group: whole.groups[group] for group in KNOB_GROUPS if group != "allocator"}
    torch.manual_seed(0)
    rig = assemble(problem, knobs, CUDA, whole.root.seed)
    tokens, _ = problem.spec.example(whole.train.batch_size)
    inputs, targets = (torch.randint(problem.spec.num_classes, tokens.shape, device=CUDA) for _ in range(2))
    return rig, Part(inputs, targets)


def step_ms(rig: Rig, batch: Part) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step(rig, batch)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def flex(is_trial: bool) -> Iterator[Line]:
    """Attention of 16 heads of 64, forward and backward: to all earlier tokens, in blocks, and by FlexAttention."""
    sizes = [(1, 256, 64)] if is_trial else [(4, 1024, 128), (4, 4096, 256), (1, 16384, 256)]
    for dtype in (torch.bfloat16, torch.float32):
        for batch, length, window in sizes:
            inputs, wanted = heads(batch, length, 16, dtype), []
            near = Reach(window, 16)
            kinds = {
                "full": LocalAttention(Reach(length)),
                "blocks": LocalAttention(near),
                "flex": LocalAttention(near, LocalKernel.flex),
            }
            for name, attend in kinds.items():
                began = time.perf_counter()
                values = both_passes(attend, inputs)
                first_s = time.perf_counter() - began
                device_us, host_us = times_of(lambda attend=attend, inputs=inputs: both_passes(attend, inputs), 8)
                _, beside_bytes = peak_beyond(lambda attend=attend, inputs=inputs: both_passes(attend, inputs))
                if name == "blocks":
                    wanted = values
                differs = max(map(difference, values, wanted)) if name == "flex" else None
                yield {
                    "attention": f"{name}, {batch} x {length:,}, window {window}, {str(dtype).removeprefix('torch.')}",
                    "device_ms": device_us / 1e3,
                    "host_ms": host_us / 1e3,
                    "beside_mib": beside_bytes / MIB,
                    "first_s": first_s,
                    "differs_from_blocks": differs,
                }


def both_passes(attend: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    outputs = attend(*inputs, 0.0)
    return (outputs.detach(), *torch.autograd.grad(outputs, inputs, torch.ones_like(outputs)))


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


PROBES = {probe.__name__: probe for probe in (context, cudnn, nccl, sum_kernels, sum_steps, flex)}


def main() -> None:
    name, *size = sys.argv[1:] or [""]
    if name not in PROBES or size not in ([], ["trial"]):
        sys.exit(f"{' '.join(sys.argv[1:])}: must be one of {', '.join(PROBES)}, then perhaps trial")
    for line in PROBES[name](size == ["trial"]):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
