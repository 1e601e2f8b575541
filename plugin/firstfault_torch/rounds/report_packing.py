"""Packs files for the round's store: each node's report for the leader,
and the leader's verdict.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from firstfault.errors import BadDocumentError
from firstfault.wire.documents import pack, pack_within, unpack
from firstfault_torch.guard import logger

DOCUMENT_FILE = "error.pb"
DURABLE_FILE = "durable"
BUNDLE_FILE = "bundle"
FRAME_HEADER = struct.Struct(">II")
"""Group rank and length, before each bundle."""
MAX_REPORT_BYTES = 4 * 1024 * 1024
"""For one agent; torch's store rejects 8 MiB. Files that don't fit are read from the storage."""
MAX_ALL_REPORTS_BYTES = 256 * 1024 * 1024
"""For all agents together, which may write and read at the same moment."""


class ElectedVerdict(NamedTuple):
    """The sealed verdict, as the leader sends it to its peers."""

    document: bytes
    """The ``error.pb``."""
    durable: bool
    """Whether it is in the storage."""
    bundle: bytes = b""
    """Copies of all nodes' files, if the nodes have no shared folder."""


def pack_copies(
    nodes: int, copies: Mapping[str, bytes], first: Mapping[str, bytes] | None = None
) -> bytes:
    """Pack files, dropping the largest ones above the limits; those in `first` have priority."""
    by_size = dict(sorted(copies.items(), key=lambda item: len(item[1])))
    return pack_within(
        {**(first or {}), **by_size}, min(MAX_REPORT_BYTES, MAX_ALL_REPORTS_BYTES // nodes)
    )


def frame_report(group_rank: int, nodes: int, copies: Mapping[str, bytes]) -> bytes:
    """Pack one node's files with a header."""
    bundle = pack_copies(nodes, copies)
    return FRAME_HEADER.pack(group_rank, len(bundle)) + bundle


def parse_frames(value: bytes) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield each node's group rank and files."""
    start = 0
    while start + FRAME_HEADER.size <= len(value):
        group_rank, length = FRAME_HEADER.unpack_from(value, start)
        start += FRAME_HEADER.size
        try:
            yield group_rank, unpack(value[start : start + length])
        except BadDocumentError as error:
            logger.warning("can't read the report of node %d: %s", group_rank, error)
        start += length


def pack_verdict(elected: ElectedVerdict) -> bytes:
    """Pack a verdict for the store."""
    durable = b"1" if elected.durable else b""
    return pack(
        {DOCUMENT_FILE: elected.document, DURABLE_FILE: durable, BUNDLE_FILE: elected.bundle}
    )


def unpack_verdict(value: bytes) -> ElectedVerdict:
    """Unpack what `pack_verdict` packed."""
    files = unpack(value)
    return ElectedVerdict(
        files[DOCUMENT_FILE], bool(files[DURABLE_FILE]), files.get(BUNDLE_FILE, b"")
    )
