"""The JSON schema ``firstfault.restart/v1`` of a decision whether to restart within an attempt."""

from __future__ import annotations

import json
from typing import Any

from firstfault.model import RestartKind, RestartRecord
from firstfault.text import clean
from firstfault.wire.exceptions import MAX_LINE
from firstfault.wire.verdict_json import format_timestamp, parse_timestamp

__all__ = ["MAX_RESTART_BYTES", "RESTART_SCHEMA", "restart_from_json", "restart_to_json"]

RESTART_SCHEMA = "firstfault.restart/v1"
MAX_RESTART_BYTES = 64 * 1024
_MAX_COUNT = 2**32
_MAX_SECONDS = 100 * 366 * 86_400.0
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a text of another kind raises."""


def restart_to_json(record: RestartRecord) -> bytes:
    """Return the record as one line of ASCII."""
    document = {
        "schema": RESTART_SCHEMA,
        "kind": record.kind.value,
        "number": record.number,
        "headline": clean(record.headline, MAX_LINE),
        "restart": record.restart,
        "reason": clean(record.reason, MAX_LINE),
        "agreed": record.is_agreed,
        "rank": record.rank,
        "node": clean(record.node, MAX_LINE),
        "fingerprint": clean(record.fingerprint, MAX_LINE),
        "category": clean(record.category, MAX_LINE),
        "timestamp": format_timestamp(record.timestamp_ns),
        "lost_seconds": record.lost_seconds,
        "world_size": {"before": record.world_size_before, "after": record.world_size_after},
    }
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def restart_from_json(data: bytes) -> RestartRecord | None:
    """Return the record that `restart_to_json` wrote; None for any other text. Unknown fields are left out."""
    try:
        document = json.loads(data)
        if document["schema"] != RESTART_SCHEMA:
            return None
        sizes = document.get("world_size") or {}
        return RestartRecord(
            kind=RestartKind(document["kind"]),
            number=_number(document["number"]),
            headline=clean(_text(document["headline"]), MAX_LINE),
            restart=_flag(document["restart"]),
            reason=clean(_text(document["reason"]), MAX_LINE),
            is_agreed=_flag(document.get("agreed", True)),
            rank=_count(document.get("rank")),
            node=clean(_text(document.get("node", "")), MAX_LINE),
            fingerprint=clean(_text(document.get("fingerprint", "")), MAX_LINE),
            category=clean(_text(document.get("category", "")), MAX_LINE),
            timestamp_ns=parse_timestamp(document.get("timestamp")),
            lost_seconds=_seconds(document.get("lost_seconds")),
            world_size_before=_count(sizes.get("before")),
            world_size_after=_count(sizes.get("after")),
        )
    except _NOT_OURS:
        return None


def _count(value: Any) -> int | None:
    return None if value is None else _number(value)


def _number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError("expected a whole number from 0 to 2**32")
    return value


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_SECONDS:
        raise ValueError("expected a number of seconds, from 0 to a century")
    return float(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, found {type(value).__name__}")
    return value
