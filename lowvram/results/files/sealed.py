"""Files with their own checksum, so that any damage is noticed. Imports no torch.

The last field of a JSON object is the CRC-32 of the bytes before it, as eight hex digits; the first line of a YAML
file, that of the bytes after it. A file without is accepted unchecked: an early version wrote it, or somebody edited it
and removed the checksum.
"""

from __future__ import annotations

import re
import zlib

FIELD = "crc32"
SEALED = re.compile(r'(\{.*),(\s*)"crc32": "([0-9a-f]{8})"\s*\}\s*', re.DOTALL)


class Damaged(ValueError):
    """The bytes aren't those that were written."""


def sealed(text: str, space: str = " ") -> str:
    """An object's JSON with its checksum.

    Args:
        space: the whitespace before each field.
    """
    front = text.rstrip().removesuffix("}").rstrip()
    return f'{front},{space}"{FIELD}": "{zlib.crc32(front.encode()):08x}"\n}}\n'


def opened(text: str) -> str:
    """The JSON without its checksum.

    Raises:
        Damaged: the checksum doesn't match.
    """
    match = SEALED.fullmatch(text)
    if match is None:
        if f'"{FIELD}"' in text:
            raise Damaged("it is cut off, or its checksum is damaged")
        return text
    if zlib.crc32(match[1].encode()) != int(match[3], 16):
        raise Damaged(f"its bytes don't match its checksum (whoever edits it leaves out {FIELD!r})")
    return match[1] + "}"


def with_comment(text: str) -> str:
    """A YAML file's text with its checksum."""
    return f"# crc32: {zlib.crc32(text.encode()):08x}\n{text}"


def is_changed(text: str) -> bool:
    """Whether a YAML file's text isn't the one that was written. Its checksum may have been removed."""
    return text.startswith("# crc32") and text != with_comment(text.partition("\n")[2])
