"""Private names of Hugging Face's datasets."""

from __future__ import annotations

from tests.compat.sentences import needed


@needed("datasets.Dataset._fingerprint", by="the cache of tokens")
def test_a_fingerprint_changes_with_the_data() -> None:
    from datasets import Dataset

    from lowvram.compat.datasets import fingerprint

    dataset = Dataset.from_dict({"text": ["a", "b"]})
    assert fingerprint(dataset) == fingerprint(dataset)
    assert len(fingerprint(dataset)) >= 8
    assert fingerprint(dataset.select([1])) != fingerprint(dataset)
    assert fingerprint(dataset.select([1], new_fingerprint="0123456789abcdef")) == "0123456789abcdef"


@needed("datasets.packaged_modules.imagefolder", by="data=imagefolder")
def test_endings_of_images_are_known() -> None:
    from lowvram.compat.datasets import image_endings

    assert {".png", ".jpg", ".jpeg", ".webp"} <= set(image_endings())
    assert all(ending.startswith(".") and ending == ending.lower() for ending in image_endings())
    assert ".txt" not in image_endings()
