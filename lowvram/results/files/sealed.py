"""JSON files with their own checksum, so that any damage is noticed. Imports no torch.

The last field of the object is the CRC-32 of the bytes before it, as eight hex digits. A file without it is accepted
unchecked: an early version wrote it, or somebody edited it and removed the field.
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
