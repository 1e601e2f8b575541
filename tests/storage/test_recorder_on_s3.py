"""The node's recorder on S3: all workers of a node may fail at once."""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING

from firstfault.layout import ERRORS
from firstfault.recorder import Recorder, Target, start_recorder
from tests.faulty_proxy import Fault

if TYPE_CHECKING:
    from firstfault.model import Receipt
    from tests.faulty_proxy import FaultyProxy
    from tests.storage.conftest import Peer

_WORKERS = 8
_LONG_S = 60.0


def test_workers_that_fail_at_once_do_not_queue(faulty_proxy: FaultyProxy, peer: Peer) -> None:
    """Eight documents are all on their way while none has been answered."""
    uri = faulty_proxy.server.uri()
    process = start_recorder(uri, deadline_seconds=_LONG_S)
    recorder = Recorder(process.folder)

    def fail(number: int) -> Receipt:
        file = process.folder.spool(f"0-{number}").add(f"{number}.pb", b"document")
        target = Target(f"{ERRORS}/{number}.pb", fault_monotonic_ns=time.monotonic_ns(), rank=number)
        return recorder.put(target, file, _LONG_S)

    try:
        faulty_proxy.plan(Fault("stall", path=ERRORS))
        with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
            receipts = [pool.submit(fail, number) for number in range(_WORKERS)]
            for number in range(_WORKERS):
                faulty_proxy.await_request("PUT", f"{ERRORS}/{number}.pb")
            assert not any(receipt.done() for receipt in receipts)
            faulty_proxy.plan()
            assert all(receipt.result().durable for receipt in receipts)
    finally:
        faulty_proxy.plan()
        process.end()
    assert len(peer.files(f"{uri}/{ERRORS}")) == _WORKERS
