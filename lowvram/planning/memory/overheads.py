"""The memory that a trace doesn't show: what libraries, kernels and CUDA take beside the tensors. Imports no torch.

Sizes depend on the version of torch and on the device. Every size has its source. Unknown sizes are None and aren't
estimated, with one exception: the CUDA context, whose size lies in a range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from lowvram.planning.devices import DeviceSpec
from lowvram.planning.memory.context import SOURCE, context_bytes

MIB = 2**20
Version = tuple[int, int]


@dataclass(frozen=True)
class Overhead:
    """Memory of a device that belongs to no tensor."""

    name: str
    num_bytes: int | None  # once allocated, kept until the process ends; None: not known
    is_in_allocator: bool  # whether torch.cuda.memory_reserved() counts it
    source: str
    is_capped: bool = True  # whether the limit `vram` counts it
    is_resident: bool = True  # whether resident memory grows by it; memory never touched counts for `vram` only
    margin_bytes: int | None = None  # the most by which a measurement exceeded `num_bytes`; None: not measured
    least_bytes: int | None = None  # of a size that lies in a range, of which `num_bytes` is the most; None: it doesn't


class Span(NamedTuple):
    """The versions from `first` on and before `before`."""

    first: Version = (0, 0)
    before: Version = (10**6, 0)

    def has(self, version: Version) -> bool:
        return self.first <= version < self.before


ANY = Span()
HOPPER, BLACKWELL, RTX_BLACKWELL = Span((9, 0), (10, 0)), Span((10, 0), (11, 0)), Span((12, 0), (13, 0))

PYTORCH = "github.com/pytorch/pytorch"
CUBLAS = f"aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize ({PYTORCH}/pull/91564)"
EAGER = (
    "unknown: in torch 2.15 a workspace lives only as long as its product, unless TORCH_CUBLAS_WORKSPACE_CACHE is set "
    f"(docs.pytorch.org/docs/2.15/cuda_environment_variables.html; {PYTORCH}/pull/194311)"
)
UNIFIED = (
    "takes cuBLAS's workspace, unless TORCH_CUBLASLT_UNIFIED_WORKSPACE=0 "
    "(the docstring of torch.backends.cuda.blas_workspace_size, torch 2.13.0)"
)


class Row(NamedTuple):
    """An overhead and where it applies. The first matching row per name wins."""

    line: Overhead
    torch: Span = ANY
    capability: Span = ANY
    least_ranks: int = 1
    least_threads: int = 0  # that multiply matrices


def _cublas(thread: str, number: int) -> list[Row]:
    """cuBLAS keeps a workspace per handle and stream, and torch a handle per thread: the backward pass has its own
    thread."""
    name = f"cuBLAS workspace of {thread}"

    def line(num_bytes: int | None, source: str = CUBLAS) -> Overhead:
        return Overhead(name, num_bytes, is_in_allocator=True, source=source)

    unknown = line(None, f"unknown: 32 MiB at some time since {PYTORCH}/pull/175344 (February 2026)")
    rows = [
        Row(line(None, EAGER), torch=Span((2, 14))),
        Row(line(32 * MIB), capability=HOPPER),
        *(Row(line(32 * MIB), Span((2, 13)), capability) for capability in (BLACKWELL, RTX_BLACKWELL)),
        *(Row(unknown, capability=capability) for capability in (BLACKWELL, RTX_BLACKWELL)),
        Row(line(4096 * 1024 * 2 + 16 * 1024 * 8)),  # :4096:2:16:8, as CUBLAS_WORKSPACE_CONFIG would say it
    ]
    return [row._replace(least_threads=number) for row in rows]


ROWS: list[Row] = [
    *_cublas("the forward pass", 1),
    *_cublas("the backward pass", 2),
    Row(Overhead("cublasLt workspace", None, True, EAGER), torch=Span((2, 14))),
    Row(Overhead("cublasLt workspace", 0, True, UNIFIED)),
    Row(
        Overhead(
            "cuDNN workspace",
            None,
            True,
            f"unknown: depends on the algorithm; taken only while a convolution runs ({PYTORCH}/issues/49207)",
        )
    ),
    Row(
        Overhead(
            "temporaries inside operators",
            None,
            True,
            "unknown where lowvram/planning/trace/scratch.py has no rule: it has rules for sums, norms, indices, "
            "copies of convolutions, and attention",
        )
    ),
    Row(
        Overhead(
            "NCCL",
            None,
            False,
            "unknown: by channels, algorithms and links; 544 MB were seen for a group of 2 A100s, 688 MB for larger "
            "ones (github.com/NVIDIA/nccl/issues/964)",
        ),
        least_ranks=2,
    ),
    Row(Overhead("scratch and spilled registers of Triton kernels", None, False, "unknown")),
]


PAGES, OBJECTS = "pages of libraries' files that are read for the first time", "Python objects"
GROWTH = "growth of a Transformer with 0.4 MiB of tensors, of which 34 MiB are file pages, most of libtorch_cpu.so"
UNDER_CAPS = "measured on x86-64 with torch 2.13.0+cpu by caps that just held (scripts/benchmarks/bench_budgets.py)"
SCRATCH = "scratch memory of products and attention"
ON_CPU: list[Row] = [
    Row(
        Overhead(
            PAGES,
            34 * MIB,
            False,
            f"measured on x86-64 with torch 2.13.0+cpu: {GROWTH} (docs/planning.md); RLIMIT_DATA leaves them out",
            is_capped=False,
        ),
        torch=Span((2, 13), (2, 14)),
    ),
    Row(Overhead(PAGES, None, False, "unknown for this version of torch: 34 MiB with 2.13.0+cpu on x86-64", False)),
    Row(
        Overhead(
            OBJECTS,
            2 * MIB,
            False,
            f"measured on x86-64 with torch 2.13.0+cpu: {GROWTH} (docs/planning.md)",
            margin_bytes=0,
        ),
        torch=Span((2, 13), (2, 14)),
    ),
    Row(
        Overhead(
            SCRATCH,
            4 * MIB,
            False,
            f"{UNDER_CAPS}: 11 Transformers and a Mixer of 50 to 620 MiB took 2 to 7 MiB",
            is_resident=False,
            margin_bytes=5 * MIB,
        ),
        torch=Span((2, 13), (2, 14)),
    ),
    Row(Overhead(SCRATCH, None, False, "unknown for this version of torch: 4 MiB with 2.13.0+cpu on x86-64")),
    Row(Overhead(OBJECTS, None, False, "unknown for this version of torch: 2 MiB with 2.13.0+cpu on x86-64")),
    Row(
        Overhead(
            "gaps that many small tensors leave in malloc's heap",
            None,
            False,
            "unknown: 13 MiB were seen with accum=x32 on parts of a single short text (docs/planning.md)",
            margin_bytes=0,
        )
    ),
]


SHAPE_BYTES, SHAPE_MARGIN_BYTES, CONVOLVING_BYTES = 13 * MIB // 4, MIB // 2, 12 * MIB
SIXTEEN_BIT_BYTES, SIXTEEN_BIT_MARGIN_BYTES = 14 * MIB, 3 * MIB
ONEDNN_OF = Span((2, 13), (2, 14))  # the versions of torch in which these were measured


def onednn_overheads(num_shapes: int, has_16_bit: bool, torch_version: str) -> list[Overhead]:
    """The memory that oneDNN takes on a CPU.

    Args:
        num_shapes: the number of different convolutions; forward and backward ones count separately.
        has_16_bit: whether matrices in bf16 or fp16 are multiplied.
    """
    is_known = ONEDNN_OF.has(parsed(torch_version))
    where = UNDER_CAPS if is_known else f"unknown for this version of torch; {UNDER_CAPS}"
    touched = "with torch 2.13.0+cpu on x86-64 three ResNets of 70 to 460 MiB grew by 13 to 19 MiB"
    lines = [
        Overhead(
            "code and buffers of each shape of a convolution",
            num_shapes * SHAPE_BYTES,
            False,
            f"{where}: 3.25 MiB a shape in a model of one shape as in one of 23",
            is_resident=False,
            margin_bytes=num_shapes * SHAPE_MARGIN_BYTES,
        ),
        Overhead("what convolutions touch of it, and pages of oneDNN's file", CONVOLVING_BYTES, False, touched, False),
    ]
    narrow = f"{where} for Muon, by malloc's count for bf16: 14 to 16 MiB, without instructions for bf16"
    lines = lines if num_shapes else []
    if has_16_bit:
        name = "oneDNN's products in 16 bits: code and buffers"
        lines.append(Overhead(name, SIXTEEN_BIT_BYTES, False, narrow, margin_bytes=SIXTEEN_BIT_MARGIN_BYTES))
    return lines if is_known else [replace(line, num_bytes=None, margin_bytes=None) for line in lines]


RECURRENT_ON_CPU = Overhead(
    "weights of recurrent layers in oneDNN's layouts",
    None,
    False,
    "unknown: 27 MiB were seen with two layers of 384 features (docs/results/cpu/bench_budgets.md)",
    margin_bytes=0,
)
RECURRENT = Overhead(
    "what cuDNN's recurrent layers keep for the backward pass, beyond what CPU kernels keep",
    None,
    True,
    "unknown: whatever cudnnGetRNNTempSpaceSizes says; the plan has what oneDNN's LSTM, and other cells, keep on a CPU",
)


def process_overheads(
    device: DeviceSpec, torch_version: str, num_ranks: int = 1, num_threads: int = 2
) -> list[Overhead]:
    """The memory that a process on `device` takes beside its tensors.

    Args:
        torch_version: such as "2.13.0+cu130".
        num_ranks: processes with a device each.
        num_threads: threads that multiply matrices, such as that of the forward and that of the backward pass.
    """
    rows = ON_CPU if device.capability is None else ROWS
    rows = [row for row in rows if num_ranks >= row.least_ranks and num_threads >= row.least_threads]
    lines = list(_lines(rows, parsed(torch_version), device.capability or (0, 0)))
    return [*lines, context(device.multiprocessors)] if device.is_cuda else lines


def context(multiprocessors: int | None) -> Overhead:
    """The CUDA context of a process."""
    least_bytes, most_bytes = context_bytes(multiprocessors)
    return Overhead("CUDA context", most_bytes, is_in_allocator=False, source=SOURCE, least_bytes=least_bytes)


def parsed(version: str) -> Version:
    """Major and minor number."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _lines(rows: list[Row], torch_version: Version, capability: Version) -> Iterator[Overhead]:
    names = set()
    for row in rows:
        applies = row.torch.has(torch_version) and row.capability.has(capability)
        if applies and row.line.name not in names:
            names.add(row.line.name)
            yield row.line
