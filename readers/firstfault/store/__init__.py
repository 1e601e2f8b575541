"""Object storage: list a folder without a cache, get, put. It does not know what the bytes mean.

Imports only `firstfault.errors` of this library. A client (obstore or fsspec) is imported on first use, because each is
slow to import and one is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from firstfault.store._api import ObjectInfo, Page, Store
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
    "Store",
    "is_remote",
    "join",
    "open_store",
    "split_name",
]

_CLIENTS = {"FsspecStore": "firstfault.store._fsspec", "ObstoreStore": "firstfault.store._obstore"}


def __getattr__(name: str) -> Any:
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - only for a client

    return getattr(importlib.import_module(_CLIENTS[name]), name)
