"""Recording and sealing while the storage fails in every way that a network and a server can."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest

from firstfault.layout import ERROR_FILE
from firstfault.testing import make_error
from firstfault.wire.documents import encode
from firstfault_torch import engine
from firstfault_torch import verdict as verdicts
from firstfault_torch.node.document_writer import (
    document_path,
    node_recorder,
    put_document,
    put_on_node,
    record_error,
    spool_of,
)
from tests.faulty_proxy import FAULTS, Fault, FaultyProxy, faulty_proxy_before
from tests.recordings import RetryingEngine, concluded, recording_at, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from firstfault.model import Receipt, WorkerError
    from firstfault_torch.context import Recording
    from tests.s3_server import S3

DEADLINE_S = 1.0
SLACK_S = 30.0
"""What threads that wait for a processor may add."""
LATER_S = 30.0
SEALED_S = 60.0
PATIENT_S = 30.0
HARMLESS = {"half", "twice"}
"""Faults under which an upload succeeds: its answer has no body, and a second upload of the same bytes changes nothing.
"""


@pytest.fixture(scope="module")
def proxy(s3: S3) -> Iterator[FaultyProxy]:
    """Send this process's requests, and those of its recorders, through a proxy."""
    with faulty_proxy_before(s3) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in proxy.server.environment().items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="module")
def recording(proxy: FaultyProxy) -> Iterator[Recording]:
    """Return a recording of a node whose recorder runs."""
    with node_recorder(recording_at(proxy.server.uri("faulty"), DEADLINE_S, node="worker-0")) as recording:
        assert put_on_node("warm", b"", recording, 30)
        yield recording


def stored(server: S3, recording: Recording) -> Callable[[str], bytes | None]:
    """Return a function that reads a file below the output prefix, beside the proxy; None if there is none."""
    prefix = recording.output_prefix.partition(f"{server.bucket}/")[2]
    client = server.client()

    def read(path: str) -> bytes | None:
        with contextlib.suppress(client.exceptions.NoSuchKey):
            data: bytes = client.get_object(Bucket=server.bucket, Key=f"{prefix}/{path}")["Body"].read()
            return data
        return None

    return read


def failure(rank: int) -> WorkerError:
    """Return the failure of a worker just now."""
    error = make_error(rank, node="worker-0", at_ms=rank, message="the user's own error", group_world_size=1)
    return replace(error, monotonic_ns=time.monotonic_ns())


@pytest.mark.parametrize("what", FAULTS)
def test_uploads(s3: S3, proxy: FaultyProxy, recording: Recording, what: str) -> None:
    """An upload is given up in time and its document stays in the spool; the agent uploads it when the storage is back.

    That holds with the node's recorder and without, also while the connection of the first upload still hangs.
    """
    number = FAULTS.index(what)
    by_recorder, directly = failure(number), failure(100 + number)
    spool, read = spool_of(recording, number, None), stored(s3, recording)
    assert spool is not None
    deadline = LATER_S if what in HARMLESS else DEADLINE_S
    calls: list[Callable[[], tuple[str, bool]]] = [
        lambda: _told(record_error(by_recorder, recording, spool, deadline)),
        lambda: _told(record_error(directly, replace(recording, node_folder=""), None, deadline)),
        lambda: (f"{what}.pb", put_on_node(f"{what}.pb", b"data", recording, deadline)),
    ]
    proxy.fail(what)
    try:
        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            began = time.monotonic()
            told = list(pool.map(lambda call: call(), calls))
            took = time.monotonic() - began
    finally:
        proxy.mend()
    assert took < deadline + SLACK_S
    for path, is_durable in told:
        assert is_durable == (what in HARMLESS)
        assert not is_durable or read(path) is not None, "a receipt says that it is durable"
    (spooled,) = spool.documents()
    assert spooled.path.read_bytes() == encode(by_recorder)
    receipt = put_document(spooled, recording, by_recorder.monotonic_ns, number, LATER_S)
    assert receipt.durable, receipt
    proxy.plan()
    assert read(document_path(receipt.name)) == encode(by_recorder)


def _told(receipt: Receipt) -> tuple[str, bool]:
    return document_path(receipt.name), receipt.durable


# --- the verdict ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sealing:
    """What became of a verdict."""

    headline: str
    message: str
    document: bytes
    durable: bool
    stored: bytes | None
    seconds: float


@pytest.fixture(scope="module")
def sealings(s3: S3, proxy: FaultyProxy) -> dict[str, Sealing]:
    """Conclude, seal and publish under each fault, in a pod that was terminated."""
    places = {what: recording_at(proxy.server.uri(f"seal-{what}-"), DEADLINE_S) for what in FAULTS}
    terminated = threading.Event()
    terminated.set()

    def seal(what: str) -> Sealing:
        began = time.monotonic()
        recording = places[what]
        verdict = sealed(concluded(recording, [failure(3)], give_up=terminated), recording)
        published = RetryingEngine(recording.output_prefix).publish(verdict, give_up=terminated)
        seconds = time.monotonic() - began
        found = stored(s3, recording)(ERROR_FILE)
        headline, message = verdict.verdict.headline, verdict.seal.message
        return Sealing(headline, message, published.document, published.durable, found, seconds)

    proxy.plan(*(Fault(what, path=f"seal-{what}-") for what in FAULTS if what != "refused"))
    with pytest.MonkeyPatch.context() as patch:
        # a busy machine needs longer than a terminated pod has
        patch.setattr(engine, "TERMINATED_PUBLISH_S", PATIENT_S)
        patch.setattr(verdicts, "TERMINATED_READING_S", PATIENT_S)
        found = {what: seal(what) for what in sorted(HARMLESS)}
    others = [what for what in FAULTS if what not in {*HARMLESS, "refused"}]
    with concurrent.futures.ThreadPoolExecutor(len(others)) as pool:
        found.update(zip(others, pool.map(seal, others), strict=True))
    proxy.refuse()
    found["refused"] = seal("refused")
    proxy.plan()
    proxy.mend()
    return found


@pytest.mark.parametrize("what", FAULTS)
def test_sealing(sealings: dict[str, Sealing], what: str) -> None:
    """The verdict is about the user's exception, is made in time, and the caller learns whether it is stored."""
    sealing = sealings[what]
    assert "the user's own error" in sealing.headline
    assert "the user's own error" in sealing.message
    assert sealing.seconds < SEALED_S
    assert b"the user's own error" in sealing.document
    if what == "twice":
        assert "only the documents at hand" not in sealing.message
    else:
        assert "only the documents at hand" in sealing.message
    assert sealing.durable == (what in HARMLESS)
    if sealing.durable:
        assert sealing.stored == sealing.document
