"""The checks of the classes that a configuration names, taken from their source: most of their modules import torch,
which takes seconds. Imports no torch.

Of a module only those definitions are executed that a class needs for its fields, its `__post_init__` and its
`check_paths`. What they use of other modules of the package is read in the same way; the standard library and OmegaConf
are imported. In place of everything else, such as torch, stands `UNKNOWN`: a check that comes to use it is left to the
process that imports it.
"""

from __future__ import annotations
import __future__

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Never, final

from omegaconf import DictConfig

from lowvram.config.defaults import ROOT
from lowvram.config.errors import BadInput
from lowvram.config.schema import build_as, checked_values
from lowvram.config.settings import GROUPS, check_batch_size

PACKAGE = "lowvram"
IMPORTED = ("lowvram.config", "omegaconf")  # besides the standard library
IMPORTERS = ("importlib.import_module", "lowvram.config.importing")  # of code that a user names: never used here
CHECKS, PATHS = "__post_init__", "check_paths"  # methods: of values, and of paths that must be there


class LeftToChild(BaseException):
    """What is asked for can't be told without torch. No `except Exception` of a check may catch it."""


@final
class Unknown:
    """What isn't imported here. Every use raises `LeftToChild`."""

    def use(self, *_: Any, **__: Any) -> Never:
        raise LeftToChild

    __getattr__ = __call__ = __getitem__ = __iter__ = __len__ = __contains__ = __enter__ = __mro_entries__ = use
    __bool__ = __hash__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __format__ = __str__ = use


UNKNOWN = Unknown()


def check_groups(config: DictConfig) -> None:
    """Check the values of all groups, and the batch, as far as that takes no torch.

    Raises:
        BadInput: the process that runs the point would raise it too, seconds later.
    """
    for group in GROUPS:
        check_values(config[group], group)
    parts, ranks = config.accum.get("parts", 1), str(config.sharding.get("ranks"))
    check_batch_size(config.train.batch_size, parts, int(ranks) if ranks.isdigit() else 1)


def check_values(node: DictConfig, key: str) -> None:
    """Check the values of a group against the class that it names, as `schema.build` does, as far as its source tells.

    Raises:
        BadInput: as `schema.build`.
    """
    values = checked_values(node, key)
    target = class_at(values.pop("_target_", None))
    if target is None:
        return
    try:
        value = build_as(target, values, key)
        getattr(value, PATHS, lambda: None)()
    except BadInput:
        raise
    except (LeftToChild, Exception):  # noqa: S110  # the child says what is wrong, if anything is
        pass


def class_at(path: Any) -> type | None:
    """The fields and checks of a class of the package; None if there is none, or if it can't be read."""
    module, _, name = str(path).rpartition(".")
    is_ours = module.startswith(f"{PACKAGE}.") and all(map(str.isidentifier, module.split(".")))  # not a path elsewhere
    found = source_of(module).get(name) if is_ours else UNKNOWN
    return found if isinstance(found, type) else None


@cache
def source_of(module: str) -> Source:
    return Source(module)


@final
class Source:
    """A module of the package, read and not imported."""

    def __init__(self, name: str) -> None:
        self._module = ModuleType(f"{name} (source)")
        vars(self._module)["UNKNOWN"] = UNKNOWN
        sys.modules[self._module.__name__] = self._module  # where the types of a dataclass's fields are looked up
        self._nodes = {name: node for node in definitions(tree_of(name)) for name in names_of(node)}

    def get(self, name: str) -> Any:
        """A name of the module, executed when it is first asked for; `UNKNOWN` if that isn't possible."""
        if name not in vars(self._module):
            vars(self._module)[name] = UNKNOWN  # also for definitions that use each other
            vars(self._module)[name] = self._executed(name)
        return vars(self._module)[name]

    def _executed(self, name: str) -> Any:
        node = self._nodes.get(name)
        if node is None:
            return UNKNOWN
        if isinstance(node, ast.Import | ast.ImportFrom):
            return imported(node, name)
        node = checks_alone(node) if isinstance(node, ast.ClassDef) else node
        for used in names_in(node):
            if used in self._nodes:
                self.get(used)
        tree = ast.fix_missing_locations(ast.Module([WithoutImports().visit(node)], []))
        code = compile(tree, self._module.__name__, "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        try:
            exec(code, vars(self._module))
        except (LeftToChild, Exception):
            return UNKNOWN
        return vars(self._module)[name]


def tree_of(module: str) -> ast.Module:
    """The source of a module; empty if there is none."""
    path = ROOT.joinpath(*module.split("."))
    files = [path.with_suffix(".py"), path / "__init__.py"]
    return ast.parse(next((file.read_bytes() for file in files if file.is_file()), b""))


def definitions(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, also those under `if` and `try`."""
    for node in tree.body:
        yield from definitions(ast.Module(node.body, [])) if isinstance(node, ast.If | ast.Try | ast.With) else [node]


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            return [
                name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            ]
    return []


def names_in(node: ast.AST) -> list[str]:
    """The names that a statement uses."""
    return [name.id for name in ast.walk(node) if isinstance(name, ast.Name)]


def is_enum(node: ast.ClassDef) -> bool:
    return any(name.endswith("Enum") for base in node.bases for name in names_in(base))


def checks_alone(node: ast.ClassDef) -> ast.ClassDef:
    """A class with nothing but its fields and its checks; an enumeration with its names, each of which is its value."""
    body: list[ast.stmt] = []
    for part in node.body:
        if isinstance(part, ast.AnnAssign) or (isinstance(part, ast.FunctionDef) and part.name in (CHECKS, PATHS)):
            body.append(part)
        elif isinstance(part, ast.Assign) and is_enum(node):
            body.extend(ast.parse(f"{name} = {name!r}").body[0] for name in names_of(part))
    return ast.ClassDef(node.name, node.bases, [], body or [ast.Pass()], node.decorator_list)


class WithoutImports(ast.NodeTransformer):
    """Leaves out the imports inside functions that aren't made here: `UNKNOWN` stands for their names."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt:
        return node if all(is_imported(f"{node.module}.{alias.name}") for alias in node.names) else unknown(node)

    def visit_Import(self, node: ast.Import) -> ast.stmt:
        return node if all(is_imported(alias.name) for alias in node.names) else unknown(node)


def unknown(node: ast.Import | ast.ImportFrom) -> ast.stmt:
    """An assignment of `UNKNOWN` to the names that a statement imports."""
    return ast.parse(f"{' = '.join(names_of(node))} = UNKNOWN").body[0]


def imported(node: ast.Import | ast.ImportFrom, name: str) -> Any:
    """What a statement at the top of a module imports under a name."""
    if isinstance(node, ast.Import):
        module = next(alias.name for alias in node.names if name in (alias.asname, alias.name.partition(".")[0]))
        return import_module(module if node.names[0].asname else name) if is_imported(module) else UNKNOWN
    original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
    path = f"{node.module}.{original}"
    if is_imported(path):
        return getattr(import_module(str(node.module)), original, UNKNOWN)
    is_read = path.startswith(f"{PACKAGE}.") and not is_within(path, IMPORTERS)
    return source_of(str(node.module)).get(original) if is_read else UNKNOWN


def is_imported(path: str) -> bool:
    """Whether a module, or a name of it, is really imported."""
    is_free = path.partition(".")[0] in sys.stdlib_module_names or is_within(path, IMPORTED)
    return is_free and path != "importlib" and not is_within(path, IMPORTERS)


def is_within(path: str, names: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{name}.") for name in names)
