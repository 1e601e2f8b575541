"""The JSON schema ``firstfault.restart/v1`` of a decision whether to restart within an attempt."""

from __future__ import annotations

import json
from typing import Any

from firstfault.model import RestartKind, RestartRecord
from firstfault.text import clean
from firstfault.wire.forms import MAX_LINE
from firstfault.wire.json_table import (
    COUNT,
    FLAG,
    NOT_OURS,
    SECONDS,
    TEXT,
    TIME,
    Row,
    Rows,
    limited,
    one_of,
    or_null,
)

RESTART_SCHEMA = "firstfault.restart/v1"
MAX_RESTART_BYTES = 64 * 1024

_LINE = limited(TEXT, lambda text: clean(text, MAX_LINE))

_SIZES = Rows(
    dict, (Row("before", or_null(COUNT), "world_size_before"), Row("after", or_null(COUNT), "world_size_after"))
)
"""Two attributes of the record itself."""

RESTART = Rows(
    RestartRecord,
    (
        Row("kind", one_of(RestartKind)),
        Row("number", COUNT),
        Row("headline", _LINE),
        Row("restart", FLAG),
        Row("reason", _LINE),
        Row("agreed", FLAG, "is_agreed"),
        Row("rank", or_null(COUNT)),
        Row("node", _LINE),
        Row("fingerprint", _LINE),
        Row("category", _LINE),
        Row("timestamp", TIME, "timestamp_ns"),
        Row("lost_seconds", or_null(SECONDS)),
    ),
)
"""Without `world_size`, which is last."""


def restart_to_json(record: RestartRecord) -> bytes:
    """Return the record as one line of ASCII."""
    document: dict[str, Any] = {"schema": RESTART_SCHEMA, **RESTART.write(record), "world_size": _SIZES.write(record)}
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def restart_from_json(data: bytes) -> RestartRecord | None:
    """Return the record that `restart_to_json` wrote; None for any other text. Unknown fields are left out."""
    try:
        document = json.loads(data)
        if document["schema"] != RESTART_SCHEMA:
            return None
        return RestartRecord(**RESTART.values(document), **_SIZES.values(document["world_size"]))
    except NOT_OURS:
        return None
