"""``firstfault show`` on logs in shapes and of launchers that have no table row of their own, or a rare one."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from firstfault.cli import EXIT
from tests.readers.commands import Ran
from tests.readers.test_job_logs import LOST, RAISED, STEPS, box, of

Show: TypeAlias = Callable[..., dict[str, Any]]
OWN, OTHERS = of("[rank1]: ", RAISED), of("[rank0]: ", LOST)
FAILED = [*of("[rank0]: ", STEPS[:2]), *OWN, *OTHERS]
DONE = "training finished, model saved"
BARE = [line.strip() for line in RAISED]
RANKS = ("rank 0 of 2, pid 410", "rank 1 of 2, pid 411")


@pytest.fixture
def show(run: Callable[..., Ran], tmp_path: Path) -> Show:
    """Return a function that shows lines as one log, with further files: the exit code is the key "code"."""

    def shown(lines: list[str], **more: list[str]) -> dict[str, Any]:
        paths = []
        for name, content in {"job": lines, **more}.items():
            paths.append(str(tmp_path / f"{name}.txt"))
            Path(paths[-1]).write_text("\n".join(content) + "\n", encoding="utf-8")
        ran = run("show", "--json", *paths)
        return {"code": ran.code, **(json.loads(ran.out) if ran.out else {"said": ran.err})}

    return shown


def as_csv(lines: list[str]) -> list[str]:
    """Return a table with a column for the time and one for the line."""
    out = io.StringIO()
    csv.writer(out).writerows(
        [("timestamp", "message"), *((1733727000000 + at, line) for at, line in enumerate(lines))]
    )
    return out.getvalue().splitlines()


def as_newest_first(lines: list[str]) -> list[str]:
    """Return objects with a time, the last line first."""
    objects = [{"line": line, "timestamp": f"2031-05-06T07:08:{at:02}Z"} for at, line in enumerate(lines)]
    return [json.dumps(item) for item in reversed(objects)]


EXPORTS = {
    "a table": as_csv(FAILED),
    "objects with unknown keys": [json.dumps({"n": at, "what": line, "to": "err"}) for at, line in enumerate(FAILED)],
    "an array": ["[", *(json.dumps({"textPayload": line}, indent=1) + "," for line in FAILED), "]"],
    "the newest line first": as_newest_first(FAILED),
    "a prefix in front of others": of("<east/blue> ", of("2031-05-06T07:08:09.1Z ", [*FAILED, *STEPS, *STEPS])),
    "no indentation": [*of("[rank1]: ", BARE), *OTHERS],
    "Windows paths": [line.replace("/job/", "C:\\\\job\\\\") for line in FAILED],
    "one line": [*of("[rank0]: ", STEPS[:2]), "[rank1]: " + " ".join(line.strip() for line in RAISED), *OTHERS],
    "lines of pytest": [*of("E   ", RAISED), "1 failed in 3s"],
    "one escaped string": [f'"error": "{chr(92)}n'.join(["", *OWN]), *OTHERS],
}


@pytest.mark.parametrize("form", EXPORTS)
def test_exports_of_collectors(show: Show, form: str) -> None:
    """The lines that the program printed are found in what a collector, a chat or an editor made of them."""
    found = show(EXPORTS[form])
    assert (found["root"]["type"], found["root"]["message"]) == ("ValueError", "no labels in shard 9")
    expected: list[list[int]] = (
        [[]] if form == "lines of pytest" else [[1], []] if form == "one escaped string" else [[1]]
    )
    assert found["verdict"]["ranks"] in expected


def _hydra(rank: int, signal: str) -> list[str]:
    return [f"=   RANK {rank} PID 8{rank} RUNNING AT a", f"=   KILLED BY SIGNAL: {signal}"]


LAUNCHERS = {
    "a gloo prefix of Horovod": (of("[1]<stderr>:", RAISED) + of("[0]<stderr>:", LOST), [1], "user_code"),
    "a process id of the journal": (
        [*RANKS, *of("May  6 07:08:09 host job[410]: ", LOST), *of("May  6 07:08:09 host job[411]: ", RAISED)],
        [1],
        "user_code",
    ),
    "the kernel and a process id": ([*RANKS, *STEPS, "Out of memory: Killed process 411 (python)"], [1], "host_oom"),
    "files behind one another": (["==> w-0.log <==", *LOST, "==> w-1.log <==", *RAISED], [1], "user_code"),
    "a command line of torchrun": (
        [
            "+ torchrun --nproc_per_node 8 --nnodes 2 --node_rank 1 train.py",
            *STEPS,
            "E0506 07:08:09.1 7 torch/a.py:9] failed (exitcode: -11) local_rank: 2 (pid: 81)",
        ],
        [10],
        "signal",
    ),
    "MPI_ABORT": (
        [*STEPS, "MPI_ABORT was invoked on rank 2 in communicator X", "with errorcode 3."],
        [2],
        "exit",
    ),
    "Hydra, which kills the rest": (
        [*STEPS, *_hydra(2, "4 (Illegal instruction)"), *_hydra(0, "9 (Killed)"), *_hydra(1, "9 (Killed)")],
        [2],
        "signal",
    ),
    "a barrier of JAX": (
        [*RAISED[:5], "x.XlaRuntimeError: Barrier timed out. Timed out task names:", "/job:j/replica:0/task:3"],
        [3],
        "hang",
    ),
    "a line that names the rank": ([*RAISED, "CRITICAL [train:9, rank=6] Uncaught ValueError"], [6], "user_code"),
    "a limit of LSF": ([*STEPS, "TERM_RUNLIMIT: job killed after reaching LSF run time limit."], [], "preemption"),
    "a limit of PBS": ([*STEPS, "=>> PBS: job killed: mem 5kb exceeded limit 4kb"], [], "host_oom"),
    "a lost daemon": ([*STEPS, "  Remote daemon: [[1,0],3] on node host-2"], [], "node_lost"),
    "a status of a pod": (
        [*of("[pod/w-0/c] ", ["rank 0/2 ready", *LOST]), "[pod/w-1/c] rank 1/2 ready", "w-1   0/1   OOMKilled   0"],
        [1],
        "host_oom",
    ),
    "a preempted job": (
        [
            *STEPS,
            "slurmstepd: error: *** STEP 8.0 ON a CANCELLED AT 2031-05-06T07:08:09 DUE TO PREEMPTION ***",
            *of("[rank1]: ", [*RAISED[:3], "SIGTERMException"]),
            "srun: error: a: tasks 0-1: Exited with exit code 1",
        ],
        [],
        "preemption",
    ),
    "torchrun in a task of srun": (
        [
            "$ srun --label torchrun --nnodes 2 --nproc-per-node 4 train.py",
            *of("0: ", STEPS),
            *of("1: ", STEPS),
            "srun: error: host-2: task 1: Exited with exit code 1",
        ],
        [],
        "exit",
    ),
    "a chain of Ray's tasks": (
        [
            "(Train pid=70) - (ip=9.8.7.6, pid=71) world_rank=0, local_rank=0",
            "(Train pid=70) - (ip=9.8.7.5, pid=72) world_rank=1, local_rank=0",
            *RAISED[:3],
            "ray.exceptions.RayTaskError(ValueError): ray::_Inner.train() (pid=70, ip=9.8.7.6, repr=Train)",
            RAISED[1],
            "ray.exceptions.RayTaskError(ValueError): ray::Worker.execute() (pid=72, ip=9.8.7.5, repr=<x>)",
            *RAISED[1:],
        ],
        [1],
        "user_code",
    ),
    "a rendezvous that failed": (
        [
            RAISED[0],
            '  File "/v/lib/python3.12/site-packages/torch/distributed/elastic/rendezvous/dynamic.py", line 9, in join',
            "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        ],
        [],
        "rendezvous",
    ),
    "a drained node of Ray": (
        [
            *STEPS,
            "(Controller pid=7) Preemption notice received: node ab12 (ip=9.8.7.6) is draining, reason: spot",
            *RAISED[:3],
            "RuntimeError: Training has failed even after 3 attempts.",
        ],
        [],
        "preemption",
    ),
    "a dead node of Ray": (
        [*STEPS, "The node with node id: ab12 and ip: 9.8.7.6 has been marked dead"],
        [],
        "node_lost",
    ),
    "a code alone": ([*STEPS, "Error: failed to run torchrun", "Exit code: 3"], [], "exit"),
    "a kill below an exception": ([*RAISED, "a child has failed", "Killed"], [], "user_code"),
    "a kill above what a peer raised": ([*of("[rank0]: ", LOST), "Killed"], [], "signal"),
    "a thread of a library, and an exit": (
        [
            "rank 0 of 1, pid 71",
            *STEPS,
            "Exception in thread Thread-2:",
            RAISED[0],
            '  File "/v/lib/python3.12/threading.py", line 9, in run',
            "BrokenPipeError: [Errno 32] Broken pipe",
            "E0506 07:08:09.1 7 torch/a.py:9] failed (exitcode: -7) local_rank: 0 (pid: 71)",
        ],
        [0],
        "signal",
    ),
    "a traceback that is cut off": ([*of("[rank0]: ", STEPS), *OWN[:5]], [1], "unknown"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_who_failed(show: Show, launcher: str) -> None:
    """Rank and category are found, whichever program reports the end."""
    lines, ranks, category = LAUNCHERS[launcher]
    found = show(lines)["verdict"]
    assert (found["ranks"], found["category"]) == (ranks, category)


NOISE = (
    "upload of metrics failed: HTTP 503, retrying (2/5)",
    "Exception ignored in: <function Loader.__del__ at 0x7f>",
    *RAISED,
    "could not close the cache: [Errno 9] Bad file descriptor",
)
SUCCESSES = {
    "noise after the end": [*STEPS, DONE, *NOISE],
    "an actor that died": [*STEPS, *of("(A pid=71) ", RAISED), "Job 'raysubmit_4' succeeded"],
    "each rank goes on": [*of("0: ", LOST), *of("1: ", RAISED), *of("0: ", [DONE]), *of("1: ", [DONE])],
    "a report of LSF above, and its threads below": [
        "Subject: Job 71: <train> in cluster <c> Done",
        *STEPS,
        "Exception in thread Thread-2:",
        RAISED[0],
        '  File "/v/lib/python3.12/threading.py", line 9, in run',
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
    "the next command": [*STEPS, *box((0, 1)), "me@host:~$ torchrun train.py", *STEPS, DONE],
    "a pod that completed": [*STEPS, "[1,1]<stderr>:E0506 failed call to cuInit", "launcher-x8  0/1  Completed  0  4m"],
}


@pytest.mark.parametrize("case", SUCCESSES)
def test_a_success_is_proven_at_the_end(show: Show, case: str) -> None:
    """Handled exceptions, noise at the end and an earlier job's failure make no failure of a success."""
    assert show(SUCCESSES[case])["code"] == EXIT.OK


def test_the_last_job_of_a_file_counts(show: Show) -> None:
    """A second report of torchrun about the same node is another job's, and so is what follows a shell's command."""
    other = [line.replace("ValueError: no labels", "KeyError: no key") for line in RAISED]
    for between in ([], ["(base) me@host:~/job$ CUDA_VISIBLE_DEVICES=0,1 python train.py"]):
        found = show([*OWN, *box((1, 1)), *between, *STEPS, *of("[rank0]: ", other), *box((0, 1))])
        assert (found["verdict"]["ranks"], found["root"]["type"]) == ([0], "KeyError")


def test_a_log_of_the_kernel_in_a_second_file(show: Show) -> None:
    """The kernel's log decides the category and names the machine."""
    cuda = [*of("[rank1]: ", [*RAISED[:4], "RuntimeError: CUDA error: unspecified launch failure"]), *OTHERS]
    xid = ["May  6 07:08:09 gpu-17 kernel: NVRM: Xid (PCI:0000:4e:00): 79, pid=411, GPU has fallen off the bus."]
    found = show([*RANKS, *cuda], dmesg=xid)
    assert (found["verdict"]["ranks"], found["verdict"]["category"]) == ([1], "gpu_hardware")
    assert found["verdict"]["node"] == "gpu-17"
    assert found["code"] == EXIT.ROOT_CAUSE_RETRYABLE


def test_logs_of_several_jobs(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Logs with different job numbers aren't merged."""
    for job in (4711, 4712):
        (tmp_path / f"slurm-{job}.out").write_text("\n".join(FAILED), encoding="utf-8")
    assert "2 jobs (slurm-4711.out, slurm-4712.out ...); give those of one" in run("show", str(tmp_path)).err


def test_a_word_that_most_lines_have(show: Show, tmp_path: Path) -> None:
    """Lines with "error" in each of them cost no more than lines without, and the failure is still found."""
    noisy = [f"step {number} error rate {number % 7}" for number in range(60_000)]
    found = show([*noisy, *FAILED, *noisy])
    assert found["verdict"]["ranks"] == [1]
