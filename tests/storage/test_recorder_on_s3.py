"""The node's recorder on S3: all workers of a node may fail at once."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import TYPE_CHECKING

from firstfault.layout import ERRORS
from firstfault.recorder import Recorder, Target, start_recorder
from tests.benchmarks.latency_proxy import latency_proxy

if TYPE_CHECKING:
    import pytest

    from firstfault.model import Receipt
    from tests.s3_server import S3
    from tests.storage.conftest import Peer

_WORKERS = 8
_DELAY_MS = 200


def test_workers_that_fail_at_once_do_not_queue(s3_environ: S3, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight simultaneous documents are uploaded concurrently."""
    uri = s3_environ.uri()
    with latency_proxy(s3_environ.endpoint, _DELAY_MS) as proxy:
        monkeypatch.setenv("FLYTE_AWS_ENDPOINT", proxy.endpoint)
        process = start_recorder(uri, deadline_seconds=5)
        try:
            recorder = Recorder(process.folder)
            together = threading.Barrier(_WORKERS)

            def fail(number: int) -> Receipt:
                file = process.folder.spool(f"0-{number}").add(f"{number}.pb", b"document")
                together.wait()
                now = time.monotonic_ns()
                path = f"{ERRORS}/{number}.pb"
                return recorder.put(Target(path, fault_monotonic_ns=now, rank=number), file, 5)

            # the first one also waits for the recorder to be up
            first = process.folder.spool("warm").add("warm.pb", b"document")
            assert recorder.put(Target("warm.pb"), first, 20).durable
            with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
                receipts = list(pool.map(fail, range(_WORKERS)))
        finally:
            process.end()
    took = sorted((receipt.fault_to_durable_ns or 0) / 1e6 for receipt in receipts)
    assert all(receipt.durable for receipt in receipts)
    assert len(peer.files(f"{uri}/{ERRORS}")) == _WORKERS
    assert took[0] > _DELAY_MS
    assert took[-1] < _WORKERS * _DELAY_MS, f"one after the other: {took}"
