"""The store over fsspec: a local folder, memory, S3 through s3fs, and whatever else fsspec has a filesystem for."""

from __future__ import annotations

import asyncio
import datetime as dt
import errno
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
import stamina
from fsspec.asyn import AsyncFileSystem

from firstfault.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from firstfault.store._api import ObjectInfo
from firstfault.store._settings import storage_options
from firstfault.store._uri import join, protocol_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["FsspecStore", "open_store"]

T = TypeVar("T")

_ATTEMPTS = 4
_RETRY_TIMEOUT_S = 15.0
_WRITE_TIMEOUT_S = 20.0
"""For one attempt to write one document; as long as one answer to a read may take."""
_NANO = 1_000_000_000
_PART = ".part"
"""Suffix of a file that is being written to a local folder; never a document."""


def open_store(uri: str, options: Mapping[str, Any] | None = None, *, attempts: int = _ATTEMPTS) -> FsspecStore:
    """Return the store for the folder `uri` (a path or any fsspec URI).

    Nothing is asked of the storage yet. Use it with ``async with``.

    Raises:
        UsageError: there is no filesystem for this scheme, or its package is not installed.
    """
    return FsspecStore(uri, options, attempts=attempts)


class FsspecStore:
    """A folder of objects over fsspec.

    The filesystem instance is its own, never fsspec's shared one: flytekit's instance caches listings and belongs to
    another event loop. Asynchronous filesystems are used natively, others through a thread.
    """

    def __init__(self, uri: str, options: Mapping[str, Any] | None = None, *, attempts: int = _ATTEMPTS) -> None:
        self._uri = uri.rstrip("/") or uri
        self._protocol = protocol_of(uri)
        self._options = options
        self._attempts = attempts
        self._fs: Any = None
        self._root = ""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        return self._uri

    async def __aenter__(self) -> Self:
        options: dict[str, Any] = {**storage_options(self._protocol, self._options), "skip_instance_cache": True}
        try:
            kind = fsspec.get_filesystem_class(self._protocol)
        except ImportError as error:
            raise UsageError(
                f"reading {self._uri} needs a package that is not installed ({error}); "
                f"pip install 'firstfault[{_EXTRAS.get(self._protocol, self._protocol)}]'"
            ) from error
        except ValueError as error:
            raise UsageError(f"{self._uri}: there is no storage of the kind {self._protocol!r}; {error}") from error
        if issubclass(kind, AsyncFileSystem):
            options |= {"asynchronous": True, "use_listings_cache": False, "loop": asyncio.get_running_loop()}
        self._fs = kind(**options)
        if self._protocol in {"s3", "s3a"}:
            self._fs.retries = 1  # five tries of s3fs within each of ours would multiply its timeouts
        self._root = str(self._fs._strip_protocol(self._uri)).rstrip("/")  # noqa: SLF001 - fsspec's documented hook
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # s3fs and gcsfs keep a session that belongs to this event loop and complain if it is left open
        closer = getattr(self._fs, "_s3creator", None)
        if closer is not None:
            await closer.__aexit__(None, None, None)
            self._fs._s3 = None  # noqa: SLF001
        session = getattr(self._fs, "_session", None)
        if session is not None and hasattr(session, "close"):
            await session.close()
        self._fs = None

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder`, by name; empty if it does not exist."""
        path = self._path(folder)
        try:
            entries = await self._retried("list", path, lambda: self._call("ls", path, detail=True))
        except ObjectNotFoundError:
            return []
        objects = [
            ObjectInfo(str(entry["name"]).rstrip("/").rsplit("/", 1)[-1], int(entry["size"] or 0), _modified(entry))
            for entry in entries
            if entry["type"] == "file"
            # a prefix that is an object itself is listed as its own only entry
            and str(entry["name"]).rstrip("/") != path
            and not str(entry["name"]).endswith(_PART)
        ]
        return sorted(objects, key=lambda item: item.name)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes; see `Store.get`."""
        full = self._path(path)
        if limit is not None:
            info = await self._retried("look at", full, lambda: self._call("info", full))
            if int(info["size"] or 0) > limit:
                raise ObjectTooLargeError(f"{self._named(full)} has {info['size']} bytes, {limit} are allowed")
        return bytes(await self._retried("read", full, lambda: self._call("cat_file", full)))

    async def put(self, path: str, data: bytes) -> None:
        """Write an object whole."""
        full = self._path(path)
        await self._retried("write", full, lambda: self._write(full, data))

    async def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        full = self._path(path)
        try:
            info = await self._retried("look at", full, lambda: self._call("info", full))
        except ObjectNotFoundError:
            return False
        return bool(info["type"] == "file")

    async def _write(self, full: str, data: bytes) -> None:
        if isinstance(self._fs, AsyncFileSystem):
            write_it = self._fs._pipe_file(full, data)  # noqa: SLF001 - fsspec's public async API is underscored
            # botocore's PUT says "Expect: 100-continue", and aiohttp waits for that answer without any timeout
            await asyncio.wait_for(write_it, _WRITE_TIMEOUT_S)
            return
        # A folder shows a file while it grows; a rename makes it appear whole.
        part = f"{full}.{uuid.uuid4().hex}{_PART}"

        def write() -> None:
            self._fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(part, data)
            self._fs.mv(part, full)

        await asyncio.to_thread(write)

    async def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._fs, AsyncFileSystem):
            return await getattr(self._fs, f"_{name}")(*args, **kwargs)
        return await asyncio.to_thread(getattr(self._fs, name), *args, **kwargs)

    async def _retried(self, verb: str, full: str, call: Callable[[], Awaitable[T]]) -> T:
        if self._fs is None:
            raise RuntimeError("the store is closed; use it inside `async with`")
        async for attempt in stamina.retry_context(
            on=StoreUnavailableError, attempts=self._attempts, timeout=_RETRY_TIMEOUT_S, wait_initial=0.1, wait_max=2.0
        ):
            with attempt:
                try:
                    return await call()
                except Exception as error:
                    raise self._typed(error, verb, full) from error
        raise AssertionError  # stamina either returns or raises

    def _typed(self, error: Exception, verb: str, full: str) -> Exception:
        """Return our error for one of fsspec's, botocore's or aiohttp's; a programming error comes back as it is."""
        where = f"cannot {verb} {self._named(full)}"
        name = type(error).__name__
        if _no_bucket(error):
            return StoreError(f"{where}: {_line(error)}; check the bucket's name")
        if isinstance(error, FileNotFoundError | NotADirectoryError) and verb != "write":
            return ObjectNotFoundError(f"{where}: there is no such object")
        if name in {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"}:
            return AccessDeniedError(
                f"{where}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
                "(or FLYTE_AWS_ACCESS_KEY_ID and FLYTE_AWS_SECRET_ACCESS_KEY)"
            )
        if isinstance(error, PermissionError):
            return AccessDeniedError(
                f"{where}: refused ({_line(error)}); check the credentials and the {verb} permission"
            )
        transient = (ConnectionError, TimeoutError, asyncio.TimeoutError)
        if isinstance(error, transient) or name in _TRANSIENT_NAMES or _busy(error):
            return StoreUnavailableError(
                f"{where}: the storage did not answer ({name}: {_line(error)}); check the endpoint"
            )
        if isinstance(error, OSError) or type(error).__module__.split(".")[0] in {"botocore", "aiohttp", "gcsfs"}:
            return StoreError(f"{where}: {name}: {_line(error)}")
        return error

    def _path(self, relative: str) -> str:
        return join(self._root, relative) if relative else self._root

    def _named(self, full: str) -> str:
        return full if self._protocol == "file" else f"{self._protocol}://{full.lstrip('/')}"


_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}

_TRANSIENT_NAMES = {
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ConnectionClosedError",
    "ServerDisconnectedError",
    "ClientConnectorError",
    "ClientOSError",
    "ResponseParserError",
    "IncompleteReadError",
    "IncompleteRead",
    "ClientPayloadError",
    "HTTPClientError",
    "HttpError",
    "FSTimeoutError",
}

_BUSY = {errno.EBUSY, errno.EREMOTEIO, errno.ETIMEDOUT, errno.EAGAIN}


def _no_bucket(error: Exception) -> bool:
    """Whether it is the bucket that does not exist: s3fs has one error for that and for an object."""
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("Error", {}).get("Code") == "NoSuchBucket")


def _busy(error: Exception) -> bool:
    """Whether this is s3fs's translation of SlowDown, 503 or 500."""
    return isinstance(error, OSError) and error.errno in _BUSY


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__


def _modified(entry: Mapping[str, Any]) -> int | None:
    """When the storage says an object was written; each filesystem has its own word for it."""
    for field in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = entry.get(field)
        if isinstance(value, dt.datetime):
            stamp = value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)
            since = stamp - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
            return (since.days * 86_400 + since.seconds) * _NANO + since.microseconds * 1000
        if isinstance(value, int | float):
            return int(value * _NANO)
    return None
