"""Reading an attempt while the storage fails in every way that a network and a server can."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import stamina

from firstfault.errors import StoreError
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.store import CLIENT_VARIABLE, Store, listings, settings
from firstfault.testing import make_error
from tests.faulty_proxy import FAULTS, FaultyProxy, faulty_proxy_before
from tests.s3_server import S3

pytestmark = pytest.mark.slow

FIRST = make_error(
    3,
    node="worker-1",
    at_ms=0,
    message="the first fault",
    group_world_size=2,
    world_size=4,
)
SECOND = make_error(0, node="worker-0", at_ms=900, exception="RuntimeError", message="peer is gone")
LISTING = "list-type=2"
SLOWLY_S = 0.05
"""Between two bytes of a trickle, less than a client's longest wait for one."""
CASES = [(what, "obstore") for what in FAULTS if what not in {"twice", "refused"}]
CASES += [(what, "fsspec") for what in ("reset", "truncate", "half", "trickle")]
"""Faults and clients; `test_store_errors` has the others of fsspec."""


@pytest.fixture(scope="module")
def proxy(s3: S3, environment_of: Callable[..., Any]) -> Iterator[FaultyProxy]:
    """Send this process's requests through a proxy."""
    with faulty_proxy_before(s3) as proxy, environment_of(proxy.server):
        yield proxy


@pytest.fixture(scope="module")
def attempt(proxy: FaultyProxy, write: Callable[..., list[str]]) -> tuple[str, str]:
    """Write two documents; return their output prefix and the first one's name."""
    uri = proxy.server.uri()
    names = write(uri, FIRST, SECOND)
    return uri, names[0]


@pytest.fixture(autouse=True)
def _impatient(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the clients wait a moment only, and ask twice without a pause;
    end all faults after the test.
    """
    stamina.set_testing(True, attempts=2)
    monkeypatch.setattr(settings, "CONNECT_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(settings, "READ_TIMEOUT_SECONDS", 0.6)
    yield
    stamina.set_testing(False)
    proxy.plan()
    proxy.accept()


@pytest.mark.parametrize(("what", "client"), [*CASES[:-1], ("refused", "obstore")])
def test_a_failed_listing_is_an_error_of_one_line(
    proxy: FaultyProxy,
    attempt: tuple[str, str],
    what: str,
    client: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader raises an error of one line and never says that there is no error."""
    monkeypatch.setenv(CLIENT_VARIABLE, client)
    proxy.fail(what, path=LISTING, seconds=SLOWLY_S if what == "trickle" else None)
    with pytest.raises(StoreError, match="cannot list") as caught:
        MultiErrorFileOutputReader(attempt[0]).is_error()
    assert len(str(caught.value).splitlines()) == 1


def test_only_the_failed_page_of_a_listing_is_requested_again(
    proxy: FaultyProxy, with_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this page is requested again; a long listing that began again with each
    failure might never end.
    """
    monkeypatch.setenv(CLIENT_VARIABLE, "fsspec")
    monkeypatch.setattr(listings, "MAX_PAGE_OBJECTS", 2)

    async def use(store: Store) -> list[str]:
        for name in "abcde":
            await store.put(name, b"x")
        proxy.requests.clear()
        proxy.fail("reset", path="continuation-token", times=1)
        return [item.name for item in await store.list()]

    assert with_store(proxy.server.uri("pages"), use) == list("abcde")
    assert len([request for request in proxy.requests if LISTING in request]) == 3 + 1


@pytest.mark.parametrize(("what", "client"), CASES)
def test_an_unreadable_document_is_named_and_the_other_judged(
    proxy: FaultyProxy,
    attempt: tuple[str, str],
    what: str,
    client: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is counted and named, the other one is judged, and no part of it is taken for an error."""
    monkeypatch.setenv(CLIENT_VARIABLE, client)
    proxy.fail(what, path=attempt[1], seconds=SLOWLY_S if what == "trickle" else None)
    job = MultiErrorFileOutputReader(attempt[0]).job()
    assert [(failure.rank, failure.message) for failure in job.failures] == [(0, SECOND.message)]
    assert job.coverage.unreadable == 1
    assert not job.coverage.complete
    assert any(attempt[1] in note for note in job.coverage.notes)


@pytest.mark.parametrize("client", ["fsspec", "obstore"])
def test_a_repeated_answer_is_not_taken_for_the_next_one(
    proxy: FaultyProxy,
    attempt: tuple[str, str],
    client: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second answer to a request is not taken for the answer to the next one."""
    monkeypatch.setenv(CLIENT_VARIABLE, client)
    proxy.fail("twice")
    reader = MultiErrorFileOutputReader(attempt[0])
    for _ in range(3):
        assert {(failure.rank, failure.message) for failure in reader.job().failures} == {
            (3, FIRST.message),
            (0, SECOND.message),
        }
