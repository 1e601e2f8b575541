"""How objects of a JSON schema are written, checked and read: rows of key, attribute and kind."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import enum
    from collections.abc import Callable

NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What a text of another kind raises."""
_NANO = 1_000_000_000
_MAX_COUNT = 2**32
_MAX_SECONDS = 100 * 366 * 86_400.0
_RFC3339 = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


@dataclass(frozen=True, slots=True)
class Kind:
    """The values of a key. They may come from any writer, and what is drawn must have its type."""

    schema: dict[str, Any]
    """As JSON Schema has it."""
    read: Callable[[Any], Any]
    """Raises one of `NOT_OURS` for a value of another type."""
    write: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True, slots=True)
class Row:
    """A key of an object."""

    key: str
    kind: Kind
    name: str = ""
    """Of the model's attribute; empty: the key's."""
    meaning: str = ""
    """For the schema."""


@dataclass(frozen=True)
class Rows:
    """The keys of an object and the model that it is read into; the whole object is the form of a key, too."""

    model: Callable[..., Any]
    rows: tuple[Row, ...]

    def write(self, value: Any) -> dict[str, Any]:
        """Return the object, of the attributes of `value`."""
        return {row.key: row.kind.write(getattr(value, row.name or row.key)) for row in self.rows}

    def values(self, found: Any) -> dict[str, Any]:
        """Return the model's attributes; keys that this version does not know are left out."""
        return {row.name or row.key: row.kind.read(found[row.key]) for row in self.rows}

    def read(self, found: Any) -> Any:
        """Return an object of the model."""
        return self.model(**self.values(found))

    def schema(self) -> dict[str, Any]:
        """Return the object's JSON Schema."""
        described = {
            row.key: {**row.kind.schema, **({"description": row.meaning} if row.meaning else {})} for row in self.rows
        }
        return {"type": "object", "required": [row.key for row in self.rows], "properties": described}

    @property
    def kind(self) -> Kind:
        """The object as the value of a key."""
        return Kind(self.schema(), self.read, self.write)


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise ValueError("expected a whole number from 0 to 2**32")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_SECONDS:
        raise ValueError("expected a number of seconds, from 0 to a century")
    return float(value)


TEXT = Kind({"type": "string"}, lambda value: _checked(str, value))
FLAG = Kind({"type": "boolean"}, lambda value: _checked(bool, value))
COUNT = Kind({"type": "integer", "minimum": 0}, _count)
SECONDS = Kind({"type": "number", "minimum": 0}, _seconds)


def or_null(kind: Kind) -> Kind:
    """Return the kind of a value that may be missing."""
    schema = {**kind.schema, "type": [kind.schema["type"], "null"]}
    return Kind(
        schema,
        lambda value: None if value is None else kind.read(value),
        lambda value: None if value is None else kind.write(value),
    )


def one_of(values: type[enum.Enum]) -> Kind:
    """Return the kind of an enumeration."""
    return Kind({"enum": [value.value for value in values]}, values, lambda value: value.value)


def limited(kind: Kind, write: Callable[[Any], Any]) -> Kind:
    """Return a kind whose values are limited by `write`, when they are written and when they are read."""
    return Kind(kind.schema, lambda value: write(kind.read(value)), write)


def list_of(kind: Kind, most: int) -> Kind:
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
        ValueError: `text` is not RFC 3339 in UTC.
    """
    if text is None:
        return None
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise ValueError(f"not an RFC 3339 time in UTC: {text!r}")
    moment = dt.datetime.strptime(match[1], "%Y-%m-%dT%H:%M:%S").replace(tzinfo=dt.timezone.utc)
    return int(moment.timestamp()) * _NANO + int((match[2] or "0").ljust(9, "0"))


TIME = Kind({"$ref": "#/$defs/time"}, parse_timestamp, format_timestamp)
