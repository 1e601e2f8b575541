"""What the store over fsspec does beyond the conformance suite: errors, retries, settings, URIs."""

import asyncio
import datetime as dt
import errno
import gc
import resource
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import stamina
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem

from firstfault.errors import (
    AccessDeniedError,
    ObjectNotFoundError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from firstfault.store import CLIENT_VARIABLE, is_remote, join, open_store, split_name
from firstfault.store.fsspec_store import FsspecStore
from firstfault.store.settings import build_storage_options
from firstfault.utils.run_sync import run_sync


@pytest.fixture(autouse=True)
def _without_waiting() -> Iterator[None]:
    stamina.set_testing(True, attempts=3)
    yield
    stamina.set_testing(False)


def run_with_store(uri: Path | str, action: Callable[[FsspecStore], Awaitable[Any]]) -> Any:
    async def entered() -> Any:
        async with open_store(str(uri)) as store:
            return await action(store)

    return run_sync(entered())


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a-file/error.pb", "a-file/below/error.pb"])
def test_an_unwritable_folder_is_named_and_left_empty(tmp_path: Path, name: str) -> None:
    """A write below a file raises an error that names the path, not ObjectNotFoundError,
    and leaves nothing.
    """
    (tmp_path / "a-file").write_bytes(b"x")
    with pytest.raises(StoreError, match=rf"cannot write {tmp_path}/{name}") as caught:
        run_with_store(tmp_path, lambda store: store.put(name, b"x"))
    assert not isinstance(caught.value, ObjectNotFoundError)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_partly_written_file_is_removed(tmp_path: Path) -> None:
    """Nothing is left of a file that could only be written in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StoreError, match="File too large"):
            run_with_store(tmp_path, lambda store: store.put("errors/a.pb", bytes(5000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "errors").iterdir()) == []


def test_a_file_that_is_still_being_written_is_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a write, a listing shows the old object or none, never a part of the new one."""
    seen: list[list[tuple[str, int]]] = []
    move = LocalFileSystem.mv

    def look_then_move(self: LocalFileSystem, source: str, target: str, **options: Any) -> None:
        assert source != target
        listed = run_with_store(tmp_path, lambda store: store.list("errors"))
        seen.append([(item.name, item.size) for item in listed])
        move(self, source, target, **options)

    monkeypatch.setattr(LocalFileSystem, "mv", look_then_move)
    run_with_store(tmp_path, lambda store: store.put("errors/a.pb", b"x"))
    run_with_store(tmp_path, lambda store: store.put("errors/a.pb", b"xyz"))
    assert seen == [[], [("a.pb", 1)]]


@pytest.mark.parametrize(
    ("uri", "scheme"),
    [
        ("s3:/bucket/out", "s3"),
        ("S3:bucket/out", "S3"),
        ("gs:///bucket/out", "gs"),
        ("abfs:/c", "abfs"),
    ],
)
def test_a_scheme_without_two_slashes_is_a_usage_error(uri: str, scheme: str) -> None:
    """It is a mistyped URI, and not a folder of this machine."""
    with pytest.raises(
        UsageError, match=f"two slashes follow the scheme, as in {scheme}://bucket/key"
    ):
        open_store(uri)


@pytest.mark.parametrize("folder", ["s3/x", "gs:x", "with:colon/x"])
def test_a_folder_that_looks_like_a_scheme_is_local(tmp_path: Path, folder: str) -> None:
    """A local folder is one, whatever its name."""
    run_with_store(tmp_path / folder, lambda store: store.put("a.pb", b"x"))
    assert (tmp_path / folder / "a.pb").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("nosuchthing://bucket/out", "unknown storage scheme 'nosuchthing'"),
        ("gs://bucket/out", "install the extra gcs: in a clone pip install '\\.\\[gcs\\]'"),
        ("abfs://bucket/out", "install the extra azure: in a clone pip install '\\.\\[azure\\]'"),
        ("s3://bucket/out", "install the extra s3: in a clone pip install '\\.\\[s3\\]'"),
        ("webhdfs://host/out", "is not installed \\(install a package to access webhdfs\\)$"),
    ],
)
def test_a_storage_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, uri: str, reason: str
) -> None:
    """An unknown scheme or a missing package raises a UsageError that says what to install."""
    known = fsspec.get_filesystem_class

    def missing(protocol: str) -> type:
        if protocol == "nosuchthing":
            return known(protocol)
        raise ImportError(f"install a package to access {protocol}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    monkeypatch.setenv(CLIENT_VARIABLE, "fsspec")
    with pytest.raises(UsageError, match=reason):
        run_with_store(uri, lambda store: store.list())


class _Held:
    """An object that a caller has in a local variable."""


def test_a_missing_object_keeps_no_caller_alive(tmp_path: Path) -> None:
    """The error of a missing object is in no reference cycle, which would keep its callers' local
    variables until the next collection of garbage: an agent's are a store and its sockets.
    """

    def read() -> weakref.ref[_Held]:
        held = _Held()
        with pytest.raises(ObjectNotFoundError):
            run_with_store(tmp_path, lambda store: store.get("error.pb"))
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert [read()() for _ in range(3)] == [None, None, None]
    finally:
        gc.enable()


def test_a_request_outside_of_async_with_raises(tmp_path: Path) -> None:
    """A request outside of `async with` raises a RuntimeError that says so."""
    store = open_store(str(tmp_path))
    with pytest.raises(RuntimeError, match="async with"):
        run_sync(store.list())


def _named(name: str, *bases: type[Exception], **attributes: object) -> type[Exception]:
    """Return an exception that is named as that of botocore, aiohttp or Azure."""
    return type(name, bases or (Exception,), attributes)


_ClientAuthenticationError = _named("ClientAuthenticationError", response=object())
_ClientConnectionError = _named("ClientConnectionError", OSError)


def _os_error(number: int) -> OSError:
    return OSError(number, "Please reduce your request rate")


_TRANSIENT = {
    "connection": ConnectionResetError("reset by peer"),
    "timeout": TimeoutError("timed out"),
    "endpoint": _named("EndpointConnectionError")("Could not connect to the endpoint URL"),
    "name service": _named("ClientConnectorDNSError", _ClientConnectionError)(
        "Cannot connect to host a.org"
    ),
    "busy": _os_error(errno.EBUSY),
    "remote": _os_error(errno.EREMOTEIO),
}
_FINAL = {
    "permission": (
        PermissionError("Access Denied"),
        AccessDeniedError,
        "check the credentials and the list perm",
    ),
    "credentials": (
        _named("NoCredentialsError")("no file"),
        AccessDeniedError,
        "set AWS_ACCESS_KEY_ID",
    ),
    "account": (
        _ClientAuthenticationError("wrong key"),
        AccessDeniedError,
        r"refused \(wrong key\); check the cred",
    ),
    "disk": (OSError(errno.EIO, "Input/output error"), StoreError, "Input/output error"),
    "a programming error": (ZeroDivisionError("a bug"), ZeroDivisionError, "a bug"),
}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Make the next listings of a local folder fail, and record each."""

    def fail(*errors: Exception) -> list[str]:
        calls: list[str] = []
        listed = LocalFileSystem.ls

        def ls(self: LocalFileSystem, path: str, **options: Any) -> Any:
            calls.append(path)
            if len(calls) <= len(errors):
                raise errors[len(calls) - 1]
            return listed(self, path, **options)

        monkeypatch.setattr(LocalFileSystem, "ls", ls)
        return calls

    return fail


@pytest.mark.parametrize("error", _TRANSIENT.values(), ids=_TRANSIENT)
def test_a_transient_error_is_retried_then_raised(
    tmp_path: Path, failing: Callable[..., list[str]], error: Exception
) -> None:
    """A request is sent up to three times; then StoreUnavailableError is raised,
    not an empty listing returned.
    """
    (tmp_path / "a.pb").write_bytes(b"x")
    calls = failing(*[error] * 5)
    with pytest.raises(
        StoreUnavailableError, match=rf"cannot list {tmp_path}: .*check the endpoint"
    ) as caught:
        run_with_store(tmp_path, lambda store: store.list())
    assert len(calls) == 3
    assert type(caught.value.__cause__) is type(error)
    assert [item.name for item in run_with_store(tmp_path, lambda store: store.list())] == ["a.pb"]
    assert len(calls) == 6


@pytest.mark.parametrize(("error", "kind", "advice"), _FINAL.values(), ids=_FINAL)
def test_a_refused_request_is_not_retried(
    tmp_path: Path,
    failing: Callable[..., list[str]],
    error: Exception,
    kind: type[Exception],
    advice: str,
) -> None:
    """A refused request is not retried; its error says what to check. A programming
    error is raised unchanged.
    """
    calls = failing(*[error] * 9)
    with pytest.raises(kind, match=advice) as caught:
        run_with_store(tmp_path, lambda store: store.list())
    assert type(caught.value) is kind
    assert len(calls) == 1


# --- an asynchronous filesystem -------------------------------------------------------------------


class _Recording(AsyncFileSystem):
    """An asynchronous filesystem, as s3fs is, that keeps its objects in a dictionary."""

    protocol = "recording"
    objects: dict[str, bytes] = {}  # noqa: RUF012 - shared by all instances on purpose
    made: list[dict[str, Any]] = []  # noqa: RUF012
    # some filesystems leave the zone out
    modified = dt.datetime(2023, 11, 14, 22, 13, 20, 250_000)  # noqa: DTZ001

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made.append(options)

    async def _ls(self, path: str, **_options: Any) -> list[dict[str, Any]]:
        return [
            {"name": name, "size": len(data), "type": "file", "LastModified": self.modified}
            for name, data in self.objects.items()
            if name.startswith(f"{path}/")
        ]

    async def _pipe_file(self, path: str, value: bytes, **_options: Any) -> None:
        self.objects[path] = value

    async def _cat_file(self, path: str, **_options: Any) -> bytes:
        return self.objects[path]

    async def _info(self, path: str, **_options: Any) -> dict[str, Any]:
        raise FileNotFoundError(path)


def test_an_asynchronous_filesystem_is_used_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store makes a filesystem for the running loop, unshared and without a listings cache;
    a put is one write.
    """
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _protocol: _Recording)

    async def scenario() -> None:
        async with open_store("recording://bucket/out", {"key": "k"}) as store:
            await store.put("errors/a.pb", b"xyz")
            (item,) = await store.list("errors")
            assert (item.name, item.size, item.last_modified_ns) == (
                "a.pb",
                3,
                1_700_000_000_250_000_000,
            )
            assert await store.get("errors/a.pb") == b"xyz"
            assert not await store.exists("errors/b.pb")
        async with open_store("recording://bucket/out", {"key": "k"}):
            pass
        assert len(_Recording.made) == 2
        options = _Recording.made[-1]
        assert options["loop"] is asyncio.get_running_loop()
        assert (options["asynchronous"], options["use_listings_cache"]) == (True, False)
        assert options["key"] == "k"
        assert list(_Recording.objects) == ["bucket/out/errors/a.pb"]

    run_sync(scenario())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_slow_first_answer_is_awaited_within_a_limit(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """A storage that answers late, as after a login, is listed;
    one that does not answer raises an error.
    """
    monkeypatch.setattr(
        "firstfault.store.fsspec_store.FIRST_ANSWER_TIMEOUT_SECONDS", 0.2 if hangs else 60.0
    )

    class Slow(_Recording):
        objects = {"bucket/out/a.pb": b"xyz"}  # noqa: RUF012 - as above

        async def _info(self, path: str, **options: Any) -> dict[str, Any]:
            await asyncio.sleep(60 if hangs else 0.2)
            return await super()._info(path, **options)

    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _protocol: Slow)
    if hangs:
        with pytest.raises(StoreUnavailableError, match="no answer within"):
            run_with_store("recording://bucket/out", lambda store: store.list())
    else:
        assert [
            item.name
            for item in run_with_store("recording://bucket/out", lambda store: store.list())
        ] == ["a.pb"]


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        (
            {
                "FLYTE_AWS_ENDPOINT": "http://m:9",
                "FLYTE_AWS_ACCESS_KEY_ID": "id",
                "FLYTE_AWS_SECRET_ACCESS_KEY": "s",
            },
            {"endpoint_url": "http://m:9", "key": "id", "secret": "s"},
        ),
        ({"AWS_ENDPOINT_URL": "http://a"}, {"endpoint_url": "http://a"}),
        (
            {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"},
            {"endpoint_url": "http://b"},
        ),
        (
            {"AWS_ENDPOINT_URL_S3": "http://b", "FLYTE_AWS_ENDPOINT": "http://c"},
            {"endpoint_url": "http://c"},
        ),
        ({"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s"}, {}),
    ],
)
def test_flytekits_endpoint_overrides_botocores(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: dict[str, str]
) -> None:
    """The endpoint of flytekit's variable overrides botocore's; botocore reads its own keys."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = build_storage_options("s3")
    assert {
        name: options[name] for name in ("endpoint_url", "key", "secret") if name in options
    } == expected
    assert build_storage_options("s3", {"key": "mine"})["key"] == "mine"


def test_settings_of_s3_do_not_reach_other_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of S3 do not reach another storage."""
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "id")
    assert build_storage_options("gs", {"token": "t"}) == {"token": "t"}
    assert build_storage_options("file") == {}


# --- URIs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "halves"),
    [
        ("s3://b/out/error.pb", ("s3://b/out", "error.pb")),
        ("s3://b/out/", ("s3://b", "out")),
        ("/error.pb", ("/", "error.pb")),
        ("error.pb", (".", "error.pb")),
    ],
)
def test_a_uri_is_split_and_joined_with_one_slash(uri: str, halves: tuple[str, str]) -> None:
    """A URI is split into its folder and its name, and joined with one slash."""
    assert split_name(uri) == halves
    assert join(*halves) == uri.removesuffix("/") or halves[0] == "."
    assert join("s3://b/out/", "/errors/", "a.pb", "") == "s3://b/out/errors/a.pb"


@pytest.mark.parametrize(
    ("uri", "remote"),
    [
        ("s3://b/x", True),
        ("gs://b/x", True),
        ("/x", False),
        ("x", False),
        ("file:///x", False),
        ("memory://x", False),
    ],
)
def test_a_local_folder_is_not_remote_with_or_without_a_scheme(uri: str, remote: bool) -> None:
    """A folder of this machine is not remote, with or without a scheme."""
    assert is_remote(uri) is remote
