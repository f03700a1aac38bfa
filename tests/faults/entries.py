"""Other ways into lowvram than `train.py`, as programs: `@load FOLDER [FORMAT]`, `@table FOLDER`, `@report FOLDER`; and
what makes a user's images: `@pictures FOLDER`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def load(words: Sequence[str]) -> int:
    """Print what `lowvram.loops.export.load` makes of a folder: its class and a hash of its weights; words
    after the folder are formats of graphs that are trusted."""
    from lowvram.config.errors import BadInput
    from lowvram.loops.export.folder import load

    try:
        model = load(words[0], trust=words[1:])
    except BadInput as error:
        print(error)
        return 3
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.dequantize() if hasattr(tensor, "qdata") else tensor
        digest.update(name.encode() + plain.detach().contiguous().numpy().tobytes())
    print(type(model).__name__, digest.hexdigest())
    return 0


def table(words: Sequence[str]) -> int:
    """`python -m lowvram.table FOLDER`"""
    from lowvram.launch.streams import protect_streams
    from lowvram.results.table import main

    protect_streams()
    return main(words)


def report(words: Sequence[str]) -> int:
    """`python -m lowvram.report FOLDER`"""
    from lowvram.launch.streams import protect_streams
    from lowvram.results.report.report import main

    protect_streams()
    return main(words)


def pictures(words: Sequence[str]) -> int:
    """Draw images of three classes, some in shades of grey."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(24):
        folder = Path(words[0]) / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 80, (10, 9 + number % 2, 3), dtype=np.uint8) + 80 * (number % 3)
        image = Image.fromarray(pixels.astype(np.uint8))
        (image.convert("L") if number == 5 else image).save(folder / f"{number}.png")
    return 0


def train(words: Sequence[str]) -> int:
    """`python train.py …`; ends the process."""
    from lowvram.cli import start

    sys.argv[1:] = words
    start.main()
    return 0


ENTRIES: dict[str, Callable[[Sequence[str]], int]] = {
    "@load": load,
    "@table": table,
    "@report": report,
    "@pictures": pictures,
}


def enter(words: Sequence[str]) -> int:
    """Run a program; the exit code, unless it ends the process itself."""
    return ENTRIES[words[0]](words[1:]) if words and words[0] in ENTRIES else train(words)
