"""Which node or rank wrote a file: a kernel's log is known by its content, and the name of a log
of a job names no machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.readers.commands import Ran

BOX = """\
step 1 loss 2.5
step 2 loss 2.4
============================================================
go.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2031-03-07_05:10:03
  host      : cell-7
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 517)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 517
============================================================
"""
KILLED = "Out of memory: Killed process 517 (python3) total-vm:9kB, anon-rss:8kB, UID:0"
STAMPS = {
    "seconds": "[  912.000125] ",
    "date": "[Fri Mar  7 05:10:00 2031] ",
    "syslog": "Mar  7 05:10:00 cell-7 kernel: ",
    "journal": "2031-03-07T05:10:00+0000 cell-7 kernel: ",
}


@pytest.mark.parametrize(
    "name",
    [
        "dmesg-cell-7.txt",
        "cell-7-dmesg.txt",
        "cell-7.dmesg.log",
        "88-dmesg-cell-7.txt",
        "dmesg.out",
        "kern.log",
        "what the node printed.txt",
    ],
)
@pytest.mark.parametrize("stamp", STAMPS)
def test_a_kernels_log_is_known_by_its_lines(
    run: Callable[..., Ran], tmp_path: Path, name: str, stamp: str
) -> None:
    """Its lines show what it is, whatever its name; the killed process is that of the job."""
    (tmp_path / "train.log").write_text(BOX)
    lines = [f"{STAMPS[stamp]}{text}\n" for text in ("python3 invoked oom-killer: order=0", KILLED)]
    (tmp_path / name).write_text("".join(lines))
    ran = run("show", "--json", str(tmp_path / "train.log"), "--with", str(tmp_path / name))
    verdict = json.loads(ran.out)["verdict"]
    assert (verdict["ranks"], verdict["node"]) == ([1], "cell-7")
    assert "the kernel's OOM killer" in verdict["headline"]


def test_seconds_before_lines_do_not_make_a_kernels_log(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """A program that prints the seconds since its start isn't the kernel."""
    for node in (0, 1):
        lines = [f"[    {step}.000125] step {step} loss 2.{step}\n" for step in range(9)]
        lines += ["OSError: [Errno 28] No space left on device\n"] * node
        (tmp_path / f"trainer-{node}.log").write_text("".join(lines))
    verdict: dict[str, Any] = json.loads(run("show", "--json", str(tmp_path)).out)["verdict"]
    assert verdict["node"] == "trainer-1"


@pytest.mark.parametrize(
    "names",
    [
        ("job.out", "job.err"),
        ("slurm-7781.out", "slurm-7781.err"),
        ("stdout.log", "stderr.log"),
        ("train.o77", "train.e77"),
    ],
)
def test_the_common_part_of_two_names_is_no_machine(
    run: Callable[..., Ran], tmp_path: Path, names: tuple[str, str]
) -> None:
    """The common part of their names isn't a machine: the box names it."""
    (tmp_path / names[0]).write_text("step 1 loss 2.5\nstep 2 loss 2.4\n")
    (tmp_path / names[1]).write_text(BOX)
    verdict = json.loads(run("show", "--json", str(tmp_path)).out)["verdict"]
    assert (verdict["ranks"], verdict["node"]) == ([1], "cell-7")
