"""A launcher that prints the command of the process that it started last doesn't name
the process that ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.readers.commands import Ran

BEGIN = (
    "[2031-03-07 08:00:01,004] [INFO] [launch.py:164:main] nnodes=1, num_local_procs=3, node_rank=0"
)
SPAWNED = [
    (
        f"[2031-03-07 08:00:01,10{local}] [INFO] [launch.py:256:main] process 61{local} spawned with"
        f" command: ['python3', '-u', 'go.py', '--local_rank={local}']"
    )
    for local in range(3)
]
STEPS = [f"step {number} loss 2.{number}" for number in range(4)]
KILLED = [
    f"[2031-03-07 08:04:11,40{local}] [INFO] [launch.py:319:sigkill_handler] Killing subprocess 61{local}"
    for local in range(3)
]
RAISED = [
    "Traceback (most recent call last):",
    '  File "/job/go.py", line 40, in <module>',
    "    main()",
    '  File "/job/go.py", line 12, in main',
    "    step(batch)",
    "KeyError: 'labels'",
]
LOST_PEER = "RuntimeError: Connection closed by peer [127.0.0.1]:4021"
Show = Callable[..., "dict[str, Any]"]


def deepspeed(code: int) -> str:
    """Return DeepSpeed's last line: with the command of the last local rank."""
    return (
        "[2031-03-07 08:04:12,700] [ERROR] [launch.py:325:sigkill_handler] ['python3', '-u', 'go.py',"
        f" '--local_rank=2'] exits with return code = {code}"
    )


def old_launch(end: str) -> str:
    """Return the last line of torch.distributed.launch: with the command of the last local rank."""
    command = "['/usr/bin/python3', '-u', 'go.py', '--local_rank=2']"
    return f"subprocess.CalledProcessError: Command '{command}' {end}"


@pytest.fixture
def read_verdict(run: Callable[..., Ran], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that returns the verdict on a log of these lines."""

    def show(lines: Sequence[str], *options: str) -> dict[str, Any]:
        (tmp_path / "job.out").write_text("\n".join(lines) + "\n", encoding="utf-8")
        answer = json.loads(run("show", "--json", str(tmp_path / "job.out"), *options).out)
        return dict(answer["verdict"])

    return show


@pytest.mark.parametrize(
    "end",
    [
        [*KILLED, deepspeed(-9)],
        [old_launch("died with <Signals.SIGKILL: 9>.")],
    ],
)
def test_a_killed_process_is_not_the_last_started_local_rank(
    read_verdict: Show, end: list[str]
) -> None:
    """The rank is unknown, although the line has a local rank."""
    verdict = read_verdict([BEGIN, *STEPS, *end])
    assert verdict["ranks"] == []
    assert "SIGKILL" in str(verdict["headline"])


@pytest.mark.parametrize(
    "end",
    [
        [*KILLED, deepspeed(1)],
        [old_launch("returned non-zero exit status 1.")],
    ],
)
def test_an_exception_without_a_rank_is_not_given_to_the_last_one(
    read_verdict: Show, end: list[str]
) -> None:
    """An exception without a rank isn't given to the last local rank, and makes no victim of it."""
    verdict = read_verdict([BEGIN, *STEPS, *RAISED, *end])
    assert (verdict["ranks"], verdict["victims"]["count"]) == ([], 0)
    assert "KeyError" in str(verdict["headline"])
    labeled = [f"[rank1]: {line}" for line in RAISED]
    verdict = read_verdict([BEGIN, *STEPS, *labeled, *end])
    assert (verdict["ranks"], verdict["victims"]["count"]) == ([1], 0)


def test_the_kill_is_of_the_only_rank_without_an_exception(read_verdict: Show) -> None:
    """If all other ranks of the node raised, the kill is of the remaining one."""
    lost = [f"[rank{rank}]: {line}" for rank in (0, 2) for line in (*RAISED[:-1], LOST_PEER)]
    verdict = read_verdict([BEGIN, *STEPS, *lost, *KILLED, deepspeed(-9)])
    assert verdict["ranks"] == [1]
    assert read_verdict([BEGIN, *STEPS, *lost[:6], *KILLED, deepspeed(-9)])["ranks"] == []


def test_a_crash_is_given_to_no_rank(read_verdict: Show) -> None:
    """A rank that raised an exception may crash in its teardown."""
    lost = [f"[rank{rank}]: {line}" for rank in (0, 2) for line in (*RAISED[:-1], LOST_PEER)]
    verdict = read_verdict([BEGIN, *STEPS, *lost, *KILLED, deepspeed(-11)])
    assert verdict["ranks"] == []


def test_a_process_id_of_the_kernel_identifies_the_rank(read_verdict: Show, tmp_path: Path) -> None:
    """The kernel's process id identifies the rank if the launcher printed both."""
    kernel = tmp_path / "dmesg.txt"
    kernel.write_text("[ 77.1] Out of memory: Killed process 611 (python3) total-vm:9kB\n")
    lines = [BEGIN, *SPAWNED, *STEPS, *KILLED, deepspeed(-9)]
    assert read_verdict(lines)["ranks"] == []
    assert read_verdict(lines, "--with", str(kernel))["ranks"] == [1]


def test_an_exception_is_of_the_only_rank_that_lost_no_peer(read_verdict: Show) -> None:
    """If all other ranks lost a peer, a logged exception without a rank is that peer's."""
    logged = ["ERROR could not go on", *RAISED[:1], *RAISED[3:]]

    def log(message: str) -> list[str]:
        text = "\n".join((*RAISED[:-1], message))
        records = ({"rank": rank, "level": "ERROR", "exc_info": text} for rank in (0, 2))
        return [BEGIN, *STEPS, *logged, *map(json.dumps, records), *KILLED, deepspeed(1)]

    verdict = read_verdict(log(LOST_PEER))
    assert (verdict["ranks"], "KeyError" in verdict["headline"]) == ([1], True)
    assert read_verdict(log("ValueError: no labels"))["ranks"] != [1]
