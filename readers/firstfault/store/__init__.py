"""Object storage: list without a cache, get, put. Doesn't interpret the bytes.

Imports nothing of this library except `errors` and `utils`. A client (obstore or fsspec) is
imported on first use: each is slow to import, and one is enough.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

from firstfault.errors import UsageError
from firstfault.store.base import (
    MAX_REQUEST_ATTEMPTS,
    ReadableStore as ReadableStore,
    Store as Store,
)
from firstfault.store.listings import (
    ObjectInfo as ObjectInfo,
    Page as Page,
    sort_by_name as sort_by_name,
)
from firstfault.store.uris import (
    is_remote as is_remote,
    join as join,
    get_scheme as get_scheme,
    split_name as split_name,
)
from firstfault.utils.loggers import get_logger

logger = get_logger(__name__)

CLIENT_VARIABLE = "FIRSTFAULT_STORAGE_CLIENT"
"""Environment variable that names the client, one of `CLIENTS`."""
CLIENTS = ("fsspec", "obstore")
_warned: set[str] = set()
"""Invalid names of a client that this process has warned about: it opens many stores."""
OBSTORE_SCHEMES = {"s3", "s3a", "gs", "gcs", "az"}
SCHEME_WITHOUT_SLASHES = re.compile(r"(s3a?|gs|gcs|az|abfss?|https?):(?!//[^/])", re.IGNORECASE)


def open_store(
    uri: str,
    options: Mapping[str, Any] | None = None,
    *,
    attempts: int = MAX_REQUEST_ATTEMPTS,
    may_fork: bool = False,
) -> Store:
    """Return the store for the folder `uri` (a path or any fsspec URI), for use with ``async
    with``. Sends no request.

    obstore serves s3://, gs:// and az:// if it is installed and supports all settings; fsspec
    serves the rest. Results are the same; obstore is faster.

    Args:
        uri: the folder.
        options: fsspec's storage options, for either client; they override the environment.
        attempts: how often to send a request, if errors are transient.
        may_fork: True if this process may fork and use a store in the child. Excludes obstore:
            after a request in the parent, a request in the child hangs.

    Raises:
        UsageError: the scheme is unknown, its package isn't installed, or a setting of the storage
            is invalid.
    """
    slashes = SCHEME_WITHOUT_SLASHES.match(uri)
    # A URI with one slash has no scheme for fsspec: it would be a relative path, and a write would
    # make a local folder `s3:` on a disk that is gone with the pod.
    if slashes is not None:
        raise UsageError(
            f"{uri!r} is not a storage URI: two slashes follow the scheme, as in"
            f" {slashes[1]}://bucket/key"
        )
    may_be_obstore = (
        _read_client() != "fsspec" and not may_fork and get_scheme(uri) in OBSTORE_SCHEMES
    )
    if may_be_obstore and importlib.util.find_spec("obstore") is not None:
        from firstfault.store.obstore_store import (  # noqa: PLC0415 - one of the two is enough
            open_obstore,
        )

        store = open_obstore(uri, options, attempts)
        if store is not None:
            return store
    from firstfault.store.fsspec_store import FsspecStore  # noqa: PLC0415 - as above

    return FsspecStore(uri, options, attempts=attempts)


def find_client_problem(text: str) -> str:
    """Return what is wrong with a value of `CLIENT_VARIABLE`, or an empty string if it is valid."""
    is_valid = not text or text.lower() in CLIENTS
    return "" if is_valid else f"must be {' or '.join(CLIENTS)}, not {text!r}"


def _read_client() -> str:
    """Return the user's choice of `CLIENTS`, or an empty string if it is missing or invalid.

    A misspelled name must not lose the documents of a job.
    """
    text = os.environ.get(CLIENT_VARIABLE, "")
    if not text:
        return ""
    problem = find_client_problem(text)
    if problem and text not in _warned:
        _warned.add(text)
        logger.warning("ignoring %s: it %s", CLIENT_VARIABLE, problem)
    return "" if problem else text.lower()
