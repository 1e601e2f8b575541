"""What both clients share: the protocol of a store, URIs, settings, retries, errors, and the order of a listing."""

from __future__ import annotations

import abc
import datetime as dt
import enum
import itertools
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from firstfault import errors

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    name: str
    """Relative to the folder that was listed."""
    size: int
    """Bytes."""
    last_modified_ns: int | None = None
    """Nanoseconds since the Unix epoch by the storage's clock, often whole seconds; None if it is not known."""

    @property
    def base(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing."""

    objects: tuple[ObjectInfo, ...]
    """In the storage's order. Names are relative to the store's folder; those of subfolders contain slashes."""
    more: bool
    """Whether more objects may follow."""

    @property
    def in_order(self) -> bool:
        """Whether the objects are sorted by name."""
        names = [item.name for item in self.objects]
        return all(one < other for one, other in itertools.pairwise(names))


class ReadableStore(Protocol):
    """A folder of objects to read. All errors are `firstfault.errors.StoreError`; transient ones have been retried."""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""

    @property
    def pages_in_order(self) -> bool:
        """Whether `page` returns the first objects by name in one request.

        If False, or not known, a reader lists everything instead.
        """

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return the objects directly in `folder` (relative), by name; empty if it does not exist. Never cached."""

    async def page(self, after: str = "") -> Page:
        """Return the objects in the store's folder and below it whose names sort after `after`, which need not exist.

        If `pages_in_order`, at most 1,000, with one request; else all of them.
        """

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return an object's bytes.

        Raises:
            ObjectNotFoundError: the object does not exist.
            ObjectTooLargeError: it has more than `limit` bytes. A limit may cost a request; leave it out if a listing
                has given the size.
        """


class Trouble(enum.Enum):
    """What an error of a client means."""

    NO_CREDENTIALS = enum.auto()
    REFUSED = enum.auto()
    NO_OBJECT = enum.auto()
    NO_BUCKET = enum.auto()
    OTHER_REGION = enum.auto()
    """The detail is the bucket's region, empty if it is not known."""
    NO_ANSWER = enum.auto()
    """The request may succeed if it is sent again."""
    OTHER = enum.auto()


class OtherRegionError(errors.StoreError):
    """The bucket is in another region than the client's."""


class Store(abc.ABC):
    """A folder of objects to read and to write. What is the same for both clients: it sends requests again.

    A client has the methods that send a request once. The arguments are those of `firstfault.store.open_store`.
    """

    ordered: ClassVar[frozenset[str]]
    """Schemes of storages that list by name, and whose pages the client can request one by one."""

    def __init__(self, uri: str, options: Mapping[str, Any] | None, attempts: int) -> None:
        self._uri = uri.rstrip("/") or uri
        self._protocol = protocol_of(uri)
        self._options = options
        self._attempts = attempts
        self._is_open = False

    async def open(self) -> None:  # noqa: B027 - not every client has something to do
        """Prepare for requests; send none."""

    async def close(self) -> None:  # noqa: B027
        """Close all connections."""

    @abc.abstractmethod
    async def list_once(self, folder: str, token: str) -> tuple[Sequence[ObjectInfo], str]:
        """Return objects directly in `folder`, and the token that asks for more of them; empty: there are no more.

        There are none if the folder does not exist. The first token is empty.
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
    async def exists_once(self, path: str) -> bool:
        """See `Store.exists`; the client may instead raise that there is no such object."""

    @abc.abstractmethod
    def trouble(self, error: Exception, verb: str) -> tuple[Trouble, str] | None:
        """Return what an error of the client means, with its text in one line; None if the storage is not at fault."""

    @property
    def uri(self) -> str:
        """The folder, without a trailing slash."""
        return self._uri

    @property
    def pages_in_order(self) -> bool:
        """See `ReadableStore.pages_in_order`; S3's directory buckets are not sorted."""
        bucket = self._uri.split("://", 1)[-1].partition("/")[0]
        return self._protocol in self.ordered and not bucket.endswith("--x-s3")

    async def __aenter__(self) -> Self:
        await self.open()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        await self.close()

    async def list(self, folder: str = "") -> list[ObjectInfo]:
        """See `ReadableStore.list`."""
        part, token = await self._part(folder, "")
        found = list(part)
        while token:
            part, token = await self._part(folder, token)
            found += part
        return by_name(found)

    async def _part(self, folder: str, token: str) -> tuple[Sequence[ObjectInfo], str]:
        # a request of its own: if it fails, the listing does not begin again
        return await self.request("list", folder, lambda client: client.list_once(folder, token))

    async def page(self, after: str = "") -> Page:
        """See `ReadableStore.page`."""
        return await self.request("list", "", lambda client: client.page_once(after))

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """See `ReadableStore.get`."""
        return await self.request("read", path, lambda client: client.get_once(path, limit))

    async def put(self, path: str, data: bytes) -> None:
        """Write an object atomically: a reader sees all of it or none of it."""
        await self.request("write", path, lambda client: client.put_once(path, data))

    async def exists(self, path: str) -> bool:
        """Whether the object exists."""
        try:
            return await self.request("read", path, lambda client: client.exists_once(path))
        except errors.ObjectNotFoundError:
            return False

    async def request(self, verb: str, path: str, call: Callable[[Store], Awaitable[T]]) -> T:
        """Return the result of `call`; call it again, after a pause, while the storage does not answer.

        `verb` is list, read or write; `path` is relative to the store's folder. `call` sends one request of the client
        that it gets.

        Raises:
            firstfault.errors.StoreError: the last error.
        """
        import stamina  # noqa: PLC0415 - slow, and only needed for a request

        if not self._is_open:
            raise RuntimeError("the store is closed; use it inside `async with`")
        async for attempt in stamina.retry_context(
            on=errors.StoreUnavailableError, attempts=self._attempts, timeout=_TIMEOUT_S, wait_initial=0.1, wait_max=2.0
        ):
            with attempt:
                try:
                    return await call(self)
                except Exception as error:
                    raise self._typed(error, verb, join(self._uri, path)) from error
        raise AssertionError  # stamina either returns or raises

    def check_size(self, path: str, size: int, limit: int | None) -> None:
        """Raise `ObjectTooLargeError` if an object has more bytes than the limit."""
        if limit is not None and size > limit:
            raise errors.ObjectTooLargeError(f"{join(self._uri, path)} has {size} bytes, {limit} are allowed")

    def _typed(self, error: Exception, verb: str, uri: str) -> Exception:
        """Return our error for one of the client's; any other error as it is."""
        found = self.trouble(error, verb) if not isinstance(error, errors.StoreError) else None
        if found is None:
            return error
        trouble, detail = found
        refused = f"refused ({detail}); check the credentials and the {verb} permission"
        silent = f"the storage did not answer ({detail}); check the endpoint"
        kind, advice = {
            Trouble.NO_CREDENTIALS: (errors.AccessDeniedError, no_credentials(self._protocol)),
            Trouble.REFUSED: (errors.AccessDeniedError, refused),
            Trouble.NO_OBJECT: (errors.ObjectNotFoundError, "there is no such object"),
            Trouble.NO_BUCKET: (errors.StoreError, f"{detail}; check the bucket's name"),
            Trouble.OTHER_REGION: (OtherRegionError, _other_region(detail)),
            Trouble.NO_ANSWER: (errors.StoreUnavailableError, silent),
            Trouble.OTHER: (errors.StoreError, detail),
        }[trouble]
        return kind(f"cannot {verb} {uri}: {advice}")


# --- URIs -------------------------------------------------------------------------------------------------------------


def protocol_of(uri: str) -> str:
    """Return the scheme of `uri`; ``file`` for a plain path."""
    return uri.split("://", 1)[0].lower() if "://" in uri else "file"


def is_remote(uri: str) -> bool:
    """Whether `uri` is not on this machine."""
    return protocol_of(uri) not in {"file", "local", "memory"}


def join(folder: str, *parts: str) -> str:
    """Append `parts` to a folder, with one slash between each."""
    return "/".join([folder.rstrip("/"), *(part.strip("/") for part in parts if part.strip("/"))])


def split_name(uri: str) -> tuple[str, str]:
    """Return (folder, name) of ``folder/name``; the folder keeps its scheme and is ``.`` for a bare name."""
    folder, slash, name = uri.rstrip("/").rpartition("/")
    return folder or slash or ".", name


# --- retries of requests that the storage did not answer --------------------------------------------------------------

ATTEMPTS = 4
_TIMEOUT_S = 15.0
"""No retry after this time, seconds."""


# --- listings ---------------------------------------------------------------------------------------------------------

PAGE = 1000
"""The most objects in one LIST answer of S3 and GCS."""
PART = ".part"
"""Suffix of a file that is being written to a local folder; listings leave it out."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
NANO = 1_000_000_000


def by_name(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the objects in the order of their names."""
    return sorted(objects, key=lambda item: item.name)


def only_page(objects: Iterable[ObjectInfo], after: str) -> Page:
    """Return all objects of a complete listing behind the name `after` as one page: another would list them again."""
    return Page(tuple(by_name(item for item in objects if item.name > after)), more=False)


def nanoseconds(moment: dt.datetime) -> int:
    """Return nanoseconds since the Unix epoch; a moment without a time zone is in UTC."""
    since = (moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * NANO + since.microseconds * 1000


# --- credentials and endpoints ----------------------------------------------------------------------------------------

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run 'gcloud auth application-default login'"
_MICROSOFT = (
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY "
    "(or FLYTE_AZURE_STORAGE_ACCOUNT_NAME and FLYTE_AZURE_STORAGE_ACCOUNT_KEY)"
)
_WHAT_TO_SET = {"gs": _GOOGLE, "gcs": _GOOGLE, "az": _MICROSOFT, "abfs": _MICROSOFT, "abfss": _MICROSOFT}
_AMAZON = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or FLYTE_AWS_ACCESS_KEY_ID and FLYTE_AWS_SECRET_ACCESS_KEY)"

AZURE = {
    "account_name": "FLYTE_AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "FLYTE_AZURE_STORAGE_ACCOUNT_KEY",
    "client_id": "FLYTE_AZURE_CLIENT_ID",
    "client_secret": "FLYTE_AZURE_CLIENT_SECRET",
    "tenant_id": "FLYTE_AZURE_TENANT_ID",
}
_AWS = {"key": "FLYTE_AWS_ACCESS_KEY_ID", "secret": "FLYTE_AWS_SECRET_ACCESS_KEY"}
_OPTIONS = {"s3": _AWS, "s3a": _AWS, "az": AZURE, "abfs": AZURE, "abfss": AZURE}
"""Options of fsspec, and flytekit's variables, by scheme."""


def no_credentials(protocol: str) -> str:
    """Return the advice for a client that finds no credentials."""
    return f"no credentials; {_WHAT_TO_SET.get(protocol, _AMAZON)}"


def _other_region(region: str) -> str:
    """Return the advice for a bucket in another region than the client's."""
    where = f"the bucket is in the region {region}" if region else "the bucket is in another region"
    return f"{where}; set AWS_DEFAULT_REGION={region or '<its region>'}"


def storage_options(protocol: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fsspec storage options for `protocol`.

    They are flytekit's variables ``FLYTE_AWS_*`` and ``FLYTE_AZURE_*``; `given` overrides them. The client itself
    finds what is not set there (for S3: ``AWS_*``, profiles, instance roles).

    Raises:
        UsageError: the endpoint is not a URL.
    """
    names = _OPTIONS.get(protocol, {})
    options: dict[str, Any] = {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
    if protocol in {"s3", "s3a"}:
        options |= _s3_options()
    return {**options, **(given or {})}


def _s3_options() -> dict[str, Any]:
    options: dict[str, Any] = {
        # else s3fs sends a HEAD before every GET
        "max_concurrency": 1,
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": 64,
            # the store retries; botocore's retries would multiply the timeouts
            "retries": {"total_max_attempts": 1},
        },
    }
    endpoints = ("FLYTE_AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next(filter(None, map(os.environ.get, endpoints)), None)
    if endpoint:
        if "://" not in endpoint:
            raise errors.UsageError(f"the S3 endpoint must be a URL such as https://host:port, not {endpoint!r}")
        options["endpoint_url"] = endpoint
    return options
