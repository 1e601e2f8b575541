"""Several files as one compressed value: what the agents of a round hand to the one that concludes for all."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING

from firstfault.errors import BadDocumentError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LEVEL = 3
_MAX_BYTES = 64 * 1024 * 1024
"""Largest content that a reader unpacks."""

_MAX_INDEX_BYTES = 4 * 1024 * 1024


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return files, by path, as one value."""
    index = json.dumps([[path, len(data)] for path, data in files.items()], separators=(",", ":"))
    return zlib.compress(b"".join([index.encode(), b"\n", *files.values()]), _LEVEL)


def unpack(value: bytes) -> dict[str, bytes]:
    """Return the files of a value that `pack` made.

    Raises:
        BadDocumentError: it is something else, damaged, or larger than 64 MiB.
    """
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(value, _MAX_BYTES)
    except zlib.error as error:
        raise BadDocumentError(f"not a bundle of files: {error}") from error
    start = content.find(b"\n", 0, _MAX_INDEX_BYTES) + 1
    if not start:
        raise BadDocumentError("a bundle of files has too long an index")
    files = {}
    try:
        for path, size in json.loads(content[: start - 1]):
            end = start + _size(size, len(content) - start)
            files[str(path)] = content[start:end]
            start = end
    except (ValueError, TypeError, RecursionError) as error:
        raise BadDocumentError(f"not a bundle of files: {error}") from error
    if not decompressor.eof or start != len(content):
        raise BadDocumentError("a bundle of files is damaged: its index does not match its content")
    return files


def _size(value: object, left: int) -> int:
    # a negative size would let one file be taken again and again
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= left:
        raise ValueError("a file in it has an impossible size")
    return value
