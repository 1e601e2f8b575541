"""By what processes were stopped: a report has the signal that the log has, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.readers.commands import Ran

STEPS = [f"[1,{rank}]<stdout>:step {step} loss 2.{step}" for step in range(4) for rank in range(3)]
CRASH = "mpirun noticed that process rank 2 with PID 209 on node cell-7 exited on signal 11."
ABORTED = "Primary job  terminated normally, but 1 process returned"
AGENT = "W0307 08:00:01.000000 20 torch/distributed/elastic/"
INTERRUPTED = [
    "^C",
    f"{AGENT}agent/server/api.py:719] Received Signals.SIGINT death signal, shutting down workers",
    f"{AGENT}multiprocessing/api.py:897] Sending process 31 closing signal SIGINT",
    *(
        f"[rank{rank}]: {line}"
        for rank in range(2)
        for line in (
            "Traceback (most recent call last):",
            '  File "/job/go.py", line 12, in <module>',
            "    loss.backward()",
            "KeyboardInterrupt",
        )
    ),
]
LOST = [
    "0: step 1 loss 2.5",
    "1: step 1 loss 2.5",
    "srun: error: Node failure on cell-5",
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    "srun: error: cell-1: task 0: Terminated",
    "srun: error: cell-5: task 1: Killed",
]


@pytest.fixture
def shown(run: Callable[..., Ran], tmp_path: Path) -> Callable[[Sequence[str]], str]:
    """Return a function that returns the report on a log of these lines, with single blanks."""

    def show(lines: Sequence[str]) -> str:
        (tmp_path / "job.out").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return " ".join(run("show", str(tmp_path / "job.out")).out.split())

    return show


def test_a_launchers_line_without_a_signal_gives_none(
    shown: Callable[[Sequence[str]], str],
) -> None:
    """The line of a launcher that ended the rest of its job is cited; it has no signal."""
    report = shown([*STEPS, ABORTED, CRASH])
    assert "stopped ranks 0-1 by their launcher" in report
    assert "SIGTERM" not in report
    assert f"[job.out:{len(STEPS) + 1}]" in report


def test_a_rank_of_horovod_that_lost_a_peer_is_a_victim(
    shown: Callable[[Sequence[str]], str],
) -> None:
    """A rank that reports a lost peer at a level of one letter is a victim, not stopped."""
    lost = (
        "[1,0]<stderr>:[2031-03-07 07:00:12.331: E /h/operations.cc:697] [0]: background loop"
        " uncaught exception: [/h/pair.cc:589] Read error [10.0.0.12]:22941: Connection reset by peer"
    )
    report = shown([*STEPS, ABORTED, lost, CRASH])
    assert "victim rank 0" in report
    assert "stopped rank 1 by its launcher" in report


def test_ctrl_c_is_a_stop_by_sigint(shown: Callable[[Sequence[str]], str]) -> None:
    """After Ctrl-C, torch's agent sends SIGINT."""
    report = shown(["step 1", "step 2", *INTERRUPTED])
    assert "stopped ranks 0-1 SIGINT from their launcher" in report


def test_no_launcher_stops_a_process_on_a_lost_node(shown: Callable[[Sequence[str]], str]) -> None:
    """No launcher can end a process on a lost node."""
    report = shown(LOST)
    assert "stopped rank 0 SIGTERM from its launcher" in report
    assert "no report rank 1 its node was lost" in report


def test_a_merged_log_does_not_show_what_stderr_was(shown: Callable[[Sequence[str]], str]) -> None:
    """A log of all outputs doesn't show what was written to stderr."""
    refused = ["0: usage: go.py [-h]", "0: go.py: error: unrecognized arguments: --lr"]
    report = shown(
        ["0: step 1", "1: step 1", *refused, "srun: error: cell-1: task 0: Exited with exit code 2"]
    )
    assert "unrecognized arguments" in report
    assert "stderr" not in report


STARTED = [
    *(f"Initializing distributed: GLOBAL_RANK: {rank}, MEMBER: {rank + 1}/3" for rank in range(3)),
    "Epoch 0:  50%|#####     | 50/100 [00:20<00:20,  2.50it/s, v_num=0]",
]
SIGNALED = [f"[rank: {rank}] Received SIGTERM: 15" for rank in range(3)]
RAISED = [
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "/job/train.py", line 44, in main',
    "[rank1]:     step(batch)",
    "[rank1]: KeyError: 'labels'",
]
KILLED = (
    "[rank: 1] Child process with PID 413 terminated with code -9."
    " Forcefully terminating all other processes to avoid zombies"
)


def test_a_signal_that_all_ranks_received_ended_the_job(
    shown: Callable[[Sequence[str]], str],
) -> None:
    """If no rank shows a failure and all of them received a signal, it ended the job."""
    report = shown([*STARTED, *SIGNALED, "Bypassing SIGTERM: 15"])
    assert report.startswith("terminated retry: Received SIGTERM: 15")
    assert f"[job.out:{len(STARTED) + 1}-{len(STARTED) + 3}]" in report


@pytest.mark.parametrize(
    ("lines", "headline"),
    [
        ([*SIGNALED[:1], *SIGNALED[2:]], ""),
        ([line.removeprefix("[rank: 0] ") for line in SIGNALED[:1]], ""),
        ([*RAISED, *SIGNALED], "KeyError rank 1"),
        ([*SIGNALED, *RAISED], "KeyError rank 1"),
        ([KILLED, *SIGNALED], "SIGKILL rank 1"),
        ([*SIGNALED, "Epoch 1, step 9 loss 2.1"], ""),
        ([*SIGNALED, "`Trainer.fit` stopped: `max_epochs=1` reached."], "no error"),
    ],
    ids=[
        "a rank that received none",
        "no rank",
        "an exception above",
        "an exception below",
        "a killed rank",
        "later steps",
        "success",
    ],
)
def test_a_signal_ended_no_job_that_failed_otherwise_or_went_on(
    shown: Callable[[Sequence[str]], str], lines: Sequence[str], headline: str
) -> None:
    """Launchers also send signals to the peers of a failed rank, and programs handle them."""
    report = shown([*STARTED, *lines])
    assert report.startswith(headline)
    assert not report.startswith("terminated")
