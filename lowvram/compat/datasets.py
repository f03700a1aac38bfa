"""Private names of Hugging Face's datasets."""

from __future__ import annotations

from typing import Any


def fingerprint(dataset: Any) -> str:
    """A hash of a dataset's files and of the transformations applied to them.

    datasets.Dataset._fingerprint, since 1.0: `datasets` itself names its cached results by it. Replaced by a public
    name, if `datasets` makes one.
    """
    return dataset._fingerprint


def image_endings() -> list[str]:
    """The file extensions, in lower case and with the dot, that load_dataset("imagefolder") treats as images.

    datasets.packaged_modules.imagefolder, since 2.0, with this name since 2.5: the public documentation
    has no list. Replaced by one, if `datasets` makes it.
    """
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    return ImageFolder.EXTENSIONS
