"""Object storage: list a folder without a cache, get, put. It does not know what the bytes mean.

Imports only `errors` and `lazy` of this library. A client (obstore or fsspec) is imported on first use, because each is
slow to import and one is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from firstfault.lazy import lazy_names
from firstfault.store._api import ObjectInfo, Page, ReadableStore, Store
from firstfault.store._open import open_store
from firstfault.store._uri import is_remote, join, split_name

if TYPE_CHECKING:
    from firstfault.store._fsspec import FsspecStore
    from firstfault.store._obstore import ObstoreStore

__all__ = [
    "FsspecStore",
    "ObjectInfo",
    "ObstoreStore",
    "Page",
    "ReadableStore",
    "Store",
    "is_remote",
    "join",
    "open_store",
    "split_name",
]

__getattr__, _ = lazy_names(
    __name__,
    {"firstfault.store._fsspec": ("FsspecStore",), "firstfault.store._obstore": ("ObstoreStore",)},
)
