"""From a client's entries to objects of one folder; shared by all stores."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from firstfault.store._api import ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PAGE", "PART", "by_name", "first_page", "nanoseconds"]

PAGE = 1000
"""Objects of one LIST answer: what S3 and GCS send at most."""
PART = ".part"
"""Suffix of a file that is being written to a local folder; never a document."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_NANO = 1_000_000_000


def by_name(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the objects in the order of their names."""
    return sorted(objects, key=lambda item: item.name)


def first_page(objects: Iterable[ObjectInfo], after: str) -> Page:
    """Return the page that an ordered storage would send, out of a whole listing."""
    left = by_name(item for item in objects if item.name > after)
    return Page(tuple(left[:PAGE]), len(left) > PAGE)


def nanoseconds(moment: dt.datetime) -> int:
    """Return a point in time as nanoseconds since the Unix epoch; one without a zone is in UTC."""
    since = (moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * _NANO + since.microseconds * 1000
