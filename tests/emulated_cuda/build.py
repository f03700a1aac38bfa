"""Builds the stub libraries that a CUDA build of torch links against.

    python tests/emulated_cuda/build.py SITE_PACKAGES HEADERS OUT

Which libraries, functions and symbol versions are wanted is read from torch's own ELF files. Functions that `device/`
defines are taken from there; every other one does nothing and returns 0, which is success in all of these libraries.

HEADERS holds the include folders of the wheels nvidia-cuda-runtime and nvidia-cuda-crt (2 MB).
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
DEVICE = HERE / "device"
DEVICES = HERE.parents[1] / "conf" / "data_sheets"
COMPILE = ["gcc", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-deprecated-declarations"]
CORE = ("settings.c", "card.c", "memory.c", "streams.c", "driver_function.c")
# Short name of a library -> its sources in device/ and its flag.
SOURCES: dict[str, tuple[list[str], str]] = {
    "cudart": (["cudart.c", "kernels.c", "graphs.c"], ""),
    "cuda": (["driver.c"], ""),
    "cublas": (["cublas.c"], ""),
    "cublasLt": (["cublas.c"], "-DLT"),
    "cudnn": (["cudnn.c"], ""),
    "nccl": (["nccl.c"], ""),
    "nvrtc": (["tools.c"], "-DNVRTC"),
    "nvidia-ml": (["tools.c"], "-DNVML"),
    "cupti": (["tools.c"], "-DCUPTI"),
    "cusolver": (["tools.c"], "-DCUSOLVER"),
    "cusparse": (["tools.c"], "-DCUSPARSE"),
}
# Whose a function is, by its first letters; the longest that fits.
PREFIXES = {
    "cudnn": "cudnn",
    "cublasLt": "cublasLt",
    "cublas": "cublas",
    "cufft": "cufft",
    "curand": "curand",
    "cusolver": "cusolver",
    "cusparseLt": "cusparseLt",
    "cusparse": "cusparse",
    "nccl": "nccl",
    "pnccl": "nccl",
    "nvshmem": "nvshmem_host",
    "nvrtc": "nvrtc",
    "cuFile": "cufile",
    "cupti": "cupti",
    "__cuda": "cudart",
    "cuda": "cudart",
    "nvml": "nvidia-ml",
    "cu": "cuda",
}
OPENED_BY_NAME = {"cuda": "libcuda.so.1", "nvidia-ml": "libnvidia-ml.so.1"}  # no library links them
# Triton compiles a module of its own that links these.
TRITONS = [
    "cuCtxGetLimit",
    "cuCtxSetLimit",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuGetErrorString",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuPointerGetAttribute",
]


@dataclass
class Library:
    """A library to be built."""

    soname: str = ""  # "": nothing links it by itself
    versions: dict[str, str] = field(default_factory=dict)  # of the symbols that are wanted; "": none


def wanted(site: Path) -> dict[str, Library]:
    """What torch, and what else in the environment is made for CUDA, asks for: libraries by their short names."""
    libraries = {short: Library(soname) for short, soname in OPENED_BY_NAME.items()}
    libraries["cuda"].versions = dict.fromkeys(TRITONS, "")
    for path in [*(site / "torch" / "lib").glob("*.so"), *(site / "torchao").glob("*.so")]:
        for soname, short in re.findall(r"NEEDED.*\[(lib(.+?)\.so[.\d]*)\]", output("readelf", "-d", path)):
            if re.match(r"cu[a-zA-Z]|nccl|nvrtc|nvshmem|nvJitLink|nvidia", short):
                libraries.setdefault(short, Library()).soname = soname
        for line in output("nm", "-D", "--undefined-only", path).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if short := library_of(symbol):
                versions = libraries.setdefault(short, Library()).versions
                versions[symbol] = version.lstrip("@") or versions.get(symbol, "")
    return {short: library for short, library in libraries.items() if library.soname}


def library_of(symbol: str) -> str | None:
    fitting = [prefix for prefix in PREFIXES if re.match(rf"{prefix}([A-Z]|(?<=nvshmem))", symbol)]
    return PREFIXES[max(fitting, key=len)] if fitting else None


def output(*args: object) -> str:
    return subprocess.run([str(arg) for arg in args], check=True, capture_output=True, text=True).stdout


def card_table() -> str:
    """The cards of conf/data_sheets as rows of C: option, driver's name, capability, bytes, multiprocessors."""
    rows = []
    for path in sorted(DEVICES.glob("*.yaml")):
        card = yaml.safe_load(path.read_text())
        if card["compute_capability"] and card["names"]:
            numbers = [
                card["compute_capability"].replace(".", ""),
                f"{card['memory_bytes']}ul",
                card["multiprocessors"],
            ]
            rows.append(f'{{"{path.stem}", "{card["names"][0]}", {", ".join(map(str, numbers))}}},\n')
    return "".join(rows)


def build(site: Path, headers: Path, out: Path) -> None:
    """All libraries, into `out`."""
    work = out / "obj"
    work.mkdir(parents=True, exist_ok=True)
    (work / "cards.h").write_text(card_table())
    includes = [f"-I{DEVICE}", f"-I{work}", *(f"-I{folder}" for folder in sorted(headers.glob("nvidia/*/include")))]
    core = "libemulated_core.so"
    sources = [DEVICE / name for name in CORE]
    linked = [f"-Wl,-soname,{core}", "-Wl,-rpath,$ORIGIN", "-lpthread", "-ldl"]
    output(*COMPILE, "-shared", *includes, *sources, "-o", out / core, *linked)
    for short, library in sorted(wanted(site).items()):
        print(link(short, library, work, out, includes))


def link(short: str, library: Library, work: Path, out: Path, includes: list[str]) -> str:
    """One library; returns what it is made of."""
    names, flag = SOURCES.get(short, ([], ""))
    objects: list[Path] = []
    for name in names:
        objects.append(work / f"{short}_{name}.o")
        output(*COMPILE, "-c", *filter(None, [flag]), *includes, DEVICE / name, "-o", objects[-1])
    defined = {
        line.split()[-1]
        for path in objects
        for line in output("nm", "--defined-only", "-g", path).splitlines()
        if line.split()
    }
    empty = sorted(set(library.versions) - defined)
    rest = work / f"{short}_rest.c"
    rest.write_text(
        "void emu_log(const char *, ...);\nextern int emu_tracing;\n"
        + "".join(
            f'long {name}(void) {{ if (emu_tracing) emu_log("{name}: does nothing\\n"); return 0; }}\n'
            for name in empty
        )
    )
    versions = sorted(set(filter(None, library.versions.values())))
    script = work / f"{short}.map"
    script.write_text("".join(version_node(library, version, not place) for place, version in enumerate(versions)))
    output(
        *COMPILE, "-w", "-shared", *objects, rest, "-o", out / library.soname, f"-Wl,-soname,{library.soname}",
        *([f"-Wl,--version-script={script}"] if versions else []),
        f"-L{out}", "-Wl,--no-as-needed", "-lemulated_core", "-Wl,-rpath,$ORIGIN", "-lpthread", "-ldl", "-lrt",
    )  # fmt: skip
    return f"{library.soname:24} {len(defined):4} functions of its own, {len(empty):4} that do nothing"


def version_node(library: Library, version: str, is_first: bool) -> str:
    """Of a linker's version script: the symbols of one version; the first takes all that no other names."""
    symbols = ["*"] if is_first else [symbol for symbol, wanted in library.versions.items() if wanted == version]
    return f"{version} {{ global: {' '.join(f'{symbol};' for symbol in symbols)} }};\n"


if __name__ == "__main__":
    build(*(Path(argument).resolve() for argument in sys.argv[1:4]))
