"""Parts of a model that a user names by pieces of their dotted names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lowvram.config.errors import BadInput

MOST_SHOWN = 24  # names in a message


def is_named(name: str, pieces: Iterable[str]) -> bool:
    """Whether one of the pieces is the dotted name or a run of its words: "blocks.0" and "qkv" are in
    "blocks.0.attention.qkv"."""
    return any(f".{piece}." in f".{name}." for piece in pieces)


def check_matches(key: str, pieces: Iterable[str], names: Collection[str], what: str) -> None:
    """Raise BadInput if a piece matches none of the names. `what` says in the message what has these names."""
    for piece in pieces:
        if not any(is_named(name, [piece]) for name in names):
            raise BadInput(key, piece, f"a name, or a piece of a dotted name, of {what}: {shown_names(names)}")


def shown_names(names: Collection[str]) -> str:
    """Names, shortened for a message: the words between their dots, and one whole name as an example."""
    if not names:
        return "there are none"
    words = list(dict.fromkeys(word for name in names for word in name.split(".") if not word.isdecimal()))
    more = f" and {len(words) - MOST_SHOWN} more" if len(words) > MOST_SHOWN else ""
    return f"there are {', '.join(words[:MOST_SHOWN])}{more}, as in {next(iter(names))}"
