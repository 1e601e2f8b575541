"""The JSON schemas of a verdict and a decision, ``firstfault.verdict/v1``, and of a restart, ``firstfault.restart/v1``.

Each object is a table of its keys, which writes, reads and describes it.
"""

from __future__ import annotations

import datetime as dt
import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firstfault import model
from firstfault.model import Decision, RestartKind, RestartRecord, Suspect, Verdict
from firstfault.text import clean
from firstfault.wire.forms import MAX_LINE

SCHEMA = "firstfault.verdict/v1"
RESTART_SCHEMA = "firstfault.restart/v1"
MAX_RESTART_BYTES = 64 * 1024
MAX_RANKS = 100_000
"""Ranks of a verdict that is read."""
MAX_SENTENCES = 1_000
"""Reasons, suspects, victims and notes that are read, each; writers have far fewer."""
_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a text of another kind raises."""
_NANO = 1_000_000_000
_MAX_COUNT = 2**32
_MAX_SECONDS = 100 * 366 * 86_400.0


# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a key. They may come from any writer, and what is drawn must have its type."""

    schema: dict[str, Any]
    """As JSON Schema has it."""
    read: Callable[[Any], Any]
    """Raises one of `_NOT_OURS` for a value of another type."""
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Row:
    """A key of an object."""

    key: str
    kind: Kind
    name: str = ""
    """Of the model's attribute; empty: the key's."""
    meaning: str = ""
    """For the schema, and for docs/format.md."""
    is_flat: bool = False
    """Whether the keys of its object are attributes of the model around it."""


class Rows(Kind):
    """The keys of an object, which is read into a model."""

    def __init__(self, model: Callable[..., Any], *rows: Row) -> None:
        described = {row.key: row.kind.schema | ({"description": row.meaning} if row.meaning else {}) for row in rows}
        schema = {"type": "object", "required": [row.key for row in rows], "properties": described}

        def write(value: Any) -> dict[str, Any]:
            return {
                row.key: row.kind.write(value if row.is_flat else getattr(value, row.name or row.key)) for row in rows
            }

        def read(found: Any) -> Any:
            attributes: dict[str, Any] = {}
            for row in rows:  # keys that this version does not know are left out
                part = row.kind.read(found[row.key])
                attributes |= part if row.is_flat else {row.name or row.key: part}
            return model(**attributes)

        super().__init__(schema, read, write)


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _between(most: float, value: Any) -> Any:
    if isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"expected a number from 0 to {most}")
    return value


def _or_null(kind: Kind) -> Kind:
    return Kind(
        {**kind.schema, "type": [kind.schema["type"], "null"]},
        lambda value: None if value is None else kind.read(value),
        lambda value: None if value is None else kind.write(value),
    )


def _one_of(values: type[enum.Enum]) -> Kind:
    return Kind({"enum": [value.value for value in values]}, values, lambda value: value.value)


def _list_of(kind: Kind, most: int) -> Kind:
    """Return the kind of a list; a longer one is not ours."""

    def read(value: Any) -> tuple[Any, ...]:
        if len(_checked(list, value)) > most:
            raise ValueError(f"expected a list of at most {most}")
        return tuple(map(kind.read, value))

    return Kind({"type": "array", "items": kind.schema}, read, lambda items: list(map(kind.write, items)))


def format_timestamp(timestamp_ns: int | None) -> str | None:
    """Return RFC 3339 in UTC with nine decimals; None for None, and for a time that no calendar has."""
    if timestamp_ns is None:
        return None
    seconds, nanos = divmod(timestamp_ns, _NANO)
    try:
        moment = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(seconds=seconds)
    except OverflowError:
        return None
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"


def parse_timestamp(text: str | None) -> int | None:
    """Return nanoseconds since the Unix epoch; None for None.

    Raises:
        ValueError: `text` is not RFC 3339.
    """
    if text is None:
        return None
    from google.protobuf.timestamp_pb2 import Timestamp  # noqa: PLC0415 - who only writes reports need not load it

    stamp = Timestamp()
    stamp.FromJsonString(text)
    return stamp.ToNanoseconds()


_TEXT = Kind({"type": "string"}, lambda value: _checked(str, value))
_LINE = Kind(_TEXT.schema, lambda value: clean(_checked(str, value), MAX_LINE), lambda text: clean(text, MAX_LINE))
_FLAG = Kind({"type": "boolean"}, lambda value: _checked(bool, value))
_COUNT = Kind({"type": "integer", "minimum": 0}, lambda value: _between(_MAX_COUNT, _checked(int, value)))
_SECONDS = Kind({"type": "number", "minimum": 0}, lambda value: float(_between(_MAX_SECONDS, value)))
_TIME = Kind({"$ref": "#/$defs/time"}, parse_timestamp, format_timestamp)
_SENTENCES = _list_of(_TEXT, MAX_SENTENCES)
_CONFIDENCE = Kind({"enum": ["high", "medium", "low"]}, _TEXT.read)


# --- verdict and decision -------------------------------------------------------------------------------------------


def _suspect_to_dict(suspect: Suspect) -> dict[str, Any]:
    named = {"rank": suspect.rank, "node": suspect.node}
    return {**{key: value for key, value in named.items() if value is not None}, "why": suspect.why}


def _suspect_from_dict(found: dict[str, Any]) -> Suspect:
    rank, node = (_or_null(kind).read(found.get(key)) for key, kind in (("rank", _COUNT), ("node", _TEXT)))
    return Suspect(_TEXT.read(found["why"]), rank, node)


_SUSPECT = Kind({"type": "object", "required": ["why"]}, _suspect_from_dict, _suspect_to_dict)


def _victims_from_dict(found: dict[str, Any]) -> tuple[tuple[int, str], ...]:
    if len(found) > MAX_SENTENCES:
        raise ValueError(f"expected lines of at most {MAX_SENTENCES} victims")
    return tuple((_COUNT.read(int(rank)), _TEXT.read(line)) for rank, line in found.items())


_LINES = Kind(
    {"type": "object", "additionalProperties": {"type": "string"}},
    _victims_from_dict,
    lambda lines: {str(rank): line for rank, line in lines},
)
_COVERAGE = Rows(
    model.Coverage,
    Row("expected", _or_null(_COUNT)),
    Row("reported", _COUNT),
    Row("unreadable", _COUNT),
    Row("complete", _FLAG),
    Row("notes", _SENTENCES),
)
VERDICT = Rows(
    Verdict,
    Row("scope", _one_of(model.Scope)),
    Row("ranks", _list_of(_COUNT, MAX_RANKS), meaning="Global ranks of the root cause."),
    Row("node", _or_null(_TEXT), meaning="Its pod, or its machine without Kubernetes."),
    Row("code", _TEXT, meaning="The error code that Flyte shows."),
    Row("category", _TEXT),
    Row("fingerprint", _TEXT, meaning="Equal for the same fault elsewhere."),
    Row("headline", _TEXT),
    Row("message", _TEXT),
    Row("timestamp", _TIME, "timestamp_ns"),
    Row("strategy", _TEXT),
    Row("rule", _TEXT, meaning="The strategy's rule that found the root cause; empty: not known."),
    Row("confidence", _CONFIDENCE),
    Row("why", _SENTENCES),
    Row("suspects", _list_of(_SUSPECT, MAX_SENTENCES)),
    Row("victims", Rows(model.Victims, Row("count", _COUNT), Row("ranks", _LINES, "by_rank"))),
    Row("coverage", _COVERAGE),
    Row("settled", _FLAG),
    Row("documents", Rows(dict, Row("digest", _TEXT), Row("count", _COUNT, "document_count")), is_flat=True),
)
DECISION = Rows(
    Decision,
    Row("retry", _FLAG),
    Row("kind", _one_of(model.Kind)),
    Row("origin", _one_of(model.Origin)),
    Row("enforced", _FLAG),
    Row("reason", _TEXT),
    Row("retries_left", _or_null(_COUNT)),
)


def to_json(verdict: Verdict, decision: Decision) -> str:
    """Return ``{"schema", "verdict", "decision"}`` as one line."""
    document = {"schema": SCHEMA, "verdict": verdict_to_dict(verdict), "decision": DECISION.write(decision)}
    return json.dumps(document, ensure_ascii=True, separators=(",", ":"))


def verdict_to_dict(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as an object of the schema."""
    written: dict[str, Any] = VERDICT.write(verdict)
    return written


def from_json(text: str) -> tuple[Verdict, Decision] | None:
    """Return the verdict, without its root, and the decision that `to_json` wrote; None for any other text."""
    try:
        document = _of_schema(SCHEMA, text)
        return VERDICT.read(document["verdict"]), DECISION.read(document["decision"])
    except _NOT_OURS:
        return None


def _of_schema(schema: str, text: str | bytes) -> Any:
    document = json.loads(text)
    if document["schema"] != schema:
        raise ValueError("of another schema")
    return document


# --- restarts -------------------------------------------------------------------------------------------------------

_KIND = (
    "`round`: torch elastic's worker group. `in-process`: the training function, in processes that live on. `stall`: "
    "nothing; the job stood still"
)
_LOST = (
    "from then until the worker processes were started again; `null` if they were not, or not yet. Work since the last "
    "checkpoint is not included. Of a stall: how long it took"
)
_SIZES = Rows(
    dict, Row("before", _or_null(_COUNT), "world_size_before"), Row("after", _or_null(_COUNT), "world_size_after")
)
RESTART = Rows(
    RestartRecord,
    Row("kind", _one_of(RestartKind), meaning=_KIND),
    Row("number", _COUNT, meaning="of the round or iteration that failed, from 0"),
    Row("headline", _LINE, meaning="the verdict in one line"),
    Row("restart", _FLAG, meaning="whether the workers restart; `false`: the attempt ended, or it is a stall"),
    Row("reason", _LINE, meaning="of this decision"),
    Row("agreed", _FLAG, "is_agreed", "`false`: the agents reached no decision, and torch elastic restarted"),
    Row("rank", _or_null(_COUNT), meaning="of the root cause; `null`: not known"),
    Row("node", _LINE, meaning="of the root cause; empty: not known"),
    Row("fingerprint", _LINE, meaning="of the root cause; empty: not known"),
    Row("category", _LINE, meaning="of the root cause; empty: not known"),
    Row("timestamp", _TIME, "timestamp_ns", "when the root cause failed, RFC 3339 in UTC"),
    Row("lost_seconds", _or_null(_SECONDS), meaning=_LOST),
    Row("world_size", _SIZES, meaning='`{"before", "after"}`: ranks', is_flat=True),
)


def restart_to_json(record: RestartRecord) -> bytes:
    """Return the record as one line of ASCII."""
    document = {"schema": RESTART_SCHEMA, **RESTART.write(record)}
    return json.dumps(document, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def restart_from_json(data: bytes) -> RestartRecord | None:
    """Return the record that `restart_to_json` wrote; None for any other text. Unknown fields are left out."""
    try:
        record: RestartRecord = RESTART.read(_of_schema(RESTART_SCHEMA, data))
    except _NOT_OURS:
        return None
    return record
