"""Imports code of the user's own, or of another library, that the user has named."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lowvram.config.code_names import IMPORTED
from lowvram.config.errors import BadInput, require


def import_object(target: str, key: str) -> Callable[..., Any]:
    """The class or function of a dotted name, looked for where Python does and in the working directory.

    Args:
        key: that of the field; one of `IMPORTED`, so that folders of others can't have it imported unasked.

    Raises:
        BadInput: there is no such module, or it has no such name, or can't be called.
    """
    assert key in IMPORTED, key
    path, _, name = target.rpartition(".")
    allowed = "the dotted name of a class or function, such as package.module.Class"
    require(bool(path) and bool(name), key, target, allowed)
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise BadInput(key, target, f"importable: it needs {error.name}, which isn't installed here") from None
        raise BadInput(key, target, f"{allowed}: there is no module {error.name} here or in Python's path") from None
    imported = getattr(module, name, None)
    require(imported is not None, key, target, f"{allowed}: {path} has no {name}")
    assert imported is not None
    require(callable(imported), key, target, f"{allowed}: {name} is a {type(imported).__name__}")
    return imported


def check_args(function: Callable[..., Any], target: str, args: Mapping[str, Any], key: str) -> None:
    """Raises BadInput unless `function`, which `target` names, can be called with `args`."""
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise BadInput(key, args, f"what {target} takes ({error})") from None
    except ValueError:  # it has no signature, as some builtins
        pass
