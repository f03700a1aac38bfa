"""data=imagefolder: which images there are, and which of them can be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lowvram.compat.datasets import image_endings
from lowvram.config.errors import BadInput, require
from lowvram.data.image_checks import HINT
from lowvram.data.local import check_no_hop, escaped, existing_path, visible_entries

EVAL_FOLDERS = ("validation", "val", "eval", "test")  # beside train/; the first that exists counts


class ClassFolder(NamedTuple):
    """A folder with the images of a class."""

    path: Path
    images: list[Path]
    skipped: list[Path]  # other files

    def patterns(self) -> list[str]:
        """Patterns that match the images."""
        return escaped(self.images) if self.skipped else [f"{folder}/*" for folder in escaped([self.path])]


# The files of a class folder -> what is wrong with each as an image; None: nothing
Faults = Callable[[Sequence[Path]], Sequence[str | None]]


def class_folders(path: str, skip_unreadable: bool, faults: Faults) -> dict[str, list[ClassFolder]]:
    """The class folders below `path`, by split: "train", and "test" if there is a folder to evaluate on.

    Raises:
        BadInput: a folder or file can't be used.
    """
    root = existing_path(path)
    require(root.is_dir(), "data.path", path, "a folder with a folder of images per class")
    has_splits = (root / "train").is_dir() and bool(subfolders(path, root / "train"))
    eval_folder = next((root / name for name in EVAL_FOLDERS if has_splits and (root / name).is_dir()), None)
    folders = {"train": read_folders(path, root / "train" if has_splits else root, skip_unreadable, faults)}
    if eval_folder is not None:
        folders["test"] = read_folders(path, eval_folder, skip_unreadable, faults)
        names = [{folder.path.name for folder in folders[split]} for split in ("test", "train")]
        unknown = names[0] - names[1]
        allowed = f"without classes that only {eval_folder.name}/ has: {', '.join(sorted(unknown))}"
        require(not unknown, "data.path", path, allowed)
    allowed = "a folder with a folder of images for each of 2 or more classes"
    require(len(folders["train"]) >= 2, "data.path", path, allowed)
    return folders


def read_folders(path: str, root: Path, skip_unreadable: bool, faults: Faults) -> list[ClassFolder]:
    """The class folders of `root`, after a look at every image in them."""
    folders = [read_folder(path, folder, skip_unreadable, faults) for folder in subfolders(path, root)]
    for folder in folders:
        require(bool(folder.images), "data.path", path, f"without empty class folders: {folder.path} holds no image")
    return folders


def read_folder(path: str, folder: Path, skip_unreadable: bool, faults: Faults) -> ClassFolder:
    """Sort the files of a class folder into images and others."""
    found = ClassFolder(folder, [], [])
    files = visible_entries(path, folder)
    for file in files:
        check_name(path, file)
    for file, reason in zip(files, faults(files), strict=True):
        fault = fault_as_image(file, reason)
        if fault and not (fault.is_other_file or skip_unreadable):
            raise BadInput("data.path", path, fault.sentence)
        (found.skipped if fault else found.images).append(file)
    return found


class Fault(NamedTuple):
    """Why a file can't be used."""

    sentence: str
    is_other_file: bool = False  # by its name and its contents it is no image


def fault_as_image(file: Path, reason: str | None) -> Fault | None:
    """What is wrong with a file as an image of a kind that `datasets` lists; None: nothing.

    Args:
        reason: why it can't be read as an image; None: it can.
    """
    is_named_so = file.suffix.lower() in image_endings()
    if file.exists() and not file.is_file():
        return Fault(f"a folder whose class folders hold files only: {file} is something else")
    if reason is not None:
        return Fault(f"made of images: {file} can't be read as one ({reason}): {HINT}", not is_named_so)
    return None if is_named_so else Fault(f"made of images with the usual endings: rename {file}")


def check_name(path: str, file: Path) -> None:
    """Raises BadInput, naming the file, where `datasets` can't keep its name."""
    try:
        str(file.absolute()).encode()
    except UnicodeEncodeError:
        shown = str(file).encode(errors="backslashreplace").decode()
        raise BadInput("data.path", path, f"a folder in which all names are UTF-8: rename {shown}") from None
    check_no_hop("data.path", path, file)


def skipped_files(folders: dict[str, list[ClassFolder]]) -> str:
    """A note for the log on files that aren't used."""
    skipped = [file for inner in folders.values() for folder in inner for file in folder.skipped]
    return f"; files that are no images are skipped: {len(skipped)}, such as {min(skipped)}" if skipped else ""


def external_links(folders: dict[str, list[ClassFolder]]) -> str:
    """A note for the log on links that lead out of their class folders: their images are read like all others."""
    links = [
        (link, link.resolve())
        for folder in (folder for inner in folders.values() for folder in inner)
        for link in folder.images
        if link.is_symlink() and not link.resolve().is_relative_to(folder.path.resolve())
    ]
    if not links:
        return ""
    link, target = min(links)
    return f"; links that lead out of their class folders are followed: {len(links)}, such as {link} to {target}"


def subfolders(path: str, root: Path) -> list[Path]:
    """The folders directly below, sorted, without hidden ones."""
    return [entry for entry in visible_entries(path, root) if entry.is_dir()]
