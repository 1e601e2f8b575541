"""The JSON schemas ``firstfault.verdict/v1``, for a verdict and a decision, and
``firstfault.restart/v1``, for a restart.

A table lists the keys of each object; it writes, reads and describes the object.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firstfault import model
from firstfault.model import Decision, RestartKind, RestartRecord, Seal, Suspect, Verdict
from firstfault.utils.stored_text import clean
from firstfault.wire.codecs import MAX_LINE_CHARACTERS

SCHEMA = "firstfault.verdict/v1"
RESTART_SCHEMA = "firstfault.restart/v1"
MAX_RESTART_BYTES = 64 * 1024
MAX_RANKS = 100_000
"""Ranks of a verdict, when read."""
MAX_SENTENCES = 1_000
"""Reasons, suspects, victims and notes, each, when read; writers stay far below."""
FOREIGN_TEXT_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""Errors that reading a text of any other format may raise."""
NS_PER_SECOND = 1_000_000_000
MAX_COUNT = 2**32
MAX_LOST_SECONDS = 100 * 366 * 86_400.0


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JsonType:
    """The type of a key's values. Any process may have written them, so reading checks the type."""

    schema: dict[str, Any]
    """In JSON Schema."""
    read: Callable[[Any], Any]
    """Raises one of `FOREIGN_TEXT_ERRORS` for a value of a different type."""
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class JsonField:
    """One key of an object."""

    key: str
    json_type: JsonType
    name: str = ""
    """The model's attribute, or empty if it is the same as the key."""
    is_flat: bool = False
    """Whether the keys of the nested object are attributes of the surrounding model."""
    default: Any = None
    """Its JSON value in documents of earlier versions without the key, or None if no
    version lacked the key.
    """
    meaning: str = ""
    """What the JSON Schema and docs/reference/format.md have about it, or empty if they have
    nothing. ``python tools/describe_fields.py`` writes it there.
    """

    @property
    def schema(self) -> dict[str, Any]:
        """The type and the meaning, in JSON Schema."""
        description = {"description": self.meaning} if self.meaning else {}
        return {**self.json_type.schema, **description}


class JsonObject(JsonType):
    """The type of an object with these keys, which is read into `model`."""

    def __init__(self, model: Callable[..., Any], *fields: JsonField) -> None:
        properties = {field.key: field.schema for field in fields}
        required = [field.key for field in fields if field.default is None]
        schema = {"type": "object", "required": required, "properties": properties}

        def write(value: Any) -> dict[str, Any]:
            return {
                field.key: field.json_type.write(
                    value if field.is_flat else getattr(value, field.name or field.key)
                )
                for field in fields
            }

        def read(json_value: Any) -> Any:
            attributes: dict[str, Any] = {}
            for field in fields:  # keys of a later version are ignored
                value = (
                    json_value[field.key]
                    if field.default is None
                    else json_value.get(field.key, field.default)
                )
                part = field.json_type.read(value)
                attributes |= part if field.is_flat else {field.name or field.key: part}
            return model(**attributes)

        super().__init__(schema, read, write)


def _check_type(json_type: type, value: Any) -> Any:
    if not isinstance(value, json_type):
        raise TypeError(f"expected {json_type.__name__}, found {type(value).__name__}")
    return value


def _check_range(limit: float, value: Any) -> Any:
    if isinstance(value, bool) or not 0 <= value <= limit:
        raise ValueError(f"expected a number from 0 to {limit}")
    return value


def _make_nullable(json_type: JsonType) -> JsonType:
    return JsonType(
        {**json_type.schema, "type": [json_type.schema["type"], "null"]},
        lambda value: None if value is None else json_type.read(value),
        lambda value: None if value is None else json_type.write(value),
    )


def _enum_type(values: type[enum.Enum]) -> JsonType:
    return JsonType({"enum": [value.value for value in values]}, values, lambda value: value.value)


def _list_type(json_type: JsonType, limit: int) -> JsonType:
    """Return the type of a list; reading rejects more than `limit` items."""

    def read(value: Any) -> tuple[Any, ...]:
        if len(_check_type(list, value)) > limit:
            raise ValueError(f"expected a list of at most {limit}")
        return tuple(map(json_type.read, value))

    return JsonType(
        {"type": "array", "items": json_type.schema},
        read,
        lambda items: list(map(json_type.write, items)),
    )


def format_timestamp(timestamp_ns: int | None) -> str | None:
    """Format as RFC 3339 in UTC with nine decimals;
    None for None and for a time beyond the year 9999.
    """
    if timestamp_ns is None:
        return None
    seconds, nanos = divmod(timestamp_ns, NS_PER_SECOND)
    try:
        moment = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(seconds=seconds)
    except OverflowError:
        return None
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"


def parse_timestamp(text: str | None) -> int | None:
    """Parse RFC 3339 to nanoseconds since the Unix epoch; None for None.

    Raises:
        ValueError: `text` isn't RFC 3339.
    """
    if text is None:
        return None
    from google.protobuf.timestamp_pb2 import (  # noqa: PLC0415 - writers of reports don't need it
        Timestamp,
    )

    stamp = Timestamp()
    stamp.FromJsonString(text)
    return stamp.ToNanoseconds()


TEXT = JsonType({"type": "string"}, lambda value: _check_type(str, value))
LINE = JsonType(
    TEXT.schema,
    lambda value: clean(_check_type(str, value), MAX_LINE_CHARACTERS),
    lambda text: clean(text, MAX_LINE_CHARACTERS),
)
FLAG = JsonType({"type": "boolean"}, lambda value: _check_type(bool, value))
COUNT = JsonType(
    {"type": "integer", "minimum": 0},
    lambda value: _check_range(MAX_COUNT, _check_type(int, value)),
)
SECONDS = JsonType(
    {"type": "number", "minimum": 0}, lambda value: float(_check_range(MAX_LOST_SECONDS, value))
)
NULLABLE_TEXT = _make_nullable(TEXT)
NULLABLE_COUNT = _make_nullable(COUNT)
TIME = JsonType({"$ref": "#/$defs/time"}, parse_timestamp, format_timestamp)
SENTENCES = _list_type(TEXT, MAX_SENTENCES)
CONFIDENCE = JsonType({"enum": ["high", "medium", "low"]}, TEXT.read)


# --- verdict and decision -------------------------------------------------------------------------


def _suspect_to_dict(suspect: Suspect) -> dict[str, Any]:
    named = {"rank": suspect.rank, "node": suspect.node}
    return {**{key: value for key, value in named.items() if value is not None}, "why": suspect.why}


def _suspect_from_dict(json_value: dict[str, Any]) -> Suspect:
    rank = NULLABLE_COUNT.read(json_value.get("rank"))
    node = NULLABLE_TEXT.read(json_value.get("node"))
    return Suspect(TEXT.read(json_value["why"]), rank, node)


SUSPECT = JsonType({"type": "object", "required": ["why"]}, _suspect_from_dict, _suspect_to_dict)


def _victims_from_dict(json_value: dict[str, Any]) -> tuple[tuple[int, str], ...]:
    if len(json_value) > MAX_SENTENCES:
        raise ValueError(f"expected lines of at most {MAX_SENTENCES} victims")
    return tuple((COUNT.read(int(rank)), TEXT.read(line)) for rank, line in json_value.items())


VICTIM_LINES = JsonType(
    {"type": "object", "additionalProperties": {"type": "string"}},
    _victims_from_dict,
    lambda lines: {str(rank): line for rank, line in lines},
)
COVERAGE = JsonObject(
    model.Coverage,
    JsonField("expected", NULLABLE_COUNT),
    JsonField("reported", COUNT),
    JsonField("unreadable", COUNT),
    JsonField("complete", FLAG),
    JsonField("notes", SENTENCES),
)
VERDICT = JsonObject(
    Verdict,
    JsonField("scope", _enum_type(model.Scope)),
    JsonField(
        "ranks",
        _list_type(COUNT, MAX_RANKS),
        meaning="Global ranks of the root cause.",
    ),
    JsonField(
        "node",
        NULLABLE_TEXT,
        meaning="Its pod, or its machine without Kubernetes.",
    ),
    JsonField(
        "machine",
        TEXT,
        default="",
        meaning=(
            "Its machine: the name, or the kernel's boot id in a pod that doesn't know the name;"
            " empty: not known."
        ),
    ),
    JsonField(
        "code",
        TEXT,
        meaning="The error code that Flyte shows.",
    ),
    JsonField("category", TEXT),
    JsonField(
        "fingerprint",
        TEXT,
        meaning="Equal for the same fault elsewhere.",
    ),
    JsonField("headline", TEXT),
    JsonField("message", TEXT),
    JsonField("timestamp", TIME, "timestamp_ns"),
    JsonField("strategy", TEXT),
    JsonField(
        "rule",
        TEXT,
        meaning="The strategy's rule that found the root cause; empty: not known.",
    ),
    JsonField("confidence", CONFIDENCE),
    JsonField("why", SENTENCES),
    JsonField("suspects", _list_type(SUSPECT, MAX_SENTENCES)),
    JsonField(
        "victims",
        JsonObject(
            model.Victims, JsonField("count", COUNT), JsonField("ranks", VICTIM_LINES, "by_rank")
        ),
    ),
    JsonField("coverage", COVERAGE),
    JsonField("settled", FLAG),
    JsonField(
        "documents",
        JsonObject(dict, JsonField("digest", TEXT), JsonField("count", COUNT, "document_count")),
        is_flat=True,
    ),
)
DECISION = JsonObject(
    Decision,
    JsonField("retry", FLAG),
    JsonField("kind", _enum_type(model.Kind)),
    JsonField("origin", _enum_type(model.Origin)),
    JsonField("enforced", FLAG),
    JsonField("reason", TEXT),
    JsonField("retries_left", NULLABLE_COUNT),
    JsonField(
        "action",
        _enum_type(model.Action),
        default="",
        meaning=(
            "What a scheduler should do: `retry`; `system`: retry, and don't count it, the"
            " platform is at fault; `stop`: it is proven that it would fail again; `unknown`:"
            " neither is proven. Empty: an older version wrote this."
        ),
    ),
    JsonField(
        "failed_starts",
        COUNT,
        default=0,
        meaning=(
            "Attempts in a row, this one included, that failed before they had trained for a"
            " minute."
        ),
    ),
)


def to_json(verdict: Verdict, decision: Decision) -> str:
    """Return ``{"schema", "verdict", "decision"}`` as one line of JSON."""
    document = {
        "schema": SCHEMA,
        "verdict": verdict_to_dict(verdict),
        "decision": DECISION.write(decision),
    }
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"))


def verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as an object of the schema."""
    written: dict[str, Any] = VERDICT.write(verdict)
    return written


def from_json(text: str) -> tuple[Verdict, Decision] | None:
    """Parse what `to_json` wrote, except the verdict's root; None for any other text."""
    try:
        document = _parse_with_schema(SCHEMA, text)
        return VERDICT.read(document["verdict"]), DECISION.read(document["decision"])
    except FOREIGN_TEXT_ERRORS:
        return None


def restore_seal(name: str, text: str) -> Seal | None:
    """Return the seal in a JSON file that contains nothing else, or None for any other text."""
    if (sealed := from_json(text)) is None:
        return None
    verdict, decision = sealed
    return Seal(
        name=name,
        digest=verdict.digest,
        count=verdict.document_count,
        strategy=verdict.strategy,
        json=text,
        timestamp_ns=verdict.timestamp_ns or 0,
        node=verdict.node or "",
        code=verdict.code,
        message=verdict.message,
        kind=decision.kind,
        origin=decision.origin,
        fault_timestamp_ns=verdict.timestamp_ns,
        worker=verdict.node or "",
    )


def _parse_with_schema(schema: str, text: str | bytes) -> Any:
    document = json.loads(text)
    if document["schema"] != schema:
        raise ValueError("of another schema")
    return document


# --- restarts -------------------------------------------------------------------------------------

WORLD_SIZES = JsonObject(
    dict,
    JsonField("before", NULLABLE_COUNT, "world_size_before"),
    JsonField("after", NULLABLE_COUNT, "world_size_after"),
)
RESTART = JsonObject(
    RestartRecord,
    JsonField(
        "kind",
        _enum_type(RestartKind),
        meaning=(
            "`round`: torch elastic's worker group. `in-process`: the training function, in"
            " processes that live on. `stall`: nothing, the job made no progress"
        ),
    ),
    JsonField(
        "number",
        COUNT,
        meaning="of the round or iteration that failed, from 0",
    ),
    JsonField(
        "headline",
        LINE,
        meaning="the verdict in one line",
    ),
    JsonField(
        "restart",
        FLAG,
        meaning="whether the workers restart; `false`: the attempt ended, or it is a stall",
    ),
    JsonField(
        "reason",
        LINE,
        meaning="of this decision",
    ),
    JsonField(
        "agreed",
        FLAG,
        "is_agreed",
        meaning="`false`: the agents reached no decision, and torch elastic restarted",
    ),
    JsonField(
        "rank",
        NULLABLE_COUNT,
        meaning="of the root cause; `null`: not known",
    ),
    JsonField(
        "node",
        LINE,
        meaning="of the root cause; empty: not known",
    ),
    JsonField(
        "fingerprint",
        LINE,
        meaning="of the root cause; empty: not known",
    ),
    JsonField(
        "category",
        LINE,
        meaning="of the root cause; empty: not known",
    ),
    JsonField(
        "timestamp",
        TIME,
        "timestamp_ns",
        meaning="when the root cause failed, RFC 3339 in UTC",
    ),
    JsonField(
        "lost_seconds",
        _make_nullable(SECONDS),
        meaning=(
            "from then until the worker processes were started again; `null` if they were not,"
            " or not yet. Work since the last checkpoint is not included. Of a stall: how long"
            " it took"
        ),
    ),
    JsonField(
        "world_size",
        WORLD_SIZES,
        is_flat=True,
        meaning='`{"before", "after"}`: ranks',
    ),
)


def restart_to_json(record: RestartRecord) -> bytes:
    """Return the record as one line of ASCII."""
    document = {"schema": RESTART_SCHEMA, **RESTART.write(record)}
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def restart_from_json(data: bytes) -> RestartRecord | None:
    """Parse what `restart_to_json` wrote, ignoring unknown fields; None for any other text."""
    try:
        record: RestartRecord = RESTART.read(_parse_with_schema(RESTART_SCHEMA, data))
    except FOREIGN_TEXT_ERRORS:
        return None
    return record
