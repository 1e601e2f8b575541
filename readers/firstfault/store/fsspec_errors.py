"""What the errors of fsspec, botocore, aiohttp, Google and Azure mean."""

from __future__ import annotations

import asyncio
import errno

from firstfault.store import settings
from firstfault.store.base import StorageErrorKind

_BUSY_ERRNOS = {errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EAGAIN}
"""s3fs turns SlowDown, 503 and 500 into these."""


def classify_client_error(error: Exception, verb: str) -> tuple[StorageErrorKind, str] | None:
    """Return the meaning of a client's error, and its text in one line;
    None if it isn't the storage's error.
    """
    name = type(error).__name__
    line = to_one_line(error)
    known = settings.STORAGES["errors"]
    region = _find_bucket_region(error)
    if region is not None:
        return StorageErrorKind.WRONG_REGION, region
    # s3fs raises one error for a missing bucket and a missing object
    if get_error_code(error) == "NoSuchBucket":
        return StorageErrorKind.BUCKET_NOT_FOUND, line
    if isinstance(error, FileNotFoundError | NotADirectoryError) and verb != "write":
        return StorageErrorKind.OBJECT_NOT_FOUND, ""
    if name in known["credentials"] and getattr(error, "response", None) is None:
        return StorageErrorKind.NO_CREDENTIALS, ""
    if isinstance(error, PermissionError) or name in known["credentials"]:
        return StorageErrorKind.REFUSED, line
    transient = (ConnectionError, TimeoutError, asyncio.TimeoutError)
    names = {base.__name__ for base in type(error).__mro__}
    is_busy = isinstance(error, OSError) and error.errno in _BUSY_ERRNOS
    if isinstance(error, transient) or not names.isdisjoint(known["transient"]) or is_busy:
        return StorageErrorKind.NO_ANSWER, f"{name}: {line}"
    if isinstance(error, OSError) or type(error).__module__.split(".")[0] in known["packages"]:
        return StorageErrorKind.OTHER, f"{name}: {line}"
    return None


def get_error_code(error: Exception) -> str:
    """Return the code that S3 gave an error, which s3fs keeps as its cause; empty for others."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def to_one_line(error: Exception) -> str:
    """Return the text of an error in one line, shortened; its type if it has none."""
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__


def _find_bucket_region(error: Exception) -> str | None:
    """Return the bucket's region if S3 rejects the client's region, empty if unnamed;
    None for other errors.
    """
    response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    codes = settings.STORAGES["errors"]["wrong_region"]
    if not isinstance(response, dict) or response.get("Error", {}).get("Code") not in codes:
        return None
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or response["Error"].get("Region") or "")
