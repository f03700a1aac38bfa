"""No private name of another library is used outside of lowvram/compat, and each name in there has its reasons and its
test: read off the sources."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "lowvram" / "compat"
OURS = {"lowvram", "hydra_plugins", "scripts", "tests"}
STANDARD = {"_replace", "_asdict", "_fields", "_value_", "_getframe", "_exit"}  # private names of Python that aren't
PRIVATE = re.compile(r"_(?!_).+")  # not dunders
INTERNAL = "datasets.packaged_modules"  # private without an underscore
NAME_IN_TEXT = re.compile(r"(torch|hydra|omegaconf|wandb|transformers|torchao|datasets)(\.\w+)*\._(?!_)[\w.]+")
# A benchmark compares us with MemTracker, and asks which processor it runs on: nothing of ours needs these.
ALLOWED = {
    "scripts/benchmarks/plan_accuracy.py": {
        "torch.distributed._tools.mem_tracker.MemTracker",
        "torch.cpu._is_avx512_bf16_supported",
        "torch.cpu._is_amx_tile_supported",
    }
}


def private_names(source: str) -> Iterator[str]:
    """The names that are private to others in a source: imported, asked of an object, spelled out, replaced, or defined
    for others to call."""
    nodes = nodes_of(source)
    own = own_private_names(nodes) | names_of_bases(nodes)
    libraries = imported_libraries(nodes)
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if is_private(alias.name))
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names if is_private(f"{module}.{alias.name}"))
            case ast.Attribute(attr=name) if PRIVATE.fullmatch(name) and name not in own | STANDARD:
                yield ast.unparse(node)
            case ast.Constant(value=str(text)) if NAME_IN_TEXT.fullmatch(text):
                yield text
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]) if (
                PRIVATE.fullmatch(name)
            ):
                yield ast.unparse(node)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="patch")) | ast.Name(id="replaced"), args=[target, *_]
            ) if root(target) in libraries:
                yield ast.unparse(node)
            case ast.Assign(targets=[ast.Attribute(value=target) as replaced]) if is_class_of(target, libraries):
                yield ast.unparse(replaced)
            case ast.ClassDef(name=name, body=body):  # nobody here calls it: somebody else has asked for that name
                methods = (method.name for method in body if isinstance(method, ast.FunctionDef))
                yield from (f"{name}.{each}" for each in methods if PRIVATE.fullmatch(each) and each not in called)


def own_private_names(nodes: Iterable[ast.AST]) -> set[str]:
    """What a module itself gives names with an underscore: they are its own on whatever object it finds them."""
    named: set[str] = set()
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                named.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                named.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                named.add(name)
    return named


def names_of_bases(nodes: Iterable[ast.AST]) -> set[str]:
    """What other modules of ours give names with an underscore, where classes are imported: one may be a base."""
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    paths = [ROOT / f"{module.replace('.', '/')}.py" for module in modules if module.startswith("lowvram.")]
    return set[str]().union(*map(names_given_in, paths))


@cache
def names_given_in(path: Path) -> set[str]:
    return own_private_names(nodes_of(path.read_text())) if path.is_file() else set()


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imported_libraries(nodes: Iterable[ast.AST]) -> set[str]:
    """The names that stand for something of another library."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names if is_foreign(alias.name)}
        elif isinstance(node, ast.ImportFrom) and is_foreign(node.module or ""):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def is_foreign(module: str) -> bool:
    return module.partition(".")[0] not in OURS | set(sys.stdlib_module_names)


def is_private(name: str) -> bool:
    is_hidden = name.startswith(INTERNAL) or any(PRIVATE.fullmatch(part) for part in name.split("."))
    return is_hidden and is_foreign(name)


def root(node: ast.expr) -> str:
    """The first part of a dotted name."""
    return ast.unparse(node).partition(".")[0]


def is_replacing(function: ast.expr) -> bool:
    """Whether it is `patch.object` and its like, or compat's `replaced`."""
    return ast.unparse(function).partition(".")[0] in ("patch", "replaced")


def is_class_of(node: ast.expr, libraries: set[str]) -> bool:
    last = ast.unparse(node).rpartition(".")[2]
    return root(node) in libraries and last[0].isupper()


def files_outside() -> list[Path]:
    found = [path for folder in ("lowvram", "hydra_plugins", "scripts") for path in (ROOT / folder).rglob("*.py")]
    return [path for path in sorted(found) if not path.is_relative_to(COMPAT)]


def test_no_private_name_of_others_is_used_outside_compat() -> None:
    used = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files_outside()
        for name in sorted(set(private_names(path.read_text())))
        if name not in ALLOWED.get(str(path.relative_to(ROOT)), set())
    ]
    assert not used, "private names of other libraries belong into lowvram/compat, one function each"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from torch._dynamo import config", ["torch._dynamo.config"]),
        ("import torch._inductor.config", ["torch._inductor.config"]),
        ("from torch.nn.modules.batchnorm import _BatchNorm", ["torch.nn.modules.batchnorm._BatchNorm"]),
        ("import torch\nC = torch._C", ["torch._C"]),
        ("def f(x):\n    return x.untyped_storage()._cdata", ["x.untyped_storage()._cdata"]),
        ("from datasets.packaged_modules import text", ["datasets.packaged_modules.text"]),
        ("names = ('torch._dynamo', 'torch.optim')", ["torch._dynamo"]),
        ("def f(x):\n    return getattr(x, '_version', 0)", ["getattr(x, '_version', 0)"]),
        ("import torch\ntorch.UntypedStorage.resize_ = f", ["torch.UntypedStorage.resize_"]),
        ("from torch import Tensor\npatch.object(Tensor, 'sin', f)", ["patch.object(Tensor, 'sin', f)"]),
        ("from torch import Tensor\nreplaced(Tensor, 'sin', f)", ["replaced(Tensor, 'sin', f)"]),
        ("from lowvram.core import host\nreplaced(host, 'moved', f)", []),
        ("class Mode(Base):\n    def _should_skip(self): ...", ["Mode._should_skip"]),
        ("class Sweeper(Base):\n    def f(self):\n        return self._parse()", ["self._parse"]),
        # Ours, Python's, and settings that are made to be set.
        ("class A:\n    def __init__(self): self._x = 1\ndef f(a):\n    return a._x", []),
        ("import sys\nsys._getframe()", []),
        ("from lowvram.x import _y", []),
        ("from __future__ import annotations\nx.__class__", []),
        ("import torch\ntorch.backends.cuda.matmul.fp32_precision = 'tf32'", []),
    ],
)
def test_private_names_are_found(source: str, expected: list[str]) -> None:
    assert list(dict.fromkeys(private_names(source))) == expected


def names_of(path: Path) -> dict[str, str]:
    """What a module of compat offers, with what is said of it: functions, classes, and names of torch's own."""
    body = ast.parse(path.read_text()).body
    offered: dict[str, str] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                offered[name] = ast.get_docstring(node) or ""
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        offered[name] = text
    return offered


WITHOUT_PRIVATE_NAMES = ("__init__.py", "hf_offline.py", "replaced.py")
MODULES = [path for path in sorted(COMPAT.glob("*.py")) if path.name not in WITHOUT_PRIVATE_NAMES]


def test_every_name_says_since_when_and_what_would_replace_it() -> None:
    for path in MODULES:
        for name, text in names_of(path).items():
            assert re.search(r"since\s(before\s)?\d", text), f"{path.name}: {name}: since which version?"
            assert re.search(r"[Rr]eplaced\s(by|with|like)\s", text), f"{path.name}: {name}: what would replace it?"


def test_every_name_has_a_test() -> None:
    for path in sorted(COMPAT.glob("*.py")):
        if path.name != "__init__.py":
            test = (Path(__file__).parent / f"test_{path.name}").read_text()
            missing = [name for name in names_of(path) if not re.search(rf"\b{name}\b", test)]
            assert not missing, path.name
