"""Reads the records of restarts within an attempt."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from firstfault.errors import StoreError
from firstfault.layout.paths import join_name
from firstfault.store import join
from firstfault.sync import gathered
from firstfault.wire.restart_json import MAX_RESTART_BYTES, restart_from_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from firstfault.model import RestartKind, RestartRecord
    from firstfault.store import ObjectInfo, ReadableStore

__all__ = ["oldest_first", "read_restarts"]

logger = logging.getLogger(__name__)

_MOST = 64
"""Of many records, so many are read: the last ones by name."""


async def read_restarts(store: ReadableStore, folder: str, names: Sequence[ObjectInfo]) -> tuple[RestartRecord, ...]:
    """Return the records that can be read, one for each restart, oldest first.

    Args:
        store: the store of the layout's root.
        folder: of the roster.
        names: of the records, as listed.
    """

    async def read(item: ObjectInfo) -> RestartRecord | None:
        path = join_name(folder, item.name)
        try:
            record = restart_from_json(await store.get(path, limit=MAX_RESTART_BYTES))
        except StoreError as error:
            logger.warning("the record of a restart cannot be read: %s", error)
            return None
        if record is None:
            logger.warning(
                "%s is no record of a restart, or of a version that this one does not know", join(store.uri, path)
            )
        return record

    last = sorted(names, key=lambda item: item.name)[-_MOST:]
    found = await gathered(*(read(item) for item in last))
    return oldest_first(record for record in found if record is not None)


def oldest_first(records: Iterable[RestartRecord]) -> tuple[RestartRecord, ...]:
    """Return one record of each restart: if several nodes wrote one, that of the agents' common decision."""
    best: dict[tuple[RestartKind, int], RestartRecord] = {}
    for record in records:
        key = (record.kind, record.number)
        if key not in best or _known(record) > _known(best[key]):
            best[key] = record
    return tuple(sorted(best.values(), key=lambda item: (item.timestamp_ns or 0, item.kind.value, item.number)))


def _known(record: RestartRecord) -> tuple[bool, bool]:
    return record.is_agreed, record.lost_seconds is not None
