"""The forms of a field's value: how it is written, bounded and read. The table of fields consists of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from firstfault.text import clean, clean_end, elide

MAX_LINE = 500
"""Characters of a name or a line."""
MAX_READ_LINE = 4_096
"""Characters of a name or a line that a reader takes: it may be drawn hundreds of times."""
MAX_NAMES = 50
_MAX_COUNT = 2**32 - 1
_MAX_LONG = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one kind are written and read; both have limits, as any process may write a file."""

    write: Callable[[Any], Any]
    """From the model to what protobuf's constructors take; None leaves the field unset."""
    read: Callable[[Any], Any]
    is_optional: bool = False
    """Whether an unset field differs from the empty value of its type."""
    unset: Any = None
    """What is read from an unset field, if it is optional."""
    is_redacted: bool = False
    """Whether credentials are removed when it is written."""
    cap: int | None = None
    """The most characters or items that are written; None: there is no limit, or its type is the limit."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the model: where it lies in a file, and by which words people and programs find it."""

    name: str
    """Of the model's attribute."""
    form: Form
    wire: str = ""
    """Of the message's field; empty: the same name."""
    json: str = ""
    """Key in a report's JSON; empty: it is not there under a name of its own."""


class Table:
    """The fields of one part of a file, which are read into `model`."""

    def __init__(self, model: Callable[..., Any], fields: Sequence[Field]) -> None:
        self.model = model
        self.fields = tuple(fields)
        # a reader may decode tens of thousands of documents, so what does not change is looked up once
        self._writes = [(field.wire or field.name, field.name, field.form.write) for field in fields]
        rows = [(field.name, field.wire or field.name, field.form) for field in fields]
        self._always = [(name, wire, form.read) for name, wire, form in rows if not form.is_optional]
        self._present = [(name, wire, form.read, form.unset) for name, wire, form in rows if form.is_optional]

    def write(self, value: Any, /, **given: Any) -> dict[str, Any]:
        """Return what the constructor of the part's message takes, for an object of the model.

        `given` are fields of the message that are written in another way.
        """
        return {wire: write(getattr(value, name)) for wire, name, write in self._writes} | given

    def values(self, message: Any) -> dict[str, Any]:
        """Return the fields of the model."""
        found = {
            name: getattr(message, wire) if read is _same else read(getattr(message, wire))
            for name, wire, read in self._always
        }
        for name, wire, read, unset in self._present:
            found[name] = read(getattr(message, wire)) if message.HasField(wire) else unset
        return found

    def read(self, message: Any, /, **given: Any) -> Any:
        """Return an object of the model; `given` are fields that are not in the table."""
        return self.model(**self.values(message), **given)


@lru_cache(maxsize=4096)
def interned(value: Any) -> Any:
    """Return one object for all equal values, which saves memory: thousands of victims have the same stacks."""
    return value


# --- texts ----------------------------------------------------------------------------------------------------------


def _same(value: Any) -> Any:
    return value


def text(cap: int) -> Form:
    """Return the form of a text, of which both ends are kept."""
    return Form(lambda value: clean(value, cap), _same, is_redacted=True, cap=cap)


def end_of_text(cap: int) -> Form:
    """Return the form of a text, of which the end is kept: whole lines."""
    return Form(lambda value: clean_end(value, cap), lambda value: value[-cap:], is_redacted=True, cap=cap)


LINE = Form(
    lambda value: clean(value, MAX_LINE), lambda value: elide(value, MAX_READ_LINE), is_redacted=True, cap=MAX_LINE
)
NAME = Form(_same, _same)
"""A name that identifies an object in the storage, or a text that was redacted before."""


# --- numbers --------------------------------------------------------------------------------------------------------


def _within(most: int, value: int | None) -> int | None:
    return None if value is None else min(max(value, 0), most)


def _rank(rank: int | None) -> int | None:
    # an invalid rank is none, such as torch's -1 before the rendezvous
    return rank if rank is not None and 0 <= rank <= _MAX_COUNT else None


FLAG = NUMBER = Form(_same, _same)
OPTIONAL_NUMBER = Form(_same, _same, is_optional=True)
COUNT = Form(partial(_within, _MAX_COUNT), _same)
OPTIONAL_COUNT = replace(COUNT, is_optional=True)
RANK = Form(_rank, _same, is_optional=True)
LONG = Form(partial(_within, _MAX_LONG), _same)
OPTIONAL_LONG = replace(LONG, is_optional=True)
TIME = Form(lambda value: LONG.write(value or 0), lambda value: value or None)
"""Nanoseconds; 0 on the wire: not known."""


def one_of(numbers: Mapping[Any, int], unknown: Any) -> Form:
    """Return the form of an enumeration; `unknown` is read from a number that a later version added."""
    back = {number: value for value, number in numbers.items()}
    return Form(numbers.__getitem__, lambda number: back.get(number, unknown))


# --- parts ----------------------------------------------------------------------------------------------------------


def part(table: Table, read: Callable[[Any], Any] | None = None, *, empty: Any = None) -> Form:
    """Return the form of a part that is left out if it equals `empty`; without `read` the table reads it."""
    reads = read or table.read
    return Form(
        lambda value: None if value == empty else table.write(value),
        lambda found: interned(reads(found)),
        is_optional=True,
        unset=empty,
    )


def whole(table: Table) -> Form:
    """Return the form of a part that is always there."""
    return Form(table.write, table.read)


def many(form: Form, most: int | None = None, *, last: bool = False, keep: bool = False) -> Form:
    """Return the form of a list: of more than `most` items writers and readers keep the first ones, or the `last`.

    With `keep`, documents share equal lists.
    """
    some = slice(-most, None) if most and last else slice(most)
    reads: Callable[[Sequence[Any]], Any] = lambda items: tuple(map(form.read, items[some]))  # noqa: E731
    return Form(
        lambda items: list(map(form.write, items[some])),
        (lambda items: interned(reads(items))) if keep else reads,
        is_redacted=form.is_redacted,
        cap=most,
    )
