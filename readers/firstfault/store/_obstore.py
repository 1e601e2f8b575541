"""The store over obstore: S3, Google Cloud Storage and Azure natively. Faster to import and per request than fsspec."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import obstore

from firstfault.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    ObjectTooLargeError,
    StoreError,
    StoreUnavailableError,
)
from firstfault.store._base import (
    ATTEMPTS,
    PAGE,
    ObjectInfo,
    Page,
    StoreOfClient,
    by_name,
    join,
    nanoseconds,
    only_page,
    retried,
)
from firstfault.store._settings import NoCredentialsError, client_for, no_credentials, other_region

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from firstfault.store._fsspec import FsspecStore

T = TypeVar("T")

_CHUNK = 250
"""Objects per chunk of a listing; divides `PAGE`, so that a page needs no further request."""
_ASKED_THE_CLOUD = "performing token request"
"""In obstore's error where a machine of a cloud would have been asked for credentials, and none answers."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_REGION = re.compile(r"<Region>([\w-]+)</Region>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_REFUSED = {401, 403}
_NOT_FOUND = 404
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500
_REDIRECT = {301, 307, 308}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_THREADS_S = 0.4
_LOOK_S = 0.01
_first_pid: list[int] = []
"""Id of the process that made the first request: obstore's threads do not survive a fork."""


def obstore_for(uri: str, options: Mapping[str, Any] | None, attempts: int) -> ObstoreStore | None:
    """Return the store for `uri`; None if obstore does not support its scheme or settings, or was used before a fork.

    Raises:
        UsageError: a setting is invalid.
    """
    if _first_pid and _first_pid[0] != os.getpid():
        return None
    client = client_for(uri, options)
    return ObstoreStore(uri, client, options, attempts=attempts) if client is not None else None


class ObstoreStore(StoreOfClient):
    """A folder of objects over obstore.

    Args:
        uri: the folder.
        client: an obstore store of its bucket or container.
        options: fsspec's; used if the bucket turns out to be in another region, which only fsspec follows.
        attempts: how often to send a request that the storage does not answer.
    """

    ordered = frozenset({"s3", "s3a", "gs", "gcs"})  # Azure cannot start behind a name

    def __init__(
        self, uri: str, client: Any, options: Mapping[str, Any] | None = None, *, attempts: int = ATTEMPTS
    ) -> None:
        super().__init__(uri, options, attempts)
        self._client = client
        self._root = self._uri.split("://", 1)[1].partition("/")[2]
        self._open = False
        self._fallback: FsspecStore | None = None

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        if self._fallback is not None:
            await self._fallback.__aexit__(kind, error, trace)

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder`, by name; empty if it does not exist."""
        root = self._path(folder)

        async def call() -> Sequence[ObjectInfo]:
            found = await obstore.list_with_delimiter_async(self._client, root or None)
            return _objects(found["objects"], root)

        return by_name(await self._request("list", folder, call, lambda store: store.list(folder)))

    async def pages(self, folder: str = "") -> AsyncIterator[Sequence[ObjectInfo]]:
        """See `Store.pages`."""
        if not self.pages_in_order:
            yield [item for item in await self._everything(folder) if "/" not in item.name]
            return
        page = await self.page(folder)
        while True:
            yield [item for item in page.objects if "/" not in item.name]
            if not page.more:
                return
            page = await self.page(folder, after=page.objects[-1].name)

    async def page(self, folder: str = "", *, after: str = "") -> Page:
        """See `Store.page`."""
        if not self.pages_in_order:
            return only_page(await self._everything(folder), after)
        return await self._request(
            "list",
            folder,
            lambda: self._first_objects(folder, after, PAGE),
            lambda store: store.page(folder, after=after),
        )

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes; see `Store.get`. A limit needs no extra request here."""

        async def call() -> bytes:
            found = await obstore.get_async(self._client, self._path(path))
            size = int(found.meta["size"])
            if limit is not None and size > limit:
                raise ObjectTooLargeError(f"{self._named(path)} has {size} bytes, {limit} are allowed")
            return bytes(await found.bytes_async())

        return await self._request("read", path, call, lambda store: store.get(path, limit=limit))

    async def put(self, path: str, data: bytes) -> None:
        """Write an object atomically."""

        async def call() -> None:
            await obstore.put_async(self._client, self._path(path), data, use_multipart=False)

        await self._request("write", path, call, lambda store: store.put(path, data))

    async def exists(self, path: str) -> bool:
        """Whether the object exists."""

        async def call() -> bool:
            await obstore.head_async(self._client, self._path(path))
            return True

        try:
            return await self._request("read", path, call, lambda store: store.exists(path))
        except ObjectNotFoundError:
            return False

    async def _everything(self, folder: str) -> Sequence[ObjectInfo]:
        """Return all objects in or below a folder, unsorted."""

        async def instead(store: FsspecStore) -> Page:
            return Page(tuple([item async for page in store.pages(folder) for item in page]), more=False)

        found = await self._request("list", folder, lambda: self._first_objects(folder, "", None), instead)
        return found.objects

    async def _first_objects(self, folder: str, after: str, limit: int | None) -> Page:
        """Return the objects in or below a folder behind the name `after`, at most `limit`; all of them if None."""
        root = self._path(folder)
        offset = f"{root}/{after}" if root else after
        stream = obstore.list(self._client, root or None, offset=offset if after else None, chunk_size=_CHUNK)
        objects: list[ObjectInfo] = []
        async for chunk in stream:
            objects += _objects(chunk, root)
            if limit is not None and len(objects) >= limit:
                return Page(tuple(objects), more=True)
        return Page(tuple(objects), more=False)

    async def _request(
        self,
        verb: str,
        path: str,
        call: Callable[[], Awaitable[T]],
        instead: Callable[[FsspecStore], Awaitable[T]],
    ) -> T:
        """Return the result of `call`; that of `instead` if the bucket is in another region."""
        if not self._open:
            raise RuntimeError("the store is closed; use it inside `async with`")
        if not _first_pid:
            _first_pid.append(os.getpid())
            atexit.register(_await_threads, frozenset(sys._current_frames()))  # noqa: SLF001 - all threads
        if self._fallback is None:
            try:
                return await retried(call, lambda error: self._typed(error, verb, path), self._attempts)
            except _RedirectError:
                from firstfault.store._fsspec import FsspecStore  # noqa: PLC0415 - rarely needed

                # botocore follows S3's redirect to the bucket's region; obstore does not
                self._fallback = FsspecStore(self._uri, self._options, attempts=self._attempts)
                await self._fallback.__aenter__()
        return await instead(self._fallback)

    def _typed(self, error: Exception, verb: str, path: str) -> Exception:
        """Return the `StoreError` for an error of obstore, by its text; any other error as it is."""
        if isinstance(error, StoreError):
            return error
        where, text = f"cannot {verb} {self._named(path)}", str(error)
        if isinstance(error, NoCredentialsError) or NoCredentialsError.__name__ in text or _has_no_cloud(text):
            return AccessDeniedError(f"{where}: {no_credentials(self._protocol)}")
        if not type(error).__module__.startswith("obstore") and not isinstance(error, OSError | ValueError):
            return error
        status, code = _first(_STATUS, text), _first(_CODE, text)
        number = int(status) if status else 0
        detail = " ".join((_first(_MESSAGE, text) or text.split("Debug source:", maxsplit=1)[0]).split())[:300]
        if code in _NO_BUCKET:
            return StoreError(f"{where}: {detail}; check the bucket's name")
        if isinstance(error, FileNotFoundError) or (number == _NOT_FOUND and verb != "write"):
            return ObjectNotFoundError(f"{where}: there is no such object")
        if code == "AuthorizationHeaderMalformed" and _REGION.search(text):
            return StoreError(f"{where}: {other_region(_first(_REGION, text))}")
        if number in _REDIRECT or "redirect" in text:
            return _RedirectError(f"{where}: {detail}")
        if number in _REFUSED or type(error).__name__ in {"PermissionDeniedError", "UnauthenticatedError"}:
            return AccessDeniedError(f"{where}: refused ({detail}); check the credentials and the {verb} permission")
        if isinstance(error, ValueError) or (number and number < _SERVER_ERROR and number != _TOO_MANY_REQUESTS):
            return StoreError(f"{where}: {detail}")
        return StoreUnavailableError(f"{where}: the storage did not answer ({detail}); check the endpoint")

    def _path(self, relative: str) -> str:
        return join(self._root, relative) if self._root and relative else self._root or relative

    def _named(self, path: str) -> str:
        return join(self._uri, path) if path else self._uri


def _await_threads(before: frozenset[int]) -> None:
    """Wait at the process's end until obstore's threads have handed over their results.

    They take Python's lock for it. A thread that wants it when the interpreter has begun to end aborts the process
    (SIGABRT), as Python ends such a thread in a way that Rust does not allow.

    Args:
        before: threads that were there before the first request; they are not waited for.
    """
    deadline = time.monotonic() + _THREADS_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_S)  # lets them have the lock
        known = before | {thread.ident for thread in threading.enumerate()}
        if not sys._current_frames().keys() - known:  # noqa: SLF001 - only this lists threads of other languages
            break


def _has_no_cloud(text: str) -> bool:
    """Whether nothing is there that gives credentials; a server that fails or is slow may give them later."""
    if _ASKED_THE_CLOUD not in text or "timed out" in text.lower():
        return False
    status = _first(_STATUS, text)
    return not status or int(status) == _NOT_FOUND


def _objects(entries: Iterable[Mapping[str, Any]], root: str) -> list[ObjectInfo]:
    """Return obstore's entries with names relative to `root`, without `root` itself."""
    return [
        ObjectInfo(entry["path"][len(root) :].lstrip("/"), entry["size"], nanoseconds(entry["last_modified"]))
        for entry in entries
        if entry["path"] != root
    ]


class _RedirectError(StoreError):
    """The bucket is in another region."""


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""
