"""What all stores share: the order of a listing, its pages and its times."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from firstfault.store._api import ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PAGE", "PART", "by_name", "nanoseconds", "only_page"]

PAGE = 1000
"""The most objects in one LIST answer of S3 and GCS."""
PART = ".part"
"""Suffix of a file that is being written to a local folder; listings leave it out."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_NANO = 1_000_000_000


def by_name(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the objects in the order of their names."""
    return sorted(objects, key=lambda item: item.name)


def only_page(objects: Iterable[ObjectInfo], after: str) -> Page:
    """Return all objects of a complete listing behind the name `after` as one page: another would list them again."""
    return Page(tuple(by_name(item for item in objects if item.name > after)), more=False)


def nanoseconds(moment: dt.datetime) -> int:
    """Return nanoseconds since the Unix epoch; a moment without a time zone is in UTC."""
    since = (moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * _NANO + since.microseconds * 1000
