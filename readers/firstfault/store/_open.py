"""Which client reads a URI: obstore where it is installed and understands the settings, else fsspec."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from firstfault.errors import UsageError
from firstfault.store._retry import ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from firstfault.store._api import Store

__all__ = ["CLIENT_VARIABLE", "open_store"]

CLIENT_VARIABLE = "FIRSTFAULT_STORAGE_CLIENT"
"""Environment variable: ``fsspec`` or ``obstore`` instead of choosing."""
_CLIENTS = ("", "fsspec", "obstore")


def open_store(
    uri: str, options: Mapping[str, Any] | None = None, *, attempts: int = ATTEMPTS, may_fork: bool = False
) -> Store:
    """Return the store for the folder `uri` (a path or any fsspec URI).

    s3://, gs:// and az:// are read by obstore if it is installed and can be told all of the settings, everything else
    by fsspec. Both give the same answers; obstore is faster to load and to ask. Nothing is asked of the storage yet.
    Use it with ``async with``.

    Args:
        uri: the folder.
        options: fsspec's storage options, whichever client is taken; they win over the environment.
        attempts: how often to ask where the storage does not answer.
        may_fork: whether this process may fork later and use a store in the child: after a request of obstore's in the
            parent, one in the child would hang.

    Raises:
        UsageError: there is no client for this scheme, or its package is not installed, or the settings are wrong.
    """
    wanted = os.environ.get(CLIENT_VARIABLE, "").lower()
    if wanted not in _CLIENTS:
        raise UsageError(f"{CLIENT_VARIABLE} must be fsspec or obstore, not {wanted!r}")
    if wanted != "fsspec" and not may_fork and _has_obstore():
        from firstfault.store._obstore import obstore_for  # noqa: PLC0415 - one of the two is enough

        store = obstore_for(uri, options, attempts)
        if store is not None:
            return store
    from firstfault.store._fsspec import FsspecStore  # noqa: PLC0415 - as above

    return FsspecStore(uri, options, attempts=attempts)


def _has_obstore() -> bool:
    return importlib.util.find_spec("obstore") is not None
