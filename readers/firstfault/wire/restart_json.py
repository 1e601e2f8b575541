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

_KIND = "`round`: torch elastic's worker group. `in-process`: the training function, in processes that live on"
_LOST = (
    "from then until the worker processes were started again; `null` if they were not, or not yet. Work since the last "
    "checkpoint is not included"
)

_SIZES = Rows(
    dict, (Row("before", or_null(COUNT), "world_size_before"), Row("after", or_null(COUNT), "world_size_after"))
)
"""Two attributes of the record itself."""

RESTART = Rows(
    RestartRecord,
    (
        Row("kind", one_of(RestartKind), meaning=_KIND),
        Row("number", COUNT, meaning="of the round or iteration that failed, from 0"),
        Row("headline", _LINE, meaning="the verdict in one line"),
        Row("restart", FLAG, meaning="whether the workers restart; `false`: the attempt ended"),
        Row("reason", _LINE, meaning="of this decision"),
        Row("agreed", FLAG, "is_agreed", "`false`: the agents reached no decision, and torch elastic restarted"),
        Row("rank", or_null(COUNT), meaning="of the root cause; `null`: not known"),
        Row("node", _LINE, meaning="of the root cause; empty: not known"),
        Row("fingerprint", _LINE, meaning="of the root cause; empty: not known"),
        Row("category", _LINE, meaning="of the root cause; empty: not known"),
        Row("timestamp", TIME, "timestamp_ns", "when the root cause failed, RFC 3339 in UTC"),
        Row("lost_seconds", or_null(SECONDS), meaning=_LOST),
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
