"""`export.json` in an exported folder: it names the format, where that isn't safetensors. Imports no torch."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowvram.config.errors import BadInput
from lowvram.results import row as rows
from lowvram.results.files.regular import SHORT_BYTES, read_regular
from lowvram.results.terminal import hydra_quoted, shown_path

ABOUT = "export.json"


def check_safetensors(folder: Path, name: str, typed: str) -> None:
    """Raises BadInput if a model's folder holds an export from which nothing can train on.

    Args:
        name: the key under which the folder, or that of its run, was typed.
        typed: what was typed.
    """
    if not (folder / ABOUT).is_file():
        return
    about: Any = None
    with suppress(OSError, ValueError, RecursionError):
        about = json.loads(read_regular(folder / ABOUT, SHORT_BYTES))
    which = (
        f"export of format {about['format']}"
        if isinstance(about, dict) and "format" in about
        else "export of another format"
    )
    is_run = rows.read(folder.parent) is not None
    resume = shlex.quote(f"resume={hydra_quoted(shown_path(folder.parent))}") if is_run else "resume=RUN"
    again = f"it holds an {which}; write its run again with {resume} export.format=safetensors"
    raise BadInput(name, typed, f"the folder of a model in safetensors: {again}")
