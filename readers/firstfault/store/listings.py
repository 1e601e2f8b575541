"""Objects of a listing, and its pages."""

from __future__ import annotations

import datetime as dt
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

MAX_PAGE_OBJECTS = 1000
"""Most objects in one LIST response of S3 and GCS."""
PARTIAL_FILE_SUFFIX = ".part"
"""Suffix of a file that is still being written to a local folder; listings skip it."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    name: str
    """Relative to the folder that was listed."""
    size: int
    """Bytes."""
    last_modified_ns: int | None = None
    """Unix time in nanoseconds on the storage's clock, often whole seconds; None if unknown."""

    @property
    def base(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing."""

    objects: tuple[ObjectInfo, ...]
    """In the storage's order. Names are relative to the store's folder;
    in subfolders they contain slashes.
    """
    has_more: bool
    """Whether more objects may follow."""

    @property
    def is_sorted(self) -> bool:
        """Whether the objects are sorted by name."""
        names = [item.name for item in self.objects]
        return all(one < other for one, other in itertools.pairwise(names))


def sort_by_name(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the objects in the order of their names."""
    return sorted(objects, key=lambda item: item.name)


def build_single_page(objects: Iterable[ObjectInfo], after: str) -> Page:
    """Return the objects of a complete listing that sort after the name `after`, as one page.

    For storages that can't start a listing at a name: a second page would request everything again.
    """
    return Page(tuple(sort_by_name(item for item in objects if item.name > after)), has_more=False)


def to_nanoseconds(moment: dt.datetime) -> int:
    """Convert a time to nanoseconds since the Unix epoch; without a time zone it is UTC."""
    # Whole numbers: a float has too few digits for nanoseconds since 1970.
    since = (moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * NS_PER_SECOND + since.microseconds * 1000
