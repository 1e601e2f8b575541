"""torch's log line and its ChildFailedError are about the root cause, if that is known."""

import json
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from firstfault.model import WorkerError
from firstfault.testing import make_error
from firstfault_torch.agent.deaths import WorkerExit
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.agent.torch_error import keep_failure_lines, log_failure, name_root_cause

ROOT = make_error(3, exception="SystemExit", message="3", local_rank=1, group_rank=1)
VICTIM = ChildFailedError("t.py", {2: ProcessFailure(0, 20, 1, "")})


def _report(*codes: int) -> NodeReport:
    report = NodeReport(exit_codes=dict(enumerate(codes)))
    now = time.monotonic_ns()
    keep_failure_lines(
        report,
        [(WorkerExit(rank, 20, code, now, now), f"line {rank}") for rank, code in enumerate(codes)],
    )
    return report


@pytest.mark.parametrize(
    ("root", "group_rank", "logged"),
    [(ROOT, 1, "line 1"), (ROOT, 0, "line 0"), (None, 1, "line 0")],
    ids=["of this node", "of another node", "unknown"],
)
def test_torchs_line(
    root: WorkerError | None, group_rank: int, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line is logged, once: about the root cause, else about the node's first failure."""
    report = _report(1, 3)
    for _ in range(2):
        log_failure(report, root, group_rank)
    assert [record.getMessage() for record in caplog.records] == [logged]


def test_torchs_error(tmp_path: Path) -> None:
    """It names the root cause with its exit code and error file;
    not if that is elsewhere, unknown, or has no exit code.
    """
    file = tmp_path / "error.json"
    message = {"message": "ValueError: x", "extraInfo": {"py_callstack": "x", "timestamp": "1"}}
    file.write_text(json.dumps({"message": message}))
    report = _report(1, 3)
    report.error_files[1] = str(file)
    named = name_root_cause(VICTIM, report, ROOT, 1)
    assert isinstance(named, ChildFailedError)
    assert (named.name, list(named.failures)) == ("t.py", [3])
    failure = named.failures[3]
    assert (failure.local_rank, failure.pid, failure.exitcode) == (1, ROOT.place.pid, 3)
    assert failure.error_file == str(file)
    error = ValueError("of the agent")
    assert name_root_cause(error, report, ROOT, 1) is error
    assert name_root_cause(VICTIM, report, ROOT, 0) is VICTIM
    assert name_root_cause(VICTIM, report, None, 1) is VICTIM
    assert name_root_cause(VICTIM, _report(1), ROOT, 1) is VICTIM
