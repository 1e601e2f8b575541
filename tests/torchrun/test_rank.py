"""Ranks that no agent starts, as those of srun and mpirun, record what ends them;
readers find the root cause.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.model import Phase
from firstfault.slurm_pointer import find_pointers
from firstfault_torch.torchrun.rank import _build_engine
from tests.ports import get_free_port
from tests.prefix import Prefix
from tests.torchrun.test_same_program import PROGRAM
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TRAINING = str(Path(__file__).parent / "faulty.py")
RECORD = ("-m", "firstfault_torch.record")
LONGEST_S = 120
SIZE = 2
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
OMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
NONE_SET = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "FIRSTFAULT_WORKER"))


def _environment(**variables: str) -> dict[str, str]:
    """Return this process's variables without those of a rank, and `variables`."""
    return {name: value for name, value in os.environ.items() if name not in NONE_SET} | variables


def run_two_ranks(command: Sequence[str], names: tuple[str, str, str], folder: Path) -> list[int]:
    """Start two ranks as a launcher does; return their exit codes.

    Slurm has one on each of two hosts, and terminates the other, as ``srun --kill-on-bad-exit``
    does.

    `names` are the launcher's variables of rank, local rank and world size.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(get_free_port()),
        "OMP_NUM_THREADS": "1",
    }
    ranks = []
    on_host = 1 if names is SLURM else 2
    for rank in range(SIZE):
        own = dict(zip(names, map(str, (rank, rank % on_host, SIZE)), strict=True))
        if names is SLURM:
            own |= {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"}
            own |= {"XDG_STATE_HOME": str(folder / "home")}
        place = {"FIRSTFAULT_FOLDER": str(folder), "FIRSTFAULT_NODE": f"host-{rank // on_host}"}
        environment = _environment(**common, **own, **place)
        ranks.append(
            subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.DEVNULL)
        )
    deadline = time.monotonic() + LONGEST_S
    try:
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if names is SLURM and any(rank.poll() for rank in ranks):
                for rank in ranks:
                    rank.terminate()
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.wait() for rank in ranks]


def await_last_roster_entries(prefix: Prefix, count: int) -> None:
    """Wait until so many ranks have a last roster entry: their recorders outlive them."""
    wait_until(
        lambda: sum(entry.phase is not Phase.JOINED for entry in prefix.roster()) >= count,
        seconds=LONGEST_S,
    )


@pytest.mark.jobs
@pytest.mark.parametrize(
    ("fault", "names", "headline"),
    [
        ("raise", SLURM, "ValueError, rank 1 on host-1: batch 7 has no labels"),
        ("kill", OMPI, "SIGKILL, rank 1 on host-0: "),
        ("hang", SLURM, "hang, rank 1 on host-1: it was at faulty.py:"),
    ],
)
def test_the_failed_rank_is_named_whatever_the_launcher_does(
    fault: str, names: tuple[str, str, str], headline: str, tmp_path: Path
) -> None:
    """The rank that failed is named, whether or not the launcher terminates the others."""
    way = [*RECORD, TRAINING, fault] if names is SLURM else [TRAINING, fault, "import"]
    codes = run_two_ranks(way, names, tmp_path)
    assert 0 not in codes
    prefix = Prefix(tmp_path / "4711.2" / "1" if names is SLURM else tmp_path / "0")
    await_last_roster_entries(prefix, SIZE)
    verdict = MultiErrorFileOutputReader(prefix.uri).verdict()
    assert verdict.ranks == (1,)
    assert verdict.headline.startswith(headline)
    assert verdict.coverage.expected == verdict.coverage.reported == SIZE
    if names is SLURM:
        (pointer,) = find_pointers(
            "4711", "1", environment={"XDG_STATE_HOME": str(tmp_path / "home")}
        )
        assert (pointer.uri, pointer.step) == (prefix.uri, "2")
        # the hosts' names, so that `firstfault prune` removes the run
        marks = (tmp_path / "4711.2" / "firstfault.run").read_text().splitlines()
        assert marks == [socket.gethostname()] * SIZE
    local_ranks = {failure.place.rank: failure.place.local_rank for failure in prefix.failures()}
    assert local_ranks == {0: 0, 1: 0 if names is SLURM else 1}


ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": ("SIGKILL", ""),
    "os.abort()": ("SIGABRT", ""),
    "os.kill(os.getpid(), signal.SIGTERM)": ("SIGTERM", ""),
    "raise ValueError('no labels')": ("", "ValueError"),
    "signal.signal(signal.SIGTERM, lambda *_: 1 / 0); os.kill(os.getpid(), signal.SIGTERM)": (
        "",
        "ZeroDivisionError",
    ),
    "sys.exit(7)": None,
    "os.fork() or os.kill(os.getpid(), signal.SIGTERM); os.wait()": None,
}
"""How a rank ends: the signal and the exception that are recorded; None: it ends by itself."""


def test_a_rank_without_stacks_was_killed_and_others_name_their_signal(tmp_path: Path) -> None:
    """A signal is told by the stacks that it wrote, and one that wrote none is SIGKILL;
    a program's handler stays.
    """
    start = (
        "import os, signal, sys, firstfault_torch.record; from firstfault_torch.torchrun import"
        " rank; rank.begin()\n"
    )
    start += "sys.modules['torch.distributed.distributed_c10d'] = os\n"  # torch is slow to import
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", start + code],
            env=_environment(
                RANK=str(rank), WORLD_SIZE=str(len(ENDS)), FIRSTFAULT_FOLDER=str(tmp_path)
            ),
            stderr=subprocess.DEVNULL,
        )
        for rank, code in enumerate(ENDS)
    ]
    assert [rank.wait(LONGEST_S) for rank in ranks] == [-9, -6, -15, 1, 1, 7, 0]
    prefix = Prefix(tmp_path / "0")
    await_last_roster_entries(prefix, len(ENDS))
    found = {failure.rank: failure for failure in prefix.failures()}
    phases = {
        entry.ranks: entry.phase for entry in prefix.roster() if entry.phase is not Phase.JOINED
    }
    for rank, end in enumerate(ENDS.values()):
        assert phases[rank,] is (Phase.FAILED if end else Phase.SUCCEEDED)
        if end is None:
            assert rank not in found
            continue
        exception = found[rank].exception
        assert (found[rank].signal, exception.type if exception else "") == end
        assert bool(found[rank].stack_dumps) is (end[0] in {"SIGABRT", "SIGTERM"})
        assert found[rank].stopped_by_agent is (end[0] == "SIGTERM")


STEP = {"SLURM_JOB_ID": "2", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n1"}
NO_JOB = dict.fromkeys((*STEP, "FIRSTFAULT_JOB", "FIRSTFAULT_NODE"), "")


@pytest.mark.parametrize(
    ("folder", "variables", "told", "run"),
    [
        (
            "/a/ff",
            STEP,
            "2.0 (SLURM_JOB_ID and SLURM_STEP_ID), attempt 0 (SLURM_JOB_ID)",
            "/a/ff/2.0",
        ),
        (
            "s3://a/ff/",
            STEP,
            "2.0 (SLURM_JOB_ID and SLURM_STEP_ID), attempt 0 (SLURM_JOB_ID)",
            "s3://a/ff/2.0",
        ),
        (
            "/a/ff/",
            STEP | {"FIRSTFAULT_JOB": "b c"},
            "b-c-2.0 (FIRSTFAULT_JOB and SLURM_STEP_ID), attempt 0 (SLURM_JOB_ID)",
            "/a/ff/b-c-2.0",
        ),
        ("s3://ff/", {"FIRSTFAULT_ATTEMPT": "3"}, "ff, attempt 3 (FIRSTFAULT_ATTEMPT)", "s3://ff"),
    ],
)
def test_the_report_names_job_folder_and_source(
    folder: str,
    variables: dict[str, str],
    told: str,
    run: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The job has the name of its folder of documents, and each name its source;
    Slurm names the nodes.
    """
    for name, value in (NO_JOB | {"FIRSTFAULT_FOLDER": folder} | variables).items():
        monkeypatch.setenv(name, value)
    engine = _build_engine.__wrapped__()
    by_slurm = "SLURMD_NODENAME" in variables
    assert (engine.folder, engine.node) == (run, "n1" if by_slurm else socket.gethostname())
    assert engine.task == told + (", nodes named by SLURMD_NODENAME" if by_slurm else "")


@pytest.mark.parametrize(
    ("command", "how"),
    [
        (["program.py"], "chained"),
        (["-u", "-O", "-X", "utf8", "program.py"], "hook"),
        (["-m", "package.program"], "exit-7"),
        (["program.py"], "spawn"),
    ],
)
def test_a_recorded_program_prints_and_returns_what_it_does_without(
    command: list[str], how: str, tmp_path: Path
) -> None:
    """A program that `firstfault_torch.record` runs sees,
    prints and returns what it does without.
    """
    (tmp_path / "package").mkdir()
    for file in (tmp_path / "program.py", tmp_path / "package" / "program.py"):
        file.write_text(PROGRAM.read_text())

    def run(words: list[str], **variables: str) -> tuple[int, bytes, bytes]:
        environment = _environment(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", **variables)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment,
            check=False,
            **pipes,
        )
        return ended.returncode, ended.stdout, ended.stderr

    at = command.index("program.py") if "program.py" in command else 0
    recorded = [*command[:at], *RECORD, *command[at:], how]
    if command[0] == "-u":
        recorded = ["-O", "-X", "utf8", "-um", "firstfault_torch.record", "program.py", how]
        command = ["-O", "-X", "utf8", "-u", "program.py"]
    plain = run([*command, how])
    assert run(recorded, FIRSTFAULT_FOLDER=str(tmp_path / "folder")) == plain
    assert plain[1].startswith(b"{")
    failures = Prefix(tmp_path / "folder" / "0").failures()
    raised = [failure.exception.message for failure in failures if failure.exception is not None]
    assert raised == {"chained": ["training failed"], "hook": ["told by the user's hook"]}.get(
        how, []
    )


def test_without_a_folder_the_first_rank_says_what_to_set() -> None:
    """The first rank says once what to set, and the program runs as without firstfault."""
    code = "from firstfault_torch.torchrun import rank; rank.begin(); rank.begin(); print('trains')"
    for number, said in ((0, 1), (1, 0)):
        ended = subprocess.run(
            [sys.executable, *RECORD, "-c", code],
            env=_environment(RANK=str(number), WORLD_SIZE="2"),
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stdout == "trains\n"
        assert ended.stderr.count("set FIRSTFAULT_FOLDER") == said


def test_record_without_a_program_explains_its_use() -> None:
    """`python -m firstfault_torch.record` alone explains how it is used."""
    ended = subprocess.run([sys.executable, *RECORD], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("usage: python -m firstfault_torch.record train.py")
