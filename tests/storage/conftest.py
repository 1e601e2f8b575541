"""Fixtures of the storage tests: documents, a second client of the bucket, and faulty servers."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import pytest
import stamina

from firstfault.layout import ERRORS, error_key_for
from firstfault.model import WorkerError
from firstfault.store import CLIENT_VARIABLE, Store, open_store
from firstfault.wire.documents import encode
from tests.faulty_proxy import FaultyProxy, faulty_proxy_before
from tests.readers.commands import run
from tests.s3_server import S3

__all__ = ["run"]

T = TypeVar("T")
WithStore: TypeAlias = Callable[..., Any]


@pytest.fixture(scope="session")
def with_store() -> WithStore:
    """Return a function that runs an async function with an open store and returns its result."""

    def run(uri: str, use: Callable[[Store], Awaitable[T]], **options: Any) -> T:
        async def use_it() -> T:
            async with open_store(uri, options or None) as store:
                return await use(store)

        return asyncio.run(use_it())

    return run


@pytest.fixture(params=["fsspec", "obstore"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with both clients."""
    name: str = request.param
    monkeypatch.setenv(CLIENT_VARIABLE, name)
    return name


@pytest.fixture(scope="session")
def environment_of() -> Callable[[S3], contextlib.AbstractContextManager[None]]:
    """Return a context in which this process uses an account."""

    @contextlib.contextmanager
    def using(account: S3) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in account.environment().items():
                patch.setenv(name, value)
            yield

    return using


@pytest.fixture(scope="session")
def write(with_store: WithStore) -> Callable[..., list[str]]:
    """Return a function that writes error documents below an output prefix,
    and returns their names.
    """

    def put(uri: str, *errors: WorkerError, **options: Any) -> list[str]:
        names = [error_key_for(error) for error in errors]

        async def put_all(store: Store) -> None:
            gate = asyncio.Semaphore(32)

            async def put_one(name: str, error: WorkerError) -> None:
                async with gate:
                    await store.put(f"{ERRORS}/{name}", encode(error))

            await asyncio.gather(*map(put_one, names, errors))

        with_store(uri, put_all, **options)
        return names

    return put


@dataclass(frozen=True)
class Peer:
    """A second client of the bucket."""

    client: Any
    bucket: str

    def put(self, uri: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self._key(uri), Body=data)

    def delete(self, uri: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self._key(uri))

    def files(self, uri: str) -> dict[str, bytes]:
        prefix = self._key(uri) + "/"
        listing = self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, Delimiter="/")
        keys = [item["Key"] for item in listing.get("Contents", ())]
        return {
            key.removeprefix(prefix): (
                self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            )
            for key in keys
        }

    def _key(self, uri: str) -> str:
        return urlsplit(uri).path.strip("/")


@pytest.fixture
def peer(s3: S3) -> Iterator[Peer]:
    with contextlib.closing(s3.client()) as client:
        yield Peer(client, s3.bucket)


@pytest.fixture
def files_in(request: pytest.FixtureRequest) -> Callable[[str], dict[str, bytes]]:
    """Return a function that reads the files directly in a folder, local or on S3,
    without firstfault.
    """

    def read(uri: str) -> dict[str, bytes]:
        if uri.startswith("s3://"):
            other: Peer = request.getfixturevalue("peer")
            return other.files(uri)
        folder: Path = request.getfixturevalue("tmp_path").joinpath(uri)
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    return read


@dataclass
class SilentServer:
    endpoint: str
    connections: list[socket.socket] = field(default_factory=list)


@pytest.fixture
def silent_server() -> Iterator[SilentServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = SilentServer(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                server.connections.append(listener.accept()[0])

    thread = threading.Thread(target=accept, name="silent-server")
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        listener.close()
        thread.join()
        for connection in server.connections:
            connection.close()


@pytest.fixture
def faulty_proxy(s3_environ: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Send this process's requests to the S3 server through a proxy that can be told to fail."""
    with faulty_proxy_before(s3_environ) as proxy:
        monkeypatch.setenv("FLYTE_AWS_ENDPOINT", proxy.endpoint)
        yield proxy


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Remove the pauses between retries, not the retries."""
    stamina.set_testing(True, attempts=4)
    yield
    stamina.set_testing(False)
