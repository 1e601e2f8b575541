"""The store over fsspec: a local folder, memory, S3 through s3fs,
and every other fsspec filesystem.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import functools
import inspect
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from firstfault.errors import AccessDeniedError, StoreError, StoreUnavailableError, UsageError
from firstfault.store import listings, settings
from firstfault.store.base import MAX_REQUEST_ATTEMPTS, StorageErrorKind, Store, T
from firstfault.store.fsspec_errors import classify_client_error, get_error_code, to_one_line
from firstfault.store.settings import build_storage_options, describe_missing_credentials
from firstfault.store.uris import join

FIRST_ANSWER_TIMEOUT_SECONDS = 8.0
"""For a storage's first response, seconds: Google's and Azure's clients retry for up to a minute.
"""
_CONFLICT_CODES = {"ConditionalRequestConflict", "OperationAborted"}
"""S3: another conditional write of the object is in progress."""
_REFUSED_CONDITION_CODES = {"PreconditionFailed", "412"}
_UNKNOWN_CONDITION_CODES = {"NotImplemented", "501"}
_UNKNOWN_PARAMETER = "ParamValidationError"
"""botocore's, before 1.35.20, for a condition that it doesn't know."""


class FsspecStore(Store):
    """A folder of objects over fsspec.

    Each store makes its own filesystem instance: the one that fsspec shares with flytekit caches
    listings and belongs to a different event loop. Asynchronous filesystems are awaited;
    synchronous ones run in a thread.
    """

    ordered_schemes = frozenset({"s3", "s3a"})  # elsewhere fsspec fetches all pages anyway

    def __init__(
        self,
        uri: str,
        options: Mapping[str, Any] | None = None,
        *,
        attempts: int = MAX_REQUEST_ATTEMPTS,
    ) -> None:
        super().__init__(uri, options, attempts)
        self._fs: Any = None
        self._root = ""
        self._has_answered = False

    async def open(self) -> None:
        """Make the filesystem.

        Raises:
            UsageError: the scheme is unknown, its package isn't installed, or a setting is invalid.
            AccessDeniedError: credentials are missing.
        """
        options: dict[str, Any] = {
            **build_storage_options(self._protocol, self._options),
            "skip_instance_cache": True,
        }
        try:
            filesystem_class = fsspec.get_filesystem_class(self._protocol)
            # Flyte 2 registers obstore's filesystems, which take other options, for all of its
            # process.
            if filesystem_class.__module__.startswith("obstore."):
                filesystem_class = resolve_name(known_implementations[self._protocol]["class"])
        except ImportError as error:
            extra = settings.find_storage(self._protocol).get("extra", "")
            how = f"in a clone pip install '.[{extra}]', else 'firstfault[{extra}]' from your index"
            reason = f"reading {self._uri} needs a package that is not installed ({error})"
            raise UsageError(
                f"{reason}; install the extra {extra}: {how}" if extra else reason
            ) from error
        except ValueError as error:
            raise UsageError(
                f"{self._uri}: unknown storage scheme {self._protocol!r}; {error}"
            ) from error
        if issubclass(filesystem_class, AsyncFileSystem):
            # By default fsspec runs its coroutines in a thread with a separate loop. This instance
            # is awaited in the caller's loop, so it must not outlive the loop. A cached listing
            # would hide documents that other nodes write.
            options |= {
                "asynchronous": True,
                "use_listings_cache": False,
                "loop": asyncio.get_running_loop(),
            }
        try:
            self._fs = filesystem_class(**options)
        except (ValueError, OSError) as error:
            if "credentials" in str(error):  # adlfs without an account
                raise AccessDeniedError(
                    f"cannot open {self._uri}: {describe_missing_credentials(self._protocol)}"
                ) from error
            raise UsageError(f"cannot open {self._uri}: {to_one_line(error)}") from error
        if self._protocol in self.ordered_schemes:
            self._fs.retries = 1  # nested retries would multiply the timeouts
        elif self._protocol in {"gs", "gcs"}:
            # gcsfs spends half a minute on six attempts and prints the traceback of the last; this
            # store retries
            request_without_retries = getattr(
                filesystem_class._request,  # noqa: SLF001 - no option for it
                "__wrapped__",
                None,
            )
            if request_without_retries is not None:
                self._fs._request = functools.partial(  # noqa: SLF001
                    request_without_retries, self._fs
                )
            logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
        # fsspec's documented hook
        self._root = str(self._fs._strip_protocol(self._uri)).rstrip("/")  # noqa: SLF001

    async def close(self) -> None:
        """Close the filesystem's session."""
        # s3fs and gcsfs warn if their session is still open when this event loop ends
        closer = getattr(self._fs, "_s3creator", None)
        if closer is not None:
            await closer.__aexit__(None, None, None)
            self._fs._make_s3_client = None  # noqa: SLF001
        session = getattr(self._fs, "_session", None)
        if session is not None and hasattr(session, "close"):
            await session.close()

    async def list_once(self, folder: str, token: str) -> tuple[Sequence[listings.ObjectInfo], str]:
        """See `Store.list_once`."""
        if self._protocol not in self.ordered_schemes:
            return await self._list_files("ls", folder), ""
        return await self._list_s3_page(
            folder, Delimiter="/", **({"ContinuationToken": token} if token else {})
        )

    async def page_once(self, after: str) -> listings.Page:
        """See `ReadableStore.page`."""
        if not self.has_ordered_pages:
            return listings.build_single_page(await self._list_files("find", ""), after)
        objects, token = await self._list_s3_page("", after)
        return listings.Page(tuple(objects), bool(token))

    async def get_once(self, path: str, limit: int | None) -> bytes:
        """See `ReadableStore.get`."""
        full_path = self._build_path(path)
        if limit is not None:
            # Two requests: an object that is replaced in between may have more bytes than this
            # size.
            info = await self._send_request("info", full_path)
            self.check_size(path, int(info["size"] or 0), limit)
        return bytes(await self._send_request("cat_file", full_path))

    async def put_once(self, path: str, data: bytes) -> None:
        """See `Store.put`."""
        full_path = self._build_path(path)
        if isinstance(self._fs, AsyncFileSystem):
            # An object storage shows an object only when its upload is complete, so no temporary
            # name is needed.
            await self._send_request("pipe_file", full_path, data)
            return
        await asyncio.to_thread(self._write_part, full_path, data, self._fs.mv)

    def _write_part(self, full_path: str, data: bytes, move: Callable[[str, str], T]) -> T:
        """Write a temporary file, `move` it to its name, and return what `move` returns."""
        # A reader may list the folder while this process writes, or is killed halfway: it must see
        # a whole file or none. A rename is atomic within a file system. The random part separates
        # concurrent writers of one name: a slow upload and its retry, or two pods on a shared
        # volume.
        part = f"{full_path}.{uuid.uuid4().hex}{listings.PARTIAL_FILE_SUFFIX}"
        self._fs.makedirs(full_path.rsplit("/", 1)[0], exist_ok=True)
        try:
            self._fs.pipe_file(part, data)
            return move(part, full_path)
        except Exception:
            # on a full disk the partial file would occupy the last bytes
            with contextlib.suppress(Exception):
                self._fs.rm_file(part)
            raise

    async def create_once(self, path: str, data: bytes) -> bool:
        """See `Store.create`."""
        full_path = self._build_path(path)
        if isinstance(self._fs, LocalFileSystem):
            return await asyncio.to_thread(self._write_part, full_path, data, _move_unless_exists)
        option = self._find_create_option()
        if option is None:
            return await self.create_after_check(path, data)
        try:
            await self._send_request("pipe_file", full_path, data, **option)
        except FileExistsError:
            return False
        except Exception as error:
            code = get_error_code(error)
            if code in _CONFLICT_CODES:
                raise StoreUnavailableError(f"another process writes {path}") from error
            if code in _REFUSED_CONDITION_CODES:
                return False
            if code not in _UNKNOWN_CONDITION_CODES and type(error).__name__ != _UNKNOWN_PARAMETER:
                raise
            return await self.create_after_check(path, data)
        return True

    def _find_create_option(self) -> dict[str, Any] | None:
        """Return the option by which the filesystem's `_pipe_file` only creates files, or None."""
        if not isinstance(self._fs, AsyncFileSystem):
            return None
        parameters = inspect.signature(self._fs._pipe_file).parameters  # noqa: SLF001 - its hook
        if "mode" in parameters:
            return {"mode": "create"}
        return {"overwrite": False} if "overwrite" in parameters else None

    async def exists_once(self, path: str) -> bool:
        """See `Store.exists`."""
        info = await self._send_request("info", self._build_path(path))
        return bool(info["type"] == "file")

    async def _list_files(self, call: str, folder: str) -> Sequence[listings.ObjectInfo]:
        """Return the files that fsspec's `call` (ls or find) lists; none for a missing folder."""
        path = self._build_path(folder)
        try:
            entries = await self._call_filesystem(call, path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return _to_object_infos(entries.values() if isinstance(entries, dict) else entries, path)

    async def _list_s3_page(
        self,
        folder: str,
        after: str = "",
        **request: str,
    ) -> tuple[list[listings.ObjectInfo], str]:
        """Return one page of S3's listing and its continuation token;
        s3fs's own methods fetch all pages.
        """
        bucket, _, key = self._build_path(folder).partition("/")
        prefix = f"{key}/" if key else ""
        if after:
            request["StartAfter"] = prefix + after

        request |= {"Bucket": bucket, "Prefix": prefix}

        async def request_page() -> Any:
            await self._fs.set_session()
            return await self._fs._call_s3(  # noqa: SLF001
                "list_objects_v2", MaxKeys=listings.MAX_PAGE_OBJECTS, **request
            )

        # One limit for making the client, which may look for credentials, and for the request.
        answer = await asyncio.wait_for(request_page(), _get_request_timeout_seconds())
        objects = [
            listings.ObjectInfo(
                item["Key"][len(prefix) :], int(item["Size"]), _get_modified_ns(item)
            )
            for item in answer.get("Contents", ())
            if item["Key"] != prefix
        ]
        return objects, (
            str(answer.get("NextContinuationToken", "")) if answer.get("IsTruncated") else ""
        )

    async def _send_request(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Send one request, with a timeout except for reads from clouds other than S3."""
        # the clients' own timeouts don't bound a request: they retry internally, or restart the
        # clock with each byte
        call = self._call_filesystem(name, *args, **kwargs)
        # A synchronous filesystem runs in a thread, which a timeout can't stop: it would continue
        # in the background.
        is_limited = self._protocol in self.ordered_schemes or name == "pipe_file"
        if is_limited and isinstance(self._fs, AsyncFileSystem):
            call = asyncio.wait_for(call, _get_request_timeout_seconds())
        return await call

    async def _call_filesystem(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._fs, AsyncFileSystem):
            return await getattr(self._fs, f"_{name}")(*args, **kwargs)
        return await asyncio.to_thread(getattr(self._fs, name), *args, **kwargs)

    async def request(self, verb: str, path: str, call: Callable[[Store], Awaitable[T]]) -> T:
        """See `Store.request`; probe with a small request before the first listing,
        which has no timeout.
        """
        may_hang = isinstance(self._fs, AsyncFileSystem) and not self.has_ordered_pages
        if verb == "list" and may_hang and not self._has_answered:
            # Two first listings at the same time both probe, which does no harm. Any response
            # counts, also "not found".
            first_request = super().request(
                "list", path, lambda client: client.exists_once(join(path, "error.pb"))
            )
            try:
                await asyncio.wait_for(first_request, FIRST_ANSWER_TIMEOUT_SECONDS)
            except asyncio.TimeoutError as error:
                failed_text = f"cannot list {join(self._uri, path)}"
                raise StoreUnavailableError(
                    f"{failed_text}: no answer within {FIRST_ANSWER_TIMEOUT_SECONDS:g} s; check the"
                    " network and the endpoint"
                ) from error
            except StoreUnavailableError:
                raise
            except StoreError:
                pass  # the storage responds; if the listing fails, too, its error is reported
            self._has_answered = True
        return await super().request(verb, path, call)

    def classify_error(self, error: Exception, verb: str) -> tuple[StorageErrorKind, str] | None:
        """See `Store.classify_error`."""
        return classify_client_error(error, verb)

    def _build_path(self, relative: str) -> str:
        return join(self._root, relative) if relative else self._root


def _move_unless_exists(part: str, full_path: str) -> bool:
    """Give a local file its name unless a file has it; return whether it got the name."""
    source = Path(part)
    target = Path(full_path)
    try:
        target.hardlink_to(source)  # unlike a rename, it fails if the name is taken
    except FileExistsError:
        source.unlink()
        return False
    except OSError:
        # A file system without hard links. Two calls at the same moment may both write.
        if not target.exists():
            source.replace(target)
            return True
        source.unlink()
        return False
    source.unlink()
    return True


def _get_request_timeout_seconds() -> float:
    """Return the timeout of one request, the same as obstore's."""
    return settings.CONNECT_TIMEOUT_SECONDS + settings.READ_TIMEOUT_SECONDS


def _to_object_infos(
    entries: Iterable[Mapping[str, Any]], folder: str
) -> list[listings.ObjectInfo]:
    """Return the files among fsspec's entries, with names relative to `folder`."""
    return [
        listings.ObjectInfo(
            str(entry["name"]).rstrip("/")[len(folder) :].lstrip("/"),
            int(entry["size"] or 0),
            _get_modified_ns(entry),
        )
        for entry in entries
        if entry["type"] == "file"
        # fsspec also lists an object with a name equal to the prefix
        and str(entry["name"]).rstrip("/") != folder
        and not str(entry["name"]).endswith(listings.PARTIAL_FILE_SUFFIX)
    ]


def _get_modified_ns(entry: Mapping[str, Any]) -> int | None:
    """Return an object's modification time, nanoseconds since the Unix epoch;
    the key depends on the filesystem.
    """
    for field in ("LastModified", "last_modified", "mtime", "updated", "created"):
        value = entry.get(field)
        if isinstance(value, dt.datetime):
            return listings.to_nanoseconds(value)
        if isinstance(value, int | float):
            return int(value * listings.NS_PER_SECOND)
    return None
