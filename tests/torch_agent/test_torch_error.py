"""torch's log line and its ChildFailedError are about the root cause, if that is known."""

import json
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from firstfault_torch.agent.deaths import WorkerExit
from firstfault_torch.agent.launch import name_root_cause
from firstfault_torch.agent.reporter import NodeReport
from firstfault_torch.compat.torch_agent import log_root_or_first_failure

VICTIM = ChildFailedError("t.py", {2: ProcessFailure(0, 20, 1, "")})


def _report(*codes: int) -> NodeReport:
    """Return the report of the second node of two workers each, whose first rank failed first."""
    now = time.monotonic_ns()
    report = NodeReport(
        exits={
            2 + local_rank: WorkerExit(local_rank, 20 + local_rank, code, now, now)
            for local_rank, code in enumerate(codes)
        }
    )
    report.failure_lines.update({rank: f"rank {rank}" for rank in report.exits})
    return report


@pytest.mark.parametrize(
    ("root_ranks", "logged"),
    [((3,), "rank 3"), ((1, 3), "rank 3"), ((1,), "rank 2"), ((), "rank 2")],
    ids=["of this node", "of both nodes", "of another node", "unknown"],
)
def test_one_line_is_logged_in_torchs_words(
    root_ranks: tuple[int, ...], logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One line is logged, once: about the root cause, else about the node's first failure."""
    report = _report(1, 3)
    for _ in range(2):
        log_root_or_first_failure(report.failure_lines, root_ranks)
    assert [record.getMessage() for record in caplog.records] == [logged]


def test_torchs_error_names_the_root_cause(tmp_path: Path) -> None:
    """It names the root cause with its exit code and error file;
    not if that is elsewhere, unknown, or a success for torch.
    """
    file = tmp_path / "error.json"
    message = {"message": "ValueError: x", "extraInfo": {"py_callstack": "x", "timestamp": "1"}}
    file.write_text(json.dumps({"message": message}))
    report = _report(1, 3)
    report.error_files[1] = str(file)
    named = name_root_cause(VICTIM, report, (1, 3))
    assert isinstance(named, ChildFailedError)
    assert (named.name, list(named.failures)) == ("t.py", [3])
    failure = named.failures[3]
    assert (failure.local_rank, failure.pid, failure.exitcode) == (1, 21, 3)
    assert failure.error_file == str(file)
    error = ValueError("of the agent")
    assert name_root_cause(error, report, (3,)) is error
    assert name_root_cause(VICTIM, report, (2,)) is VICTIM
    assert name_root_cause(VICTIM, report, (1,)) is VICTIM
    assert name_root_cause(VICTIM, report, ()) is VICTIM
    assert name_root_cause(VICTIM, _report(1, 0), (3,)) is VICTIM
