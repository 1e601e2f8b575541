"""Codecs for the rows of the table in `fields`: how a value is written, bounded and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from firstfault.utils.stored_text import clean, clean_end
from firstfault.utils.text import elide

MAX_LINE_CHARACTERS = 500
"""Characters of a name or a line, when written."""
MAX_LINE_CHARACTERS_READ = 4_096
"""Characters of a name or a line, when read: a report may repeat it hundreds of times."""
MAX_NAMES = 50
MAX_COUNT = 2**32 - 1
MAX_LONG = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """How values of one type are written and read. Reading has limits, too:
    any process may have written the file.
    """

    write: Callable[[Any], Any]
    """Converts the model's value for protobuf's constructors; None leaves the field unset."""
    read: Callable[[Any], Any]
    is_optional: bool = False
    """Whether an unset field differs from the empty value of its type."""
    unset: Any = None
    """The value of an unset field, if it is optional."""
    is_redacted: bool = False
    """Whether writing removes credentials."""
    max_size: int | None = None
    """Maximum number of characters or items when written, or None if only the type limits it."""


@dataclass(frozen=True, slots=True)
class Field:
    """One attribute of the model, with its names in files and in reports."""

    name: str
    """The model's attribute."""
    codec: ValueCodec
    wire: str = ""
    """The protobuf field, or empty if it has the same name."""
    json: str = ""
    """Key in a report's JSON, or empty if the report has no such key."""


class FieldTable:
    """The fields of one protobuf message, which are read into `model`."""

    def __init__(self, model: Callable[..., Any], fields: Sequence[Field]) -> None:
        self.model = model
        self.fields = tuple(fields)
        # looked up once: a reader may decode tens of thousands of documents
        self._writes = [
            (field.wire or field.name, field.name, field.codec.write) for field in fields
        ]
        rows = [(field.name, field.wire or field.name, field.codec) for field in fields]
        self._always = [
            (name, wire, codec.read) for name, wire, codec in rows if not codec.is_optional
        ]
        self._present = [
            (name, wire, codec.read, codec.unset) for name, wire, codec in rows if codec.is_optional
        ]

    def write(self, value: Any, /, **extra: Any) -> dict[str, Any]:
        """Return the arguments of the message's constructor for an object of the model.

        `extra` are fields of the message outside the table.
        """
        return {wire: write(getattr(value, name)) for wire, name, write in self._writes} | extra

    def read_attributes(self, message: Any) -> dict[str, Any]:
        """Return the model's attributes, read from a message."""
        attributes = {
            name: getattr(message, wire) if read is _identity else read(getattr(message, wire))
            for name, wire, read in self._always
        }
        for name, wire, read, unset in self._present:
            attributes[name] = read(getattr(message, wire)) if message.HasField(wire) else unset
        return attributes

    def read(self, message: Any, /, **extra: Any) -> Any:
        """Return an object of the model; `extra` are attributes outside the table."""
        return self.model(**self.read_attributes(message), **extra)


@lru_cache(maxsize=4096)
def intern_value(value: Any) -> Any:
    """Return one object for all equal values: thousands of victims have the same stacks."""
    return value


# --- texts ----------------------------------------------------------------------------------------


def _identity(value: Any) -> Any:
    return value


def text(max_size: int) -> ValueCodec:
    """Return the codec of a text that is cut in the middle."""
    return ValueCodec(
        lambda value: clean(value, max_size),
        _identity,
        is_redacted=True,
        max_size=max_size,
    )


def text_tail(max_size: int) -> ValueCodec:
    """Return the codec of a text that is cut at its start, in whole lines."""
    read = itemgetter(slice(-max_size, None))
    return ValueCodec(
        lambda value: clean_end(value, max_size),
        read,
        is_redacted=True,
        max_size=max_size,
    )


LINE = ValueCodec(
    lambda value: clean(value, MAX_LINE_CHARACTERS),
    lambda value: elide(value, MAX_LINE_CHARACTERS_READ),
    is_redacted=True,
    max_size=MAX_LINE_CHARACTERS,
)
NAME = ValueCodec(_identity, _identity)
"""The name of an object in the storage, or a text that is already redacted."""


# --- numbers --------------------------------------------------------------------------------------


def _clamp(limit: int, value: int | None) -> int | None:
    return None if value is None else min(max(value, 0), limit)


def _rank(rank: int | None) -> int | None:
    # torch's rank is -1 before the rendezvous
    return rank if rank is not None and 0 <= rank <= MAX_COUNT else None


FLAG = NUMBER = ValueCodec(_identity, _identity)
OPTIONAL_NUMBER = ValueCodec(_identity, _identity, is_optional=True)
COUNT = ValueCodec(partial(_clamp, MAX_COUNT), _identity)
OPTIONAL_COUNT = replace(COUNT, is_optional=True)
RANK = ValueCodec(_rank, _identity, is_optional=True)
LONG = ValueCodec(partial(_clamp, MAX_LONG), _identity)
OPTIONAL_LONG = replace(LONG, is_optional=True)
TIME = ValueCodec(lambda value: LONG.write(value or 0), lambda value: value or None)
"""Nanoseconds; 0 on the wire if unknown."""


def enum_codec(numbers: Mapping[Any, int], unknown: Any) -> ValueCodec:
    """Return the codec of an enumeration; numbers that a later version added
    are read as `unknown`.
    """
    back = {number: value for value, number in numbers.items()}
    return ValueCodec(numbers.__getitem__, lambda number: back.get(number, unknown))


# --- parts ----------------------------------------------------------------------------------------


def optional_part(
    table: FieldTable, read: Callable[[Any], Any] | None = None, *, empty: Any = None
) -> ValueCodec:
    """Return the codec of a nested message, unset if it equals `empty`;
    `read` replaces the table's own.
    """
    reads = read or table.read
    return ValueCodec(
        lambda value: None if value == empty else table.write(value),
        lambda attributes: intern_value(reads(attributes)),
        is_optional=True,
        unset=empty,
    )


def required_part(table: FieldTable) -> ValueCodec:
    """Return the codec of a nested message that is always set."""
    return ValueCodec(table.write, table.read)


def list_codec(
    item: ValueCodec,
    limit: int | None = None,
    *,
    keeps_last: bool = False,
    is_interned: bool = False,
) -> ValueCodec:
    """Return the codec of a list, cut to its first or last `limit` items;
    `is_interned` lists are shared if equal.
    """
    some = slice(-limit, None) if limit and keeps_last else slice(limit)
    reads: Callable[[Sequence[Any]], Any] = lambda items: tuple(map(item.read, items[some]))  # noqa: E731
    return ValueCodec(
        lambda items: list(map(item.write, items[some])),
        (lambda items: intern_value(reads(items))) if is_interned else reads,
        is_redacted=item.is_redacted,
        max_size=limit,
    )
