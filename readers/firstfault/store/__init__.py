"""Object storage as firstfault needs it: list a folder freshly, get, put. Knows nothing of what the bytes mean.

The clients are loaded when they are used: one of them is enough, and each costs.
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
    import importlib  # noqa: PLC0415 - paid by whoever asks for a name

    return getattr(importlib.import_module(_CLIENTS[name]), name)
