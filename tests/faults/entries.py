"""Other ways into lowvram than `train.py`, as programs: `@load FOLDER`, `@table FOLDER`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence


def load(words: Sequence[str]) -> int:
    """Print what `lowvram.export.load` makes of a folder: its class and a hash of its weights."""
    from lowvram.config.errors import BadInput
    from lowvram.export.folder import load

    try:
        model = load(words[0])
    except BadInput as error:
        print(error)
        return 3
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    print(type(model).__name__, digest.hexdigest())
    return 0


def table(words: Sequence[str]) -> int:
    """`python -m lowvram.table FOLDER`"""
    from lowvram.cli.streams import protect_streams
    from lowvram.results.table import main

    protect_streams()
    return main(words)


def train(words: Sequence[str]) -> int:
    """`python train.py …`; ends the process."""
    from lowvram.cli import start

    sys.argv[1:] = words
    start.main()
    return 0


ENTRIES: dict[str, Callable[[Sequence[str]], int]] = {"@load": load, "@table": table}


def enter(words: Sequence[str]) -> int:
    """Run a program; the exit code, unless it ends the process itself."""
    return ENTRIES[words[0]](words[1:]) if words and words[0] in ENTRIES else train(words)
