"""The store on a real S3 server."""

import asyncio
import subprocess
import sys

import fsspec
import pytest

from firstfault.store import Store, open_store
from firstfault.utils.run_sync import run_sync
from tests.s3_server import S3
from tests.storage.conftest import Peer, WithStore
from tests.storage.store_suite import StoreTests

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("client")]


class TestS3(StoreTests):
    """The conformance suite on S3."""

    @pytest.fixture(autouse=True)
    def _folder(self, s3_environ: S3) -> None:
        self.uri = s3_environ.uri()

    def open_store(self) -> Store:
        return open_store(self.uri)


async def names(store: Store) -> list[str]:
    """Return the names in the store's folder."""
    return [item.name for item in await store.list()]


def test_only_objects_directly_in_the_folder_are_listed(
    s3_environ: S3, peer: Peer, with_store: WithStore
) -> None:
    """A listing has no deeper objects, no siblings with the same prefix,
    and not the folder's own marker.
    """
    uri = s3_environ.uri()
    for name in ("/b.pb", "/a.pb", "/deep/c.pb", "-sibling/d.pb"):
        peer.put(uri + name, b"x")
    peer.client.put_object(
        Bucket=peer.bucket, Key=uri.removeprefix(f"s3://{peer.bucket}/") + "/", Body=b""
    )
    assert with_store(uri, names) == ["a.pb", "b.pb"]


def test_the_store_ignores_fsspecs_cached_listing(
    s3_environ: S3, peer: Peer, with_store: WithStore
) -> None:
    """The filesystem that fsspec shares does not see a new object; the store does."""
    uri = s3_environ.uri()
    peer.put(f"{uri}/first.pb", b"x")
    shared = fsspec.filesystem(
        "s3",
        key=s3_environ.access_key,
        secret=s3_environ.secret_key,
        client_kwargs={"endpoint_url": s3_environ.endpoint},
    )
    try:
        assert len(shared.ls(uri)) == 1
        assert with_store(uri, names) == ["first.pb"]
        peer.put(f"{uri}/second.pb", b"x")
        assert len(shared.ls(uri)) == 1, (
            "the shared filesystem no longer remembers; this test shows nothing"
        )
        assert with_store(uri, names) == ["first.pb", "second.pb"]
    finally:
        type(shared).clear_instance_cache()


def test_a_store_of_a_whole_bucket_lists_behind_a_name(
    s3_environ: S3, with_store: WithStore
) -> None:
    """A store of a whole bucket can list behind a name."""
    folder = s3_environ.uri("bucket").rpartition("/")[2]

    async def use(store: Store) -> list[str]:
        for name in ("a", "b", "c"):
            await store.put(f"{folder}/{name}.pb", b"x")
        page = await store.page(f"{folder}/a.pb")
        return [item.name for item in page.objects if item.name.startswith(folder)]

    assert with_store(f"s3://{s3_environ.bucket}", use) == [f"{folder}/b.pb", f"{folder}/c.pb"]


def test_names_that_urls_encode_are_kept(s3_environ: S3, peer: Peer, with_store: WithStore) -> None:
    """Another client finds what was put under its name and with its bytes,
    also if URLs encode the name.
    """
    uri = s3_environ.uri()
    files = {name: bytes(range(256)) for name in ("a b+c&d=e.pb", "ä.pb", "100%.pb", "a#b?.pb")}

    async def use(store: Store) -> dict[str, bytes]:
        for name, data in files.items():
            await store.put(name, data)
        return {name: await store.get(name) for name in await names(store)}

    assert with_store(uri, use) == files
    assert peer.files(uri) == files


def test_64_first_requests_at_once_succeed_and_leave_no_connection(
    s3_environ: S3, with_store: WithStore
) -> None:
    """64 first requests at once succeed, and leave no connection open."""
    uri = s3_environ.uri()

    async def use(store: Store) -> int:
        await asyncio.gather(*(store.put(f"{number}.pb", b"x") for number in range(64)))
        return len(await store.list())

    assert with_store(uri, use) == 64


def test_run_sync_works_inside_a_running_event_loop(s3_environ: S3, peer: Peer) -> None:
    """The synchronous bridge works in a coroutine, on a loop that has used a store itself."""
    uri = s3_environ.uri()
    peer.put(f"{uri}/a.pb", b"x")

    async def listed() -> list[str]:
        async with open_store(uri) as store:
            return await names(store)

    async def main() -> tuple[list[str], list[str]]:
        return await listed(), run_sync(listed())

    assert asyncio.run(main()) == (["a.pb"], ["a.pb"])


FORK = """
import os, sys
import fsspec
from firstfault.utils.run_sync import run_sync
from firstfault.store import open_store

uri, key, secret, endpoint = sys.argv[1:]

async def put(name):
    async with open_store(uri) as store:
        await store.put(name, b"x")
        return [item.name for item in await store.list()]

run_sync(put("parent.pb"))
# as flytekit does: an instance of its own, with a thread that a fork does not copy
fsspec.filesystem("s3", key=key, secret=secret, client_kwargs={"endpoint_url": endpoint}).ls(uri)
child = os.fork()
if child == 0:
    assert run_sync(put("child.pb")) == ["child.pb", "parent.pb"]
    os._exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert run_sync(put("parent-again.pb")) == ["child.pb", "parent-again.pb", "parent.pb"]
print("done")
"""


def test_a_forked_child_uses_a_store_of_its_own(s3_environ: S3) -> None:
    """A child that is forked after its parent has used S3 can write and list,
    and so can the parent afterwards.
    """
    command = [
        sys.executable,
        "-c",
        FORK,
        s3_environ.uri(),
        s3_environ.access_key,
        s3_environ.secret_key,
    ]
    done = subprocess.run(
        [*command, s3_environ.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
