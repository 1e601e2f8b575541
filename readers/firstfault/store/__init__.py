"""Object storage as firstfault needs it: list a folder freshly, get, put. Knows nothing of what the bytes mean."""

from firstfault.store._api import ObjectInfo, Store
from firstfault.store._fsspec import FsspecStore, open_store
from firstfault.store._uri import is_remote, join, split_name

__all__ = ["FsspecStore", "ObjectInfo", "Store", "is_remote", "join", "open_store", "split_name"]
