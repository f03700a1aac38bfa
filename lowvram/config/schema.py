"""From YAML to typed, frozen values. The dataclass is the schema. Imports no torch.

A node of the configuration names its class under `_target_`. `build` lays the node over that class's fields and
refuses whatever does not fit, in one sentence with the dotted key. Only classes of this package and of installed
plug-ins (plugins.py) can be named: a configuration file is data, never code.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, ValidationError

from lowvram.config.errors import BadInput
from lowvram.config.plugins import PACKAGE, owner

TARGET = "_target_"
# Modules of options that have moved: where a class was first, which YAMLs and snapshots of earlier versions name, and
# where it is now.
MOVED = {
    "lowvram.knobs.qat": "lowvram.compress.qat",
    "lowvram.knobs.sparsity": "lowvram.compress.sparsity",
    "lowvram.loops.distillation": "lowvram.compress.distillation",
    "lowvram.loops.grow": "lowvram.compress.grow",
    "lowvram.loops.prune": "lowvram.compress.prune",
}
BUILT: dict[tuple[type, str, str], Any] = {}  # by class, key and values


def build(node: DictConfig, key: str) -> Any:
    """The frozen dataclass that `node._target_` names, made from the node's values.

    Raises:
        BadInput: a target outside the package, an unknown key, a wrong type, a missing value (`???`),
            the string "None", or a value that the class itself refuses.
    """
    values = checked_values(node, key)
    return build_as(find_target(key, values.pop("_target_", None)), values, key)


def build_as(target: type, values: dict[Any, Any], key: str) -> Any:
    """The dataclass `target` made from `values`; raises like `build`. As it is frozen, equal values share one object:
    most values are the same in all points of a sweep."""
    known = (target, key, repr(values))
    if known not in BUILT:
        BUILT[known] = target(**typed_values(target, values, key))
    return BUILT[known]


def checked_values(node: DictConfig, key: str) -> dict[Any, Any]:
    """The node as plain, resolved values; raises BadInput for values that no field can have (see `refuse_value`)."""
    for inner, value in walk(node, key):
        refuse_value(inner, value)
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    if isinstance(values.get(TARGET), str):
        values[TARGET] = present_name(values[TARGET])
    return values


def present_name(target: str) -> str:
    """The dotted name that a class has today."""
    return next((new + target.removeprefix(old) for old, new in MOVED.items() if target.startswith(f"{old}.")), target)


def walk(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Every (dotted key, value) at and below `node`, containers included."""
    yield key, node
    if isinstance(node, DictConfig):
        for name in node:
            inner = f"{key}.{name}" if key else str(name)
            # The class says what a missing value must be (see typed_values).
            yield from [(inner, MISSING)] if OmegaConf.is_missing(node, name) else walk(node[name], inner)
    elif isinstance(node, ListConfig):
        for index in range(len(node)):
            if OmegaConf.is_missing(node, index):
                raise BadInput(f"{key}[{index}]", MISSING, "given a value")
            yield from walk(node[index], f"{key}[{index}]")


def refuse_value(key: str, value: Any) -> None:
    """Raise BadInput for values that no field can have, before any class is looked up."""
    if value == "None":
        raise BadInput(key, value, "null if nothing is meant (YAML's word for it)")
    if key.endswith(TARGET) and not str(value).startswith(f"{PACKAGE}.") and owner(str(value)) is None:
        allowed = f"a class inside {PACKAGE} or an installed plug-in: a configuration never runs other code"
        raise BadInput(key, value, allowed)


def find_target(key: str, path: str | None) -> type:
    """The dataclass at `path`, which is known to lie inside this package or a plug-in."""
    if path is None:
        raise BadInput(key, None, f"an option of the group {key}: the file that it came from names no _target_")
    module, _, name = path.rpartition(".")
    package = PACKAGE if path.startswith(f"{PACKAGE}.") else str(owner(path))
    try:
        target = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{error.name}.".startswith(f"{package}."):
            raise  # the class is there, but something that it imports isn't installed
        raise BadInput(f"{key}._target_", path, f"the dotted name of a class of {package}") from None
    is_own = f"{getattr(target, '__module__', '')}.".startswith(f"{package}.")
    if not (isinstance(target, type) and dataclasses.is_dataclass(target) and is_own):
        raise BadInput(f"{key}._target_", path, f"a dataclass of {package}")
    return target


def typed_values(target: type, values: dict[Any, Any], key: str) -> dict[str, Any]:
    """`values` checked and converted against the fields of the dataclass `target`."""
    schema = OmegaConf.structured(target)
    OmegaConf.set_readonly(schema, False)
    names = [field.name for field in dataclasses.fields(target)]
    dot = f"{key}." if key else ""
    for name, value in values.items():
        if name not in names:
            raise BadInput(f"{dot}{name}", value, f"removed: {key or 'the root'} knows {', '.join(names) or 'no keys'}")
        try:
            schema[name] = value
        except (ValidationError, ConfigKeyError):
            raise BadInput(f"{dot}{name}", value, described_type(target, name)) from None
    try:
        fields = {name: plain(schema[name]) for name in names}
    except MissingMandatoryValue as error:
        allowed = f"given a value: {described_type(target, str(error.key))}"
        raise BadInput(f"{dot}{error.key}", MISSING, allowed) from None
    for name, value in fields.items():
        if isinstance(value, float) and math.isinf(value):
            raise BadInput(f"{dot}{name}", value, f"{described_type(target, name)}, not infinity")
    return fields


def plain(value: Any) -> Any:
    """Lists as Python lists; everything else as it is."""
    return OmegaConf.to_container(value) if isinstance(value, ListConfig | DictConfig) else value


def described_type(target: type, name: str) -> str:
    """What a field of the dataclass `target` allows, in words."""
    hint = typing.get_type_hints(target)[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return " or ".join(described(kind) for kind in kinds)


def described(kind: Any) -> str:
    """One type in words."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(member.name for member in kind)
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
    }
    words_of_containers = {
        "list[int]": "a list of whole numbers",
        "list[str]": "a list of texts",
        "dict[str, typing.Any]": "a dictionary, written as {key: value}",
    }
    return words.get(kind) or words_of_containers.get(str(kind), f"a {kind}")
