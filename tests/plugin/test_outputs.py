"""The wait for rank 0's outputs, the name of a pod's error file, and the choice between two."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from firstfault.layout import is_stock_error_file
from firstfault.testing import make_error
from firstfault_torch.node.document_writer import put_file
from flytekitplugins.firstfault import outputs
from flytekitplugins.firstfault.outputs import await_outputs, newest_seal, sealed_name
from tests.recordings import concluded, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.prefix import Prefix
    from tests.s3_server import S3

LONG_S = 30.0
SOON_S = 1.0


class Looks:
    """Counts the checks for the outputs."""

    def __init__(self) -> None:
        self._look = outputs._are_there
        self._seen = threading.Semaphore(0)

    def __call__(self, output_prefix: str) -> bool:
        """Check, and count it."""
        found = self._look(output_prefix)
        self._seen.release()
        return found

    def wait_for(self, number: int) -> None:
        """Wait for this number of checks."""
        for _ in range(number):
            assert self._seen.acquire(timeout=LONG_S)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Count the checks, and shorten the pauses between them."""
    counted = Looks()
    monkeypatch.setattr(outputs, "_are_there", counted)
    monkeypatch.setattr(outputs, "LONGEST_OUTPUTS_POLL_S", 0.1)
    return counted


@pytest.fixture
def waiting(prefix: Prefix) -> Iterator[Callable[..., tuple[ThreadPoolExecutor, threading.Event]]]:
    """Return a function that waits in a thread; the thread ends with the test."""
    give_up = threading.Event()
    with ThreadPoolExecutor(1) as pool:

        def begin(seconds: float = LONG_S) -> tuple[object, threading.Event]:
            return pool.submit(await_outputs, prefix.uri, give_up, seconds), give_up

        yield begin
        give_up.set()


@pytest.mark.parametrize("name", ["outputs.pb", "error.pb", "error-0123456789abcdef0123456789abcdef.pb"])
@pytest.mark.parametrize("early", [True, False], ids=["before the wait", "during it"])
def test_rank_0s_pod_has_left_something(
    name: str, early: bool, prefix: Prefix, looks: Looks, waiting: Callable[..., tuple[object, threading.Event]]
) -> None:
    """The wait ends with rank 0's outputs, or with the error file of any pod."""
    prefix.folder.mkdir()
    if early:
        (prefix.folder / name).touch()
    result, _ = waiting()
    if not early:
        looks.wait_for(2)
        (prefix.folder / name).touch()
    assert result.result(SOON_S) is True


@pytest.mark.parametrize("name", ["deck.html", "outputs.pb.part", "firstfault/errors/e1-x.pb", "checkpoint/error.pb"])
def test_other_files(
    name: str, prefix: Prefix, looks: Looks, waiting: Callable[..., tuple[object, threading.Event]]
) -> None:
    """Other files, or a prefix that does not exist yet, do not end the wait."""
    result, _ = waiting()
    looks.wait_for(1)
    (prefix.folder / name).parent.mkdir(parents=True)
    (prefix.folder / name).touch()
    looks.wait_for(3)
    assert not result.done()
    (prefix.folder / "outputs.pb").touch()
    assert result.result(SOON_S) is True


def test_a_wait_that_is_given_up(waiting: Callable[..., tuple[object, threading.Event]]) -> None:
    """A signal ends the wait at once, also during a long pause between two checks."""
    result, give_up = waiting()
    assert not result.done()
    give_up.set()
    assert result.result(SOON_S) is False


def test_a_wait_that_was_given_up_before(prefix: Prefix) -> None:
    """A terminated pod does not wait, but existing outputs still count."""
    give_up = threading.Event()
    give_up.set()
    assert await_outputs(prefix.uri, give_up, LONG_S) is False
    prefix.folder.mkdir()
    (prefix.folder / "outputs.pb").touch()
    assert await_outputs(prefix.uri, give_up, LONG_S) is True


def test_outputs_that_are_not_written(prefix: Prefix, caplog: pytest.LogCaptureFixture) -> None:
    """A pod stops waiting after the time limit, and logs it."""
    began = time.monotonic()
    assert await_outputs(prefix.uri, threading.Event(), 0.3) is False
    assert 0.3 <= time.monotonic() - began < 0.3 + SOON_S
    assert "rank 0's pod has written no outputs within 0.3 s" in caplog.text


def test_a_storage_that_cannot_be_listed(prefix: Prefix, caplog: pytest.LogCaptureFixture) -> None:
    """A storage that cannot be listed counts as empty; the log says why."""
    prefix.folder.parent.mkdir(exist_ok=True)
    prefix.folder.touch()
    assert await_outputs(f"{prefix.uri}/below/a/file", threading.Event(), 0.1) is False
    assert "no outputs within" in caplog.text


def _use(account: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in account.environment().items():
        monkeypatch.setenv(name, value)


def test_an_account_that_may_not_list(s3_no_list: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs end the wait as soon as they can be read."""
    _use(s3_no_list, monkeypatch)
    uri = s3_no_list.uri()
    put_file(uri, "outputs.pb", b"the outputs")
    assert await_outputs(uri, threading.Event(), LONG_S) is True


def test_an_account_that_may_not_look(
    s3: S3, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pod that may not read does not wait for half an hour after its success."""
    _use(replace(s3, access_key="no-such-key"), monkeypatch)
    monkeypatch.setattr(outputs, "OUTPUTS_REFUSED_S", 0.5)
    began = time.monotonic()
    assert await_outputs(s3.uri(), threading.Event(), 1800) is False
    assert time.monotonic() - began < LONG_S
    assert "rank 0's pod has written no outputs within 0.5 s" in caplog.text


@pytest.mark.parametrize(
    ("environment", "pattern"),
    [({}, r"error\.pb"), ({"FLYTE_INTERNAL_DIST_ERROR_STRATEGY": "Earliest"}, r"error-[0-9a-f]{32}\.pb")],
)
def test_the_name_of_a_seal(environment: dict[str, str], pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt's error file is error.pb, or one with a name of its own if the backend asked for that."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    names = {sealed_name(f"s3://bucket/run/data/{attempt}") for attempt in (0, 0, 1)}
    assert all(re.fullmatch(pattern, name) and is_stock_error_file(name) for name in names)
    assert len(names) == (2 if environment else 1)


def test_a_storage_that_hangs_does_not_delay_the_choice(prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that cannot look for another pod's verdict in time keeps its own."""
    own = sealed(concluded(prefix.recording(), [make_error(0)]), prefix.recording())
    hangs = threading.Event()
    monkeypatch.setattr(outputs, "OUTPUTS_LOOK_S", 0.2)
    monkeypatch.setattr(outputs, "get_file", lambda *_: hangs.wait(LONG_S))
    began = time.monotonic()
    assert newest_seal(own.seal, own.document, prefix.uri) == own.document
    assert time.monotonic() - began < 2
    hangs.set()
