"""Recording and sealing while the storage fails in every way that a network and a server can."""

import concurrent.futures
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from firstfault.layout import ERROR_FILE
from firstfault.model import DocumentRef, Origin, Receipt, Scope, Seal, WorkerError
from firstfault.recorder.spool import SpooledDocument
from firstfault.testing import make_error
from firstfault.wire.documents import decode, encode
from firstfault_torch import Options
from firstfault_torch.node import document_writer
from firstfault_torch.node_context import NodeContext
from tests.faulty_proxy import FAULTS, Fault, FaultyProxy, faulty_proxy_before
from tests.nodes import Job
from tests.processes import kill
from tests.recordings import make_node_context
from tests.s3_server import S3
from tests.torch_agent import trainings

pytestmark = pytest.mark.slow

DEADLINE_S = 1.0
SLACK_S = 30.0
"""What threads that wait for a processor may add."""
LATER_S = 30.0
SEALED_S = 60.0
TERMINATED_S = 30.0
"""SIGTERM to the verdict: ten seconds, and more for a busy machine;
Kubernetes kills a pod after 30.
"""
FIRST_RANK = 11
"""Of the workers that fail: the numbers of ranks are told from others in the names of documents."""
HARMLESS = {"half", "twice"}
"""Faults under which an upload succeeds: its answer has no body,
and a second upload of the same bytes changes nothing.
"""


@pytest.fixture(scope="module")
def proxy(s3: S3) -> Iterator[FaultyProxy]:
    """Send this process's requests, and those of its recorders, through a proxy."""
    with faulty_proxy_before(s3) as proxy, pytest.MonkeyPatch.context() as patch:
        for name, value in proxy.server.environment().items():
            patch.setenv(name, value)
        yield proxy


@pytest.fixture(scope="module")
def node_context(proxy: FaultyProxy) -> Iterator[NodeContext]:
    """Return a recording of a node whose recorder runs."""
    with document_writer.node_recorder(
        make_node_context(proxy.server.uri("faulty"), DEADLINE_S, node="worker-0")
    ) as node_context:
        # a busy machine takes half a minute to import what an upload needs, in the recorder and in
        # this process
        assert document_writer.put_on_node("warm", b"", node_context, SEALED_S)
        yield node_context


def stored(server: S3, output_prefix: str) -> Callable[[str], bytes | None]:
    """Return a function that reads a file below the output prefix, beside the proxy;
    None if there is none.
    """
    prefix = output_prefix.partition(f"{server.bucket}/")[2]
    client = server.client()

    def read(path: str) -> bytes | None:
        with contextlib.suppress(client.exceptions.NoSuchKey):
            data: bytes = client.get_object(Bucket=server.bucket, Key=f"{prefix}/{path}")[
                "Body"
            ].read()
            return data
        return None

    return read


def failure(rank: int) -> WorkerError:
    error = make_error(
        rank,
        node="worker-0",
        at_ms=rank,
        message="the user's own error",
        group_world_size=1,
    )
    return replace(error, monotonic_ns=time.monotonic_ns())


@dataclass(frozen=True)
class Uploads:
    """What became of documents whose uploads met a fault."""

    told: list[tuple[str, bool]]
    """Path, and whether it is durable, of a document of the recorder's,
    one that was uploaded directly, and a file.
    """
    seconds: float
    spooled: SpooledDocument
    """The first one."""
    error: WorkerError
    """What it is about."""


@pytest.fixture(scope="module")
def uploads(proxy: FaultyProxy, node_context: NodeContext) -> dict[str, tuple[Uploads, Receipt]]:
    """Upload under all faults at once, with the node's recorder and without,
    and again when the storage is back.

    The connections of the first uploads still hang then.
    """

    def upload(what: str) -> Uploads:
        number = FIRST_RANK + FAULTS.index(what)
        deadline = LATER_S if what in HARMLESS else DEADLINE_S
        by_recorder = failure(number)
        directly = failure(100 + number)
        spool = document_writer.open_worker_spool(node_context, number, None)
        file = f"file-{number:07d}-.pb"
        assert spool is not None
        calls: list[Callable[[], tuple[str, bool]]] = [
            lambda: _told(
                document_writer.record_error(by_recorder, node_context, spool, deadline)[1]
            ),
            lambda: _told(
                document_writer.record_error(
                    directly,
                    replace(node_context, node_folder=""),
                    None,
                    deadline,
                )[1]
            ),
            lambda: (file, document_writer.put_on_node(file, b"data", node_context, deadline)),
        ]
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            told = list(pool.map(lambda call: call(), calls))
        seconds = time.monotonic() - began - deadline
        (spooled,) = spool.documents()
        return Uploads(told, seconds, spooled, by_recorder)

    def again(found: Uploads) -> Receipt:
        return document_writer.put_document(
            found.spooled,
            encode(found.error),
            found.error,
            node_context,
            LATER_S,
        )

    others = [what for what in FAULTS if what != "refused"]
    ranks = {what: FIRST_RANK + FAULTS.index(what) for what in others}
    proxy.refuse()
    found = {"refused": upload("refused")}
    proxy.accept()
    proxy.plan(
        *(Fault(what, path=f"-{more + ranks[what]:07d}-") for what in others for more in (0, 100))
    )
    with concurrent.futures.ThreadPoolExecutor(len(others)) as pool:
        found.update(zip(others, pool.map(upload, others), strict=True))
        proxy.mend()
        receipts = list(pool.map(again, found.values()))
    proxy.plan()
    return dict(zip(found, zip(found.values(), receipts, strict=True), strict=True))


@pytest.mark.parametrize("what", FAULTS)
def test_an_upload_is_given_up_in_time_and_stays_in_the_spool(
    s3: S3,
    node_context: NodeContext,
    uploads: dict[str, tuple[Uploads, Receipt]],
    what: str,
) -> None:
    """An upload is given up in time; its document stays in the spool until
    the agent can upload it.
    """
    (found, receipt), read = uploads[what], stored(s3, node_context.output_prefix)
    assert found.seconds < SLACK_S
    for path, is_durable in found.told:
        assert is_durable == (what in HARMLESS)
        assert not is_durable or read(path) is not None, "a receipt says that it is durable"
    assert found.spooled.path.read_bytes() == encode(found.error)
    assert receipt.durable, receipt
    assert read(document_writer.document_path(receipt.name)) == encode(found.error)


def _told(receipt: Receipt) -> tuple[str, bool]:
    return document_writer.document_path(receipt.name), receipt.durable


@pytest.fixture
def job(proxy: FaultyProxy, tmp_path: Path) -> Iterator[Job]:
    """Start two nodes, and wait until their workers run and they have said so."""
    options = Options(settle_seconds=2, upload_deadline_seconds=1)
    before = len(proxy.requests)
    with Job(tmp_path, trainings.once_told, options=options, store=proxy.server.uri("job")).start(
        2
    ) as running:
        for number in range(2):
            proxy.await_request("PUT", f"-{number:07d}-joined-", since=before)
        yield running
        proxy.plan()


@pytest.mark.jobs
def test_a_peer_names_the_rank_of_a_node_that_died_with_the_storage(
    s3: S3, proxy: FaultyProxy, job: Job
) -> None:
    """The other node, alone and with its own findings,
    names the rank of which its agent was told.
    """
    workers = {rank: job.await_mark(f"rank-{rank}-0") for rank in range(2)}
    rank = job.host({number: worker["agent"] for number, worker in workers.items()})
    other = f"{1 - rank:07d}"
    before = len(proxy.requests)
    proxy.plan(Fault("stall"))
    job.go(rank)
    # the document of the stopped rank
    proxy.await_request("PUT", f"-{other}-{other}-", since=before)
    kill([workers[rank]["agent"], workers[rank]["pid"]])
    proxy.await_request("PUT", "/error.pb", since=before)
    proxy.plan()
    assert sorted(map(str, job.end().codes)) == ["-9", "1"]
    seal = decode(stored(s3, f"{job.store}/0")(ERROR_FILE) or b"", DocumentRef(ERROR_FILE))
    assert isinstance(seal, Seal)
    root = next(line for line in seal.message.splitlines() if line.startswith("Cause: "))
    assert f"\nWhere: rank {rank} " in seal.message
    assert "ValueError" in root
    assert "only the documents at hand were read" in seal.message


@pytest.mark.jobs
def test_a_terminated_node_seals_although_the_storage_hangs(proxy: FaultyProxy, job: Job) -> None:
    """It seals within seconds, long before Kubernetes kills it."""
    agent = job.await_mark("rank-1-0")["agent"]
    before = len(proxy.requests)
    proxy.plan(Fault("stall"))
    began = time.monotonic()
    os.kill(agent, signal.SIGTERM)
    assert proxy.await_request("PUT", "/error.pb", since=before) - began < TERMINATED_S
    proxy.plan()
    ended = job.end()
    assert (ended.verdict.scope, ended.verdict.category) == (Scope.EXTERNAL, "preemption")
    assert (ended.conclusion.decision.retry, ended.conclusion.decision.origin) == (
        True,
        Origin.SYSTEM,
    )
