"""The protocol of a store, and what both clients share: retries and typed errors."""

from __future__ import annotations

import abc
import contextlib
import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from firstfault import errors
from firstfault.store.listings import ObjectInfo, Page, sort_by_name
from firstfault.store.settings import describe_missing_credentials, describe_wrong_region
from firstfault.store.uris import get_scheme, join

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_REQUEST_ATTEMPTS = 4
RETRY_TIMEOUT_SECONDS = 15.0
"""No retry starts later than this after the first request, seconds."""

T = TypeVar("T")


class ReadableStore(Protocol):
    """A folder of objects to read. All errors are `firstfault.errors.StoreError`;
    transient ones have been retried.
    """

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""

    @property
    def has_ordered_pages(self) -> bool:
        """Whether `page` returns the first objects by name in one request.

        If False, or not known, a reader lists everything instead.
        """

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder` (relative) by name, or none if it doesn't exist.
        The result is never cached.
        """

    async def page(self, after: str = "") -> Page:
        """Return the objects at or below the store's folder with names after `after`,
        which need not exist.

        If `has_ordered_pages`, at most 1,000, with one request; else all of them.
        """

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes.

        Raises:
            ObjectNotFoundError: the object doesn't exist.
            ObjectTooLargeError: it has more than `limit` bytes. A limit may cost a request; leave
                it out if a listing has given the size.
        """


class StorageErrorKind(enum.Enum):
    """Meaning of a client's error."""

    NO_CREDENTIALS = enum.auto()
    REFUSED = enum.auto()
    OBJECT_NOT_FOUND = enum.auto()
    BUCKET_NOT_FOUND = enum.auto()
    WRONG_REGION = enum.auto()
    """The detail is the bucket's region; empty if unknown."""
    NO_ANSWER = enum.auto()
    """Transient: the request may succeed if it is sent again."""
    OTHER = enum.auto()


class WrongRegionError(errors.StoreError):
    """The bucket is in another region than the client's."""


class Store(abc.ABC):
    """A folder of objects to read and write; retries requests and types errors,
    the same for both clients.

    A client implements the ``*_once`` methods, which send one request each, and `classify_error`.
    Arguments as in `firstfault.store.open_store`.
    """

    ordered_schemes: ClassVar[frozenset[str]]
    """Schemes with listings sorted by name that the client can request page by page."""

    def __init__(self, uri: str, options: Mapping[str, Any] | None, attempts: int) -> None:
        self._uri = uri.rstrip("/") or uri
        self._protocol = get_scheme(uri)
        self._options = options
        self._attempts = attempts
        self._is_open = False

    async def open(self) -> None:  # noqa: B027 - obstore needs no preparation
        """Prepare for requests without sending one."""

    async def close(self) -> None:  # noqa: B027
        """Close all connections."""

    @abc.abstractmethod
    async def list_once(self, folder: str, token: str) -> tuple[Sequence[ObjectInfo], str]:
        """Return objects directly in `folder`, and the continuation token. The token is empty if
        the listing is complete.

        A missing folder has no objects. The first token is empty.
        """

    @abc.abstractmethod
    async def page_once(self, after: str) -> Page:
        """See `ReadableStore.page`."""

    @abc.abstractmethod
    async def get_once(self, path: str, limit: int | None) -> bytes:
        """See `ReadableStore.get`."""

    @abc.abstractmethod
    async def put_once(self, path: str, data: bytes) -> None:
        """See `Store.put`."""

    @abc.abstractmethod
    async def create_once(self, path: str, data: bytes) -> bool:
        """See `Store.create`."""

    @abc.abstractmethod
    async def exists_once(self, path: str) -> bool:
        """See `Store.exists`; a client may raise its error for a missing object
        instead of returning False.
        """

    @abc.abstractmethod
    def classify_error(self, error: Exception, verb: str) -> tuple[StorageErrorKind, str] | None:
        """Return the meaning of the client's error, and its text in one line;
        None if it isn't the storage's error.
        """

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        return self._uri

    @property
    def has_ordered_pages(self) -> bool:
        """See `ReadableStore.has_ordered_pages`; S3's directory buckets list in no order."""
        bucket = self._uri.split("://", 1)[-1].partition("/")[0]
        return self._protocol in self.ordered_schemes and not bucket.endswith("--x-s3")

    async def __aenter__(self) -> Self:
        await self.open()
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        # Marked as closed first: closing yields to the event loop, and another task must not send a
        # request through a client that is half closed.
        await self.close()

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """See `ReadableStore.list`."""
        part, token = await self._list_part(folder, "")
        objects = list(part)
        # Not a snapshot: an object written between two pages is missing if its name sorts before
        # the next page. Readers list again.
        while token:
            part, token = await self._list_part(folder, token)
            objects += part
        return sort_by_name(objects)

    async def _list_part(self, folder: str, token: str) -> tuple[Sequence[ObjectInfo], str]:
        # retried page by page: if page 7 of a large listing fails, pages 1 to 6 aren't requested
        # again
        return await self.request("list", folder, lambda client: client.list_once(folder, token))

    async def page(self, after: str = "") -> Page:
        """See `ReadableStore.page`."""
        return await self.request("list", "", lambda client: client.page_once(after))

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """See `ReadableStore.get`."""
        return await self.request("read", path, lambda client: client.get_once(path, limit))

    async def put(self, path: str, data: bytes) -> None:
        """Write an object atomically: a reader sees all of it or none of it."""
        # A timeout doesn't show whether the storage has the object. Repeating the write is safe:
        # same name, same bytes.
        await self.request("write", path, lambda client: client.put_once(path, data))

    async def create(self, path: str, data: bytes) -> bool:
        """Write an object unless it exists; return whether this call has written it.

        Of concurrent calls, one writes. A storage without conditional writes is asked first whether
        the object exists, so there two calls at the same moment may both write. After an error that
        was retried, the existing object may be this call's own.
        """
        return await self.request("write", path, lambda client: client.create_once(path, data))

    async def exists(self, path: str) -> bool:
        """Whether the object exists."""
        try:
            return await self.request("read", path, lambda client: client.exists_once(path))
        except errors.ObjectNotFoundError:
            return False

    async def request(self, verb: str, path: str, call: Callable[[Store], Awaitable[T]]) -> T:
        """Return the result of `call`, which sends one request;
        repeat it with backoff on transient errors.

        `verb` ("list", "read" or "write") and `path`, relative to the store's folder, appear in
        error messages.

        Raises:
            firstfault.errors.StoreError: the last error.
        """
        import stamina  # noqa: PLC0415 - slow, and only needed for a request

        if not self._is_open:
            raise RuntimeError("the store is closed; use it inside `async with`")
        lasting: list[Exception] = []
        async for attempt in stamina.retry_context(
            on=errors.StoreUnavailableError,
            attempts=self._attempts,
            timeout=RETRY_TIMEOUT_SECONDS,
            wait_initial=0.1,
            wait_max=2.0,
        ):
            with attempt:
                try:
                    return await call(self)
                except Exception as error:  # noqa: BLE001 - raised below
                    lasting.append(self._raise_if_transient(error, verb, join(self._uri, path)))
                break
        # Raised here, because stamina's state would keep an error that it has seen, and with it the
        # frames of all callers, in a reference cycle. Taken out of the list for the same reason.
        raise lasting.pop()

    def _raise_if_transient(self, error: Exception, verb: str, uri: str) -> Exception:
        """Convert a client's error. Return it if another try would fail, too.

        Raises:
            firstfault.errors.StoreUnavailableError: another try may succeed.
        """
        converted = self._to_store_error(error, verb, uri)
        if converted is not error:
            converted.__cause__ = error
        if isinstance(converted, errors.StoreUnavailableError):
            raise converted
        return converted

    async def create_after_check(self, path: str, data: bytes) -> bool:
        """Write an object unless it exists, on a storage without conditional writes."""
        with contextlib.suppress(FileNotFoundError):
            if await self.exists_once(path):
                return False
        await self.put_once(path, data)
        return True

    def check_size(self, path: str, size: int, limit: int | None) -> None:
        """Raise `ObjectTooLargeError` if an object has more bytes than the limit."""
        if limit is not None and size > limit:
            raise errors.ObjectTooLargeError(
                f"{join(self._uri, path)} has {size} bytes, {limit} are allowed"
            )

    def _to_store_error(self, error: Exception, verb: str, uri: str) -> Exception:
        """Convert a client's error to a `StoreError`; return any other error unchanged."""
        classified = (
            self.classify_error(error, verb) if not isinstance(error, errors.StoreError) else None
        )
        if classified is None:
            return error
        kind, detail = classified
        error_type: type[errors.StoreError]
        match kind:
            case StorageErrorKind.NO_CREDENTIALS:
                error_type = errors.AccessDeniedError
                advice = describe_missing_credentials(self._protocol)
            case StorageErrorKind.REFUSED:
                error_type = errors.AccessDeniedError
                advice = f"refused ({detail}); check the credentials and the {verb} permission"
            case StorageErrorKind.OBJECT_NOT_FOUND:
                error_type, advice = errors.ObjectNotFoundError, "no such object"
            case StorageErrorKind.BUCKET_NOT_FOUND:
                error_type = errors.StoreError
                advice = f"{detail}; check the bucket's name and the endpoint"
            case StorageErrorKind.WRONG_REGION:
                error_type, advice = WrongRegionError, describe_wrong_region(detail)
            case StorageErrorKind.NO_ANSWER:
                error_type = errors.StoreUnavailableError
                advice = f"the storage did not answer ({detail}); check the endpoint"
            case StorageErrorKind.OTHER:
                error_type, advice = errors.StoreError, detail
        return error_type(f"cannot {verb} {uri}: {advice}")
