"""What an agent reports about its node's workers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from firstfault.layout import error_key_for
from firstfault.model import Place, Writer
from firstfault.testing import make_error
from firstfault.wire.documents import encode
from firstfault_torch.agent.reporter import Death, Reporter, Stop

if TYPE_CHECKING:
    from pathlib import Path

    from tests.prefix import Prefix


def _garbage(spool: Path) -> None:
    (spool / "garbage.pb").write_bytes(b"garbage")


def _truncated(spool: Path) -> None:
    (spool / "garbage.pb").write_bytes(encode(make_error(1))[:-3])


def _folder(spool: Path) -> None:
    (spool / "garbage.pb").mkdir()


def _strange_receipt(spool: Path) -> None:
    _garbage(spool)
    (spool / "garbage.pb.receipt.json").write_text('{"durable": true}')


@pytest.mark.parametrize("spoil", [_garbage, _truncated, _folder, _strange_receipt])
@pytest.mark.parametrize("wrote", [True, False])
def test_a_document_in_the_spool_that_cannot_be_read(
    spoil: object, wrote: bool, prefix: Prefix, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreadable file in a worker's spool hides neither the worker's other documents nor its death."""
    assert callable(spoil)
    spool = tmp_path / "node" / "spool" / "0-1"
    spool.mkdir(parents=True)
    spoil(spool)
    own = make_error(1, node="worker-0", local_rank=1)
    if wrote:
        (spool / error_key_for(own)).write_bytes(encode(own))
    recording = replace(prefix.recording(), node_folder=str(tmp_path / "node"))
    reporter = Reporter(recording, lambda rank: Place(node="worker-0", rank=rank, local_rank=rank))

    reporter.document(Death(1, 123, -9, time.time_ns(), time.monotonic_ns()), None)
    reporter.finish((0, 1), None)
    reporter.drain()

    (failure,) = prefix.failures()
    assert (failure.rank, failure.writer) == (1, Writer.WORKER if wrote else Writer.AGENT)
    (entry,) = prefix.roster()
    assert {receipt.name: (receipt.durable, receipt.error, receipt.rank) for receipt in entry.receipts} == {
        "garbage.pb": (False, "it cannot be read", 1),
        failure.documents[0].name: (True, "", 1),
    }
    assert "garbage.pb" in caplog.text


@pytest.mark.parametrize("later", [True, False])
def test_an_exit_after_the_agents_signal(later: bool, prefix: Prefix, tmp_path: Path) -> None:
    """A worker whose handler exited with 0 was stopped, even if it was not asked before; one that exited before not."""
    spool = tmp_path / "node" / "spool" / "0-1"
    spool.mkdir(parents=True)
    now = time.monotonic_ns()
    exited = make_error(1, node="worker-0", local_rank=1, exception="SystemExit", message="0", monotonic_ns=now)
    (spool / error_key_for(exited)).write_bytes(encode(exited))
    recording = replace(prefix.recording(), node_folder=str(tmp_path / "node"))
    reporter = Reporter(recording, lambda rank: Place(node="worker-0", rank=rank, local_rank=rank))
    stop = Stop("another worker of this node had failed", now - 1 if later else now + 1, first=frozenset({0}))

    reporter.document(Death(1, 123, 0, time.time_ns(), now + 2), stop)
    reporter.finish((0, 1), None)
    reporter.drain()

    sent = [bool(failure.sent_signals) for failure in prefix.failures()]
    assert sorted(sent) == ([False, True] if later else [False])
