"""Packs what nodes wrote for the store: reports on the way to the leader, a verdict on the way back."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from firstfault.errors import BadDocumentError
from firstfault.wire.documents import pack, pack_within, unpack
from firstfault_torch.guard import logger

_DOCUMENT = "error.pb"
_DURABLE = "durable"
_BUNDLE = "bundle"
_FRAME = struct.Struct(">II")
"""Group rank and length, before each bundle."""
_MAX_VALUE = 4 * 1024 * 1024
"""Bytes that an agent hands over at once; torch's store refuses 8 MiB. What does not fit is read from the storage."""
_MAX_SENT = 256 * 1024 * 1024
"""Bytes of all agents together, which may hand over and ask at the same moment."""


class ElectedVerdict(NamedTuple):
    """The sealed verdict, as its agent hands it to the others."""

    document: bytes
    """The ``error.pb``."""
    durable: bool
    """Whether it is in the storage."""
    bundle: bytes = b""
    """Copies of what all nodes wrote, if they share no folder."""


def packed_for(nodes: int, copies: Mapping[str, bytes], first: Mapping[str, bytes] | None = None) -> bytes:
    """Return files, without the largest if they are too large to be handed over; `first`: to keep before others."""
    by_size = dict(sorted(copies.items(), key=lambda item: len(item[1])))
    return pack_within({**(first or {}), **by_size}, min(_MAX_VALUE, _MAX_SENT // nodes))


def _framed(group_rank: int, nodes: int, copies: Mapping[str, bytes]) -> bytes:
    """Return one node's files."""
    bundle = packed_for(nodes, copies)
    return _FRAME.pack(group_rank, len(bundle)) + bundle


def _frames(value: bytes) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield each node's files."""
    start = 0
    while start + _FRAME.size <= len(value):
        group_rank, length = _FRAME.unpack_from(value, start)
        start += _FRAME.size
        try:
            yield group_rank, unpack(value[start : start + length])
        except BadDocumentError as error:
            logger.warning("the report of node %d cannot be read: %s", group_rank, error)
        start += length


def _packed(settled: ElectedVerdict) -> bytes:
    durable = b"1" if settled.durable else b""
    return pack({_DOCUMENT: settled.document, _DURABLE: durable, _BUNDLE: settled.bundle})


def _unpacked(value: bytes) -> ElectedVerdict:
    files = unpack(value)
    return ElectedVerdict(files[_DOCUMENT], bool(files[_DURABLE]), files.get(_BUNDLE, b""))
