"""``firstfault show`` on logs in which several lines could be the cause,
or several names could be a process's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstfault.utils.toml import parse_toml
from tests.readers.commands import Ran

_CASES = parse_toml(Path(__file__).with_name("log_causes.toml").read_text(encoding="utf-8"))


@pytest.fixture
def show(run: Callable[..., Ran], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that shows a text as the log of a job,
    as JSON with the exit code as "code".
    """

    def shown(text: str) -> dict[str, Any]:
        path = tmp_path / "job.txt"
        path.write_text(text, encoding="utf-8")
        ran = run("show", "--json", str(path))
        return {"code": ran.code, **(json.loads(ran.out) if ran.out else {"stderr": ran.err})}

    return shown


@pytest.mark.parametrize("name", _CASES)
def test_the_verdict_has_the_cause_that_the_log_proves(
    show: Callable[[str], dict[str, Any]], name: str
) -> None:
    """The headline has the cause, and the verdict the ranks and the
    category that the log proves.
    """
    case = _CASES[name]
    verdict = show(case["log"])["verdict"]
    assert case["headline"] in verdict["headline"]
    assert (verdict["ranks"], verdict["category"]) == (case.get("ranks", []), case["category"])
    assert verdict["node"] == case["node"] if "node" in case else True
    assert not case.get("absent") or case["absent"] not in json.dumps(verdict)


@pytest.mark.parametrize(
    "before",
    [
        [f"{hour:02}:{minute:02}:55.477 [I] " for hour in (2, 5, 7, 12) for minute in (11, 22, 33)],
        [f"{hour:02}:{minute:02} " for hour in (2, 5, 7, 12) for minute in (11, 22, 33)],
        [f"[{number}] " for number in range(14, 26)],
        [f"{number}: " for number in range(14, 26)],
    ],
    ids=["times", "hours and minutes", "counters in brackets", "counters"],
)
def test_times_and_counters_are_no_labels(
    show: Callable[[str], dict[str, Any]], before: list[str]
) -> None:
    """Hours and numbers of lines before the lines of one process name no ranks."""
    lines = [f"{prefix}step {number} loss 2" for number, prefix in enumerate(before)]
    frame = '  File "/job/train.py", line 12, in main'
    raised = ["Traceback (most recent call last):", frame, "    go()", "KeyError: 1"]
    found = show("\n".join([*lines, *raised]))
    assert found["verdict"]["headline"].startswith("KeyError")
    assert found["verdict"]["ranks"] == []
    assert found["verdict"]["victims"]["count"] == 0


_FRAME = """Traceback (most recent call last):
  File "/job/train.py", line 44, in main
    step(batch)
"""
_NO_ANSWER = (
    "NET/IB : Got completion from peer 10.0.0.{}<41234> with status={} opcode=0 len=0 vendor err"
    " 129 (Recv) localGid fe80::1 remoteGid fe80::2 hca mlx5_2"
)
_REMOTE_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: P.cpp:1333, remote process exited or there"
    " was a network error, NCCL version 2.21.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"
    " prematurely.\nLast error:\n"
)
_COMPARE = "compare the stacks and logs of all ranks"
_SHARED_MEMORY = "give its container more shared memory"


def _print_as_ranks(*texts: str) -> str:
    """Return exceptions as torch prints them, one for each rank."""
    lines = ((rank, line) for rank, text in enumerate(texts) for line in text.splitlines())
    return "".join(f"[rank{rank}]: {line}\n" for rank, line in lines)


@pytest.mark.parametrize(
    ("log", "step"),
    [
        (
            _print_as_ranks("step 1", f"{_FRAME}{_REMOTE_ERROR}{_NO_ANSWER.format(7, 12)}"),
            "check the link of mlx5_2, and the host 10.0.0.7, which didn't answer",
        ),
        (
            _print_as_ranks(
                f"{_FRAME}{_REMOTE_ERROR}{_NO_ANSWER.format(7, 12)}",
                f"{_FRAME}{_REMOTE_ERROR}{_NO_ANSWER.format(8, 12)}",
            ),
            _COMPARE,
        ),
        (
            _print_as_ranks("step 1", f"{_FRAME}{_REMOTE_ERROR}{_NO_ANSWER.format(7, 5)}"),
            _COMPARE,
        ),
        (
            _print_as_ranks(
                "step 1", f"{_FRAME}RuntimeError: CUDA error: device-side assert triggered"
            ),
            "check the labels and indexes that the kernel got",
        ),
        (
            _print_as_ranks(
                "step 1", f"{_FRAME}RuntimeError: CUDA error: an illegal memory access"
            ),
            "rerun with CUDA_LAUNCH_BLOCKING=1",
        ),
        (
            (
                f"{_FRAME}RuntimeError: DataLoader worker (pid 41) is killed by signal: Bus error. It is"
                " possible that dataloader's workers are out of shared memory.\n\n"
                "The above exception was the direct cause of the following exception:\n\n"
                f"{_FRAME}RuntimeError: DataLoader worker (pid(s) 41) exited unexpectedly\n"
            ),
            _SHARED_MEMORY,
        ),
        (
            (
                "gpu-a:813:921 [2] include/shmutils.cc:72 NCCL WARN Error: failed to extend"
                " /dev/shm/nccl-abcd12 to 33030532 bytes\n"
                f"{_FRAME}torch.distributed.DistBackendError: NCCL error in: P.cpp:1970, unhandled"
                " system error\nLast error:\nError while creating shared memory segment"
                " /dev/shm/nccl-abcd12 (size 9637888)\n"
            ),
            _SHARED_MEMORY,
        ),
    ],
    ids=[
        "a peer without an answer",
        "two peers",
        "a closed queue",
        "a device-side assert",
        "an illegal access",
        "a bus error of a loader",
        "shared memory of NCCL",
    ],
)
def test_the_next_step_is_about_what_the_text_identifies(
    show: Callable[[str], dict[str, Any]], log: str, step: str
) -> None:
    """The next step is about the fault or the host in the text, not about its whole category."""
    assert step in show(log)["next"][0]["text"]


@pytest.mark.parametrize(
    ("xid", "said"),
    [(48, "line 2 reports Xid 48, double-bit ECC error"), (31, "the log ends with")],
)
def test_a_kernels_log_without_a_job_names_the_hardware_error(
    show: Callable[[str], dict[str, Any]], xid: int, said: str
) -> None:
    """A GPU's fault is no failure of a job, but it's what the log has; a program causes Xid 31."""
    begin = "[Mon May  4 11:00:0{} 2026] "
    log = (
        f"{begin.format(1)}nvidia 0000:65:00.0: enabling device\n"
        f"{begin.format(2)}NVRM: Xid (PCI:0000:65:00): {xid}, pid=4711, name=python, text\n"
        f"{begin.format(3)}systemd: a unit was started\n"
    )
    shown = show(log)
    assert not shown.get("verdict")
    assert said in json.dumps(shown)
