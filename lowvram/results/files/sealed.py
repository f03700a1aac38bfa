"""JSON files with a checksum of themselves, so that damage is seen wherever it is. Imports no torch.

The last field of the object is the CRC-32 of the bytes in front of it, as eight hex digits. A file without one counts
as it is: an early version has written it, or somebody's own hand, who leaves the field out.
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
        space: what stands in front of each field.
    """
    front = text.rstrip().removesuffix("}").rstrip()
    return f'{front},{space}"{FIELD}": "{zlib.crc32(front.encode()):08x}"\n}}\n'


def opened(text: str) -> str:
    """The JSON without its checksum.

    Raises:
        Damaged: it doesn't match.
    """
    match = SEALED.fullmatch(text)
    if match is None:
        if f'"{FIELD}"' in text:
            raise Damaged("it is cut off, or its checksum is damaged")
        return text
    if zlib.crc32(match[1].encode()) != int(match[3], 16):
        raise Damaged(f"its bytes don't match its checksum (whoever edits it leaves out {FIELD!r})")
    return match[1] + "}"
