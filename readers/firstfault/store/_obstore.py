"""The store over obstore: S3, Google Cloud Storage and Azure natively. Faster to import and per request than fsspec."""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import json
import os
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore

from firstfault.store import _base
from firstfault.store._base import ObjectInfo, Page, join, protocol_of

if TYPE_CHECKING:
    from firstfault.store._fsspec import FsspecStore

_CHUNK = 250
"""Objects per chunk of a listing; divides `PAGE`, so that a page needs no further request."""
_ASKED_THE_CLOUD = "performing token request"
"""In obstore's error where a machine of a cloud would have been asked for credentials, and none answers."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
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


class ObstoreStore(_base.Store):
    """A folder of objects over `client`, an obstore store of its bucket or container.

    `options` are fsspec's; used if the bucket turns out to be in another region, which only fsspec follows.
    """

    ordered = frozenset({"s3", "s3a", "gs", "gcs"})  # Azure cannot start behind a name

    def __init__(
        self, uri: str, client: Any, options: Mapping[str, Any] | None = None, *, attempts: int = _base.ATTEMPTS
    ) -> None:
        super().__init__(uri, options, attempts)
        self._client = client
        self._root = self._uri.split("://", 1)[1].partition("/")[2]
        self._fallback: FsspecStore | None = None

    async def close(self) -> None:
        """Close the store that took this one's place."""
        if self._fallback is not None:
            await self._fallback.__aexit__(None, None, None)

    async def list_once(self, folder: str, token: str) -> tuple[Sequence[ObjectInfo], str]:  # noqa: ARG002 - see below
        """See `Store.list_once`; obstore fetches all pages by itself."""
        root = self._path(folder)
        found = await obstore.list_with_delimiter_async(self._client, root or None)
        return _objects(found["objects"], root), ""

    async def page_once(self, after: str) -> Page:
        """See `ReadableStore.page`."""
        root = self._root
        offset = join(root, after) if root else after
        is_start = self.pages_in_order and after
        stream = obstore.list(self._client, root or None, offset=offset if is_start else None, chunk_size=_CHUNK)
        objects: list[ObjectInfo] = []
        async for chunk in stream:
            objects += _objects(chunk, root)
            if self.pages_in_order and len(objects) >= _base.PAGE:
                return Page(tuple(objects), more=True)
        return Page(tuple(objects), more=False) if self.pages_in_order else _base.only_page(objects, after)

    async def get_once(self, path: str, limit: int | None) -> bytes:
        """See `ReadableStore.get`. A limit needs no extra request here."""
        found = await obstore.get_async(self._client, self._path(path))
        self.check_size(path, int(found.meta["size"]), limit)
        return bytes(await found.bytes_async())

    async def put_once(self, path: str, data: bytes) -> None:
        """See `Store.put`."""
        await obstore.put_async(self._client, self._path(path), data, use_multipart=False)

    async def exists_once(self, path: str) -> bool:
        """See `Store.exists`; obstore raises that there is no such object."""
        await obstore.head_async(self._client, self._path(path))
        return True

    async def request(self, verb: str, path: str, call: Callable[[_base.Store], Awaitable[_base.T]]) -> _base.T:
        """See `Store.request`; if the bucket is in another region, fsspec sends it."""
        if not _first_pid:
            _first_pid.append(os.getpid())
            atexit.register(_await_threads, frozenset(sys._current_frames()))  # noqa: SLF001 - all threads
        if self._fallback is None:
            with contextlib.suppress(_base.OtherRegionError):
                return await super().request(verb, path, call)
        return await (await self._other_store()).request(verb, path, call)

    async def _other_store(self) -> FsspecStore:
        """Return the store that takes this one's place; requests that are redirected at the same time share it."""
        if self._fallback is None:
            from firstfault.store._fsspec import FsspecStore  # noqa: PLC0415 - rarely needed

            # botocore follows S3's redirect to the bucket's region; obstore does not
            self._fallback = FsspecStore(self._uri, self._options, attempts=self._attempts)
            await self._fallback.__aenter__()  # other requests do not run meanwhile: it awaits nothing
        return self._fallback

    def trouble(self, error: Exception, verb: str) -> tuple[_base.Trouble, str] | None:
        """See `Store.trouble`; obstore's errors have a text alone."""
        text = str(error)
        if isinstance(error, NoCredentialsError) or NoCredentialsError.__name__ in text or _has_no_cloud(text):
            return _base.Trouble.NO_CREDENTIALS, ""
        if not type(error).__module__.startswith("obstore") and not isinstance(error, OSError | ValueError):
            return None
        status, code = _first(_STATUS, text), _first(_CODE, text)
        number = int(status) if status else 0
        detail = " ".join((_first(_MESSAGE, text) or text.split("Debug source:", maxsplit=1)[0]).split())[:300]
        if code in _NO_BUCKET:
            return _base.Trouble.NO_BUCKET, detail
        if isinstance(error, FileNotFoundError) or (number == _NOT_FOUND and verb != "write"):
            return _base.Trouble.NO_OBJECT, ""
        if number in _REDIRECT or "redirect" in text or code == "AuthorizationHeaderMalformed":
            return _base.Trouble.OTHER_REGION, ""
        if number in _REFUSED or type(error).__name__ in {"PermissionDeniedError", "UnauthenticatedError"}:
            return _base.Trouble.REFUSED, detail
        if isinstance(error, ValueError) or (number and number < _SERVER_ERROR and number != _TOO_MANY_REQUESTS):
            return _base.Trouble.OTHER, detail
        return _base.Trouble.NO_ANSWER, detail

    def _path(self, relative: str) -> str:
        return join(self._root, relative) if self._root and relative else self._root or relative


def _await_threads(before: frozenset[int]) -> None:
    """Wait at the process's end until obstore's threads have handed over their results.

    They take Python's lock for it. A thread that wants it when the interpreter has begun to end aborts the process
    (SIGABRT), as Python ends such a thread in a way that Rust does not allow. Threads from `before` the
    first request are not waited for.
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
        ObjectInfo(entry["path"][len(root) :].lstrip("/"), entry["size"], _base.nanoseconds(entry["last_modified"]))
        for entry in entries
        if entry["path"] != root
    ]


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[1] if found else ""


# --- the client's settings, from the same sources as fsspec's --------------------------------------------------------

_CREDENTIALS_LAST = dt.timedelta(minutes=10)
"""How long obstore uses credentials of botocore, which renews those that expire, before it asks again."""
_BUCKET = re.compile(r"[A-Za-z0-9._-]{3,255}")
_DEFAULT_REGION = "us-east-1"
_S3_OPTIONS = {"key", "secret", "token", "anon", "endpoint_url", "client_kwargs", "requester_pays"}
_S3_CLIENT_OPTIONS = {"endpoint_url", "region_name"}
_GCS_OPTIONS = {"token", "project", "endpoint_url"}
_GCS_CREDENTIALS = {"service_account", "authorized_user"}
_NATIVE_VARIABLES = (
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
)
"""Variables of a service account's and a container's role: obstore finds those credentials itself."""


class NoCredentialsError(Exception):
    """botocore found no credentials."""


def client_for(uri: str, given: Mapping[str, Any] | None) -> Any:
    """Return an obstore store for the bucket of `uri`; None if obstore does not support its scheme or settings.

    Raises:
        firstfault.errors.UsageError: a setting is invalid.
    """
    place = uri.rstrip("/").split("://", 1)[-1]
    bucket, _, path = place.partition("/")
    segments = path.split("/") if path else []
    if not _BUCKET.fullmatch(bucket) or any(segment in {"", ".", ".."} for segment in segments):
        return None  # obstore refuses such names, fsspec does not
    protocol = protocol_of(uri)
    if protocol in {"s3", "s3a"}:
        return _s3(bucket, given)
    if protocol in {"gs", "gcs"}:
        return _gcs(bucket, given)
    return _azure(bucket, given) if protocol == "az" else None


def _client(kind: str, bucket: str, endpoint: str, config: Mapping[str, Any]) -> Any:
    import obstore.store  # noqa: PLC0415 - fsspec's settings do not need it

    options = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": dt.timedelta(seconds=_base.CONNECT_TIMEOUT_S),
        "timeout": dt.timedelta(seconds=_base.READ_TIMEOUT_S),
    }
    # the store retries; retries inside obstore would multiply the timeouts
    retries = {"max_retries": 0}
    return getattr(obstore.store, kind)(bucket, client_options=options, retry_config=retries, **config)


# --- S3 -------------------------------------------------------------------------------------------------------------


def _s3(bucket: str, given: Mapping[str, Any] | None) -> Any:
    given = dict(given or {})
    client = dict(given.get("client_kwargs") or {})
    if not set(given) <= _S3_OPTIONS or not set(client) <= _S3_CLIENT_OPTIONS:
        return None
    options = _base.storage_options("s3", given)
    endpoint = client.get("endpoint_url") or options.get("endpoint_url") or ""
    config: dict[str, Any] = {"region": client.get("region_name") or _region(endpoint)}
    if endpoint:
        config["endpoint"] = endpoint
    if given.get("requester_pays"):
        config["request_payer"] = True
    key, secret, token = options.get("key"), options.get("secret"), options.get("token")
    if options.get("anon"):
        config["skip_signature"] = True
    elif bool(key) != bool(secret):
        return None  # only botocore combines a key and a secret of two sources
    else:
        provider = _fixed(key, secret, token) if key else _credentials()
        if provider is not None:
            config["credential_provider"] = provider
    return _client("S3Store", bucket, endpoint, config)


def _region(endpoint: str) -> str:
    named = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")
    if named or endpoint:
        return named or _DEFAULT_REGION
    files = (os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"), "~/.aws/credentials")
    session = _botocore_session() if any(Path(name).expanduser().is_file() for name in files) else None
    return str(session.get_config_variable("region") or _DEFAULT_REGION) if session is not None else _DEFAULT_REGION


def _fixed(key: Any, secret: Any, token: Any) -> Callable[[], dict[str, Any]]:
    """Return a provider of these credentials alone; obstore by itself would add AWS_SESSION_TOKEN."""
    return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token or None, "expires_at": None}


def _credentials() -> Callable[[], dict[str, Any]] | None:
    """Return a provider of the credentials that botocore finds; None if obstore finds the same ones itself."""
    environment = os.environ
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        return _fixed(key, secret, environment.get("AWS_SESSION_TOKEN"))
    if not environment.get("AWS_PROFILE") and any(all(map(environment.get, names)) for names in _NATIVE_VARIABLES):
        return None
    session = _botocore_session()
    return _of_botocore(session) if session is not None else None


def _of_botocore(session: Any) -> Callable[[], dict[str, Any]]:
    """Return a provider of a profile's, single sign-on's or an instance's credentials, looked up on first use."""

    def provide() -> dict[str, Any]:
        found = session.get_credentials()  # which botocore keeps
        if found is None:
            raise NoCredentialsError(NoCredentialsError.__name__)
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.timezone.utc) + _CREDENTIALS_LAST,
        }

    return provide


def _botocore_session() -> Any:
    try:
        import botocore.session  # noqa: PLC0415 - slow, and rarely needed
    except ImportError:
        return None
    return botocore.session.get_session()


# --- Google Cloud Storage -------------------------------------------------------------------------------------------


def _gcs(bucket: str, given: Mapping[str, Any] | None) -> Any:
    options = dict(given or {})
    if not set(options) <= _GCS_OPTIONS:
        return None
    config: dict[str, Any] = {}
    endpoint = str(options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or "")
    if endpoint and "://" not in endpoint:
        return None  # gcsfs accepts special values
    token = options.get("token") or ("anon" if endpoint else None)
    if token == "anon":  # noqa: S105 - gcsfs's word for no credentials
        config["skip_signature"] = True
    elif token not in {None, "google_default"} or not _google_key_is_known():
        return None
    if endpoint:
        config["base_url"] = endpoint
    return _client("GCSStore", bucket, endpoint, config)


def _google_key_is_known() -> bool:
    file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if not file:
        return True
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("type") in _GCS_CREDENTIALS


# --- Azure ----------------------------------------------------------------------------------------------------------


def _azure(container: str, given: Mapping[str, Any] | None) -> Any:
    if not set(given or {}) <= set(_base.AZURE):
        return None
    options = _base.storage_options("az", given)
    if os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return None  # adlfs reads it, obstore does not
    config = {option: options[option] for option in _base.AZURE if options.get(option)}
    if not (config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
        return None
    return _client("AzureStore", container, "", config)
