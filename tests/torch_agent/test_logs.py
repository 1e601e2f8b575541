"""The end of a failed worker's stderr in its failure, through a real agent without Flyte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.layout import ROSTER
from firstfault.model import Phase
from firstfault.render.plain import flyte_message
from firstfault.wire.documents import decode_presence, unpack
from tests.nodes import Job
from tests.torch_agent.trainings import prints_and_raises

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.jobs

MOST = 2 * 1024


def test_a_failed_worker_has_its_log(tmp_path: Path) -> None:
    """The failure has the last lines before the traceback, redacted and bounded, and the report quotes them once.

    They came in the node's last roster entry, of which the bundle has a copy, and no object was written for them.
    """
    fields = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2}
    with Job(tmp_path, prints_and_raises, config=fields).start() as job:
        ended = job.end()
    assert "step 399" in ended.logs, "stderr still reaches the agent's own"
    assert ended.verdict.ranks == (1,)
    root = ended.verdict.root
    assert root is not None
    assert root.exception is not None
    lines = root.log_tail.splitlines()
    assert lines[-2:] == ["step 399 of shard-399", "password=***"]
    assert all(line.startswith("step ") for line in lines[:-1]), "whole lines, and no traceback"
    assert MOST * 0.9 < len(root.log_tail) <= MOST
    message = flyte_message(MultiErrorFileOutputReader(f"{tmp_path}/0").report(ended.conclusion))
    assert message.count("step 399 of shard-399") == 1
    assert message.count("Traceback (most recent call last)") == 1
    (victim,) = (failure for failure in ended.job.failures if failure is not root)
    assert "step" not in victim.log_tail
    roster = tmp_path / "0" / ROSTER
    entries = {path.name: decode_presence(path.read_bytes(), path.name) for path in roster.glob("*.pb")}
    assert sorted(entry.phase.value for entry in entries.values()) == ["failed", "joined"]
    (bundle,) = roster.glob("*.bundle")
    (failed,) = (name for name, entry in entries.items() if entry.phase is Phase.FAILED)
    copied = decode_presence(unpack(bundle.read_bytes())[f"roster/{failed}"], failed)
    assert [(tail.rank, tail.text) for tail in copied.log_tails] == [(1, root.log_tail)]
