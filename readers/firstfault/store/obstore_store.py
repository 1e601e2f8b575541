"""The store over obstore: native clients of S3, GCS and Azure;
imports and requests are faster than with fsspec.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import obstore

from firstfault.errors import StoreUnavailableError
from firstfault.store import listings
from firstfault.store.base import MAX_REQUEST_ATTEMPTS, StorageErrorKind, Store, T, WrongRegionError
from firstfault.store.listings import ObjectInfo, Page, build_single_page, to_nanoseconds
from firstfault.store.obstore_settings import NoCredentialsError, make_client
from firstfault.store.uris import join
from firstfault.utils.frames import get_current_frames

if TYPE_CHECKING:
    from firstfault.store.fsspec_store import FsspecStore

CHUNK_OBJECTS = 250
"""Objects per chunk of a listing; divides `MAX_PAGE_OBJECTS`, so that a page costs one request."""
METADATA_SERVER_ASKED = "performing token request"
"""Part of obstore's error when it asked the cloud's metadata server for
credentials and got no response.
"""
HTTP_STATUS = re.compile(r"status code: (\d{3})")
S3_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
S3_ERROR_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
REFUSED_STATUSES = {401, 403}
NOT_FOUND_STATUS = 404
TOO_MANY_REQUESTS_STATUS = 429
NOT_IMPLEMENTED_STATUS = "501"
CONFLICT_CODES = {"ConditionalRequestConflict", "OperationAborted"}
FIRST_SERVER_ERROR_STATUS = 500
REDIRECT_STATUSES = {301, 307, 308}
BUCKET_NOT_FOUND_CODES = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
THREADS_TIMEOUT_SECONDS = 0.4
THREADS_POLL_SECONDS = 0.01
_requesting_pid: list[int] = []
"""At most one pid, of the process that sent the first request:
obstore's threads don't survive a fork.
"""


def open_obstore(uri: str, options: Mapping[str, Any] | None, attempts: int) -> ObstoreStore | None:
    """Return the store for `uri`; None if obstore lacks its scheme or settings,
    or the parent process has used it.

    Raises:
        UsageError: a setting is invalid.
    """
    if _requesting_pid and _requesting_pid[0] != os.getpid():
        return None
    client = make_client(uri, options)
    return ObstoreStore(uri, client, options, attempts=attempts) if client is not None else None


class ObstoreStore(Store):
    """A folder of objects over `client`, an obstore store of its bucket or container.

    `options` are fsspec's, for the fallback: only fsspec follows S3's redirect to a bucket in
    another region.
    """

    ordered_schemes = frozenset({"s3", "s3a", "gs", "gcs"})  # Azure can't start a listing at a name

    def __init__(
        self,
        uri: str,
        client: Any,
        options: Mapping[str, Any] | None = None,
        *,
        attempts: int = MAX_REQUEST_ATTEMPTS,
    ) -> None:
        super().__init__(uri, options, attempts)
        self._client = client
        self._root = self._uri.split("://", 1)[1].partition("/")[2]
        self._fallback: FsspecStore | None = None

    async def close(self) -> None:
        """Close the fallback, if there is one."""
        if self._fallback is not None:
            await self._fallback.__aexit__(None, None, None)

    # see below
    async def list_once(self, folder: str, token: str) -> tuple[Sequence[ObjectInfo], str]:  # noqa: ARG002
        """See `Store.list_once`; obstore fetches all pages itself."""
        root = self._build_path(folder)
        listing = await obstore.list_with_delimiter_async(self._client, root or None)
        return _to_object_infos(listing["objects"], root), ""

    async def page_once(self, after: str) -> Page:
        """See `ReadableStore.page`."""
        root = self._root
        offset = join(root, after) if root else after
        is_start = self.has_ordered_pages and after
        stream = obstore.list(
            self._client,
            root or None,
            offset=offset if is_start else None,
            chunk_size=CHUNK_OBJECTS,
        )
        objects: list[ObjectInfo] = []
        # The stream requests the next page only when its chunks are used up: returning at a full
        # page sends no further request.
        async for chunk in stream:
            objects += _to_object_infos(chunk, root)
            if self.has_ordered_pages and len(objects) >= listings.MAX_PAGE_OBJECTS:
                return Page(tuple(objects), has_more=True)
        return (
            Page(tuple(objects), has_more=False)
            if self.has_ordered_pages
            else build_single_page(objects, after)
        )

    async def get_once(self, path: str, limit: int | None) -> bytes:
        """See `ReadableStore.get`; the response has the size, so a limit costs no extra request."""
        response = await obstore.get_async(self._client, self._build_path(path))
        # The headers have arrived, the body hasn't been read: an object that is too large isn't
        # downloaded.
        self.check_size(path, int(response.meta["size"]), limit)
        return bytes(await response.bytes_async())

    async def put_once(self, path: str, data: bytes) -> None:
        """See `Store.put`."""
        # A single PUT is atomic and needs no cleanup. A multipart upload of a process that dies
        # leaves parts behind, which the bucket's owner pays for.
        await obstore.put_async(self._client, self._build_path(path), data, use_multipart=False)

    async def create_once(self, path: str, data: bytes) -> bool:
        """See `Store.create`."""
        try:
            await obstore.put_async(
                self._client,
                self._build_path(path),
                data,
                use_multipart=False,
                mode="create",
            )
        except obstore.exceptions.AlreadyExistsError as error:
            # S3 refuses a write with 409 also while another one is in progress, which may fail.
            if _find_group(S3_ERROR_CODE, str(error)) in CONFLICT_CODES:
                raise StoreUnavailableError(f"another process writes {path}") from error
            return False
        except (NotImplementedError, obstore.exceptions.NotSupportedError):
            return await self.create_after_check(path, data)
        except obstore.exceptions.GenericError as error:
            if _find_group(HTTP_STATUS, str(error)) != NOT_IMPLEMENTED_STATUS:
                raise
            return await self.create_after_check(path, data)
        return True

    async def exists_once(self, path: str) -> bool:
        """See `Store.exists`; obstore raises for a missing object."""
        await obstore.head_async(self._client, self._build_path(path))
        return True

    async def request(self, verb: str, path: str, call: Callable[[Store], Awaitable[T]]) -> T:
        """See `Store.request`; send it through fsspec if the bucket is in another region."""
        # The first request starts obstore's native threads. Remember this process, because its
        # forks lack these threads, and all earlier threads, because the exit waits for native ones
        # only.
        if not _requesting_pid:
            _requesting_pid.append(os.getpid())
            # all threads
            atexit.register(_wait_for_native_threads, frozenset(get_current_frames()))
        if self._fallback is None:
            with contextlib.suppress(WrongRegionError):
                return await super().request(verb, path, call)
        return await (await self._get_fallback()).request(verb, path, call)

    async def _get_fallback(self) -> FsspecStore:
        """Return the fsspec store for a bucket in another region; concurrent requests share it."""
        if self._fallback is None:
            from firstfault.store.fsspec_store import FsspecStore  # noqa: PLC0415 - rarely needed

            self._fallback = FsspecStore(self._uri, self._options, attempts=self._attempts)
            # A second redirected request can't run here and use the unopened store: opening doesn't
            # yield to the event loop.
            await self._fallback.__aenter__()
        return self._fallback

    def classify_error(self, error: Exception, verb: str) -> tuple[StorageErrorKind, str] | None:
        """See `Store.classify_error`; obstore's errors carry only text."""
        text = str(error)
        lacks_credentials = (
            isinstance(error, NoCredentialsError) or NoCredentialsError.__name__ in text
        )
        if lacks_credentials or _has_no_metadata_server(text):
            return StorageErrorKind.NO_CREDENTIALS, ""
        if not type(error).__module__.startswith("obstore") and not isinstance(
            error, OSError | ValueError
        ):
            return None
        status = _find_group(HTTP_STATUS, text)
        code = _find_group(S3_ERROR_CODE, text)
        number = int(status) if status else 0
        message = _find_group(S3_ERROR_MESSAGE, text) or text.partition("Debug source:")[0]
        detail = " ".join(message.split())[:300]
        # Before the status: S3 answers 404 for a missing bucket as well as for a missing object.
        if code in BUCKET_NOT_FOUND_CODES:
            return StorageErrorKind.BUCKET_NOT_FOUND, detail
        if isinstance(error, FileNotFoundError) or number == NOT_FOUND_STATUS:
            # A write needs no object, so 404 is about the place: a wrong endpoint, or a missing
            # bucket.
            not_found = (StorageErrorKind.BUCKET_NOT_FOUND, "the storage answered 404")
            return not_found if verb == "write" else (StorageErrorKind.OBJECT_NOT_FOUND, "")
        if (
            number in REDIRECT_STATUSES
            or "redirect" in text
            or code == "AuthorizationHeaderMalformed"
        ):
            return StorageErrorKind.WRONG_REGION, ""
        if number in REFUSED_STATUSES or type(error).__name__ in {
            "PermissionDeniedError",
            "UnauthenticatedError",
        }:
            return StorageErrorKind.REFUSED, detail
        is_lasting = 0 < number < FIRST_SERVER_ERROR_STATUS and number != TOO_MANY_REQUESTS_STATUS
        if is_lasting or isinstance(error, ValueError):
            return StorageErrorKind.OTHER, detail
        return StorageErrorKind.NO_ANSWER, detail

    def _build_path(self, relative: str) -> str:
        return join(self._root, relative) if self._root and relative else self._root or relative


def _wait_for_native_threads(before: frozenset[int]) -> None:
    """Wait at exit until obstore's threads have delivered their results,
    except threads that existed `before`.
    """
    # A native thread takes the GIL to deliver a result. If the interpreter is already finalizing,
    # Python ends that thread by unwinding it, which Rust turns into an abort of the process
    # (SIGABRT): a failed exit after success.
    deadline = time.monotonic() + THREADS_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(THREADS_POLL_SECONDS)  # releases the GIL
        known = before | {thread.ident for thread in threading.enumerate()}
        # only this lists threads of other languages
        if not get_current_frames().keys() - known:
            break


def _has_no_metadata_server(text: str) -> bool:
    """Whether no metadata server exists; one that fails or times out may still
    provide credentials later.
    """
    if METADATA_SERVER_ASKED not in text or "timed out" in text.lower():
        return False
    status = _find_group(HTTP_STATUS, text)
    return not status or int(status) == NOT_FOUND_STATUS


def _to_object_infos(entries: Iterable[Mapping[str, Any]], root: str) -> list[ObjectInfo]:
    """Convert obstore's entries, with names relative to `root` and without `root` itself."""
    return [
        ObjectInfo(
            entry["path"][len(root) :].lstrip("/"),
            entry["size"],
            to_nanoseconds(entry["last_modified"]),
        )
        for entry in entries
        if entry["path"] != root
    ]


def _find_group(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
