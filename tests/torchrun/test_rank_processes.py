"""A rank that is several processes: it becomes another program, starts the one that trains,
or submits another job.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry

import firstfault_start
from firstfault import MultiErrorFileOutputReader
from firstfault.model import JobErrors, Phase
from firstfault.slurm_pointer import find_pointers
from firstfault_start import identify, is_ancestor
from tests.prefix import Prefix
from tests.processes import find_running_processes
from tests.torchrun.test_rank import LONGEST_S, _environment, await_last_roster_entries
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

START = '''
import os, signal, subprocess, sys
import firstfault_torch.record

def load(has_group=False):
    import torch.distributed.distributed_c10d as groups
    groups.is_initialized = lambda: has_group

def run(code, **how):
    return subprocess.run([sys.executable, "-c", LOADS + code], **how).returncode

def start(code=""):
    """Start a helper that imports torch when `meet` says so, and then waits."""
    code = LOADS + f"input(); load(); {code}print(flush=True); input()"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

def meet(helper):
    helper.stdin.write(b"\\n")
    helper.stdin.flush()
    helper.stdout.readline()
    return helper

def become(code):
    os.execv(sys.executable, [sys.executable, "-c", LOADS + code])
'''
LOADS = START.replace("import firstfault_torch.record\n", "")
"""For a program that doesn't import `record`."""
FAILS = "raise ValueError(7)"
GROUP_FAILS = f"load(True); {FAILS}"
KILLED = "load(); os.kill(os.getpid(), signal.SIGKILL)"

CASES = {
    "becomes a program of Python that fails": (f'load(); become("{FAILS}")', "ValueError", 1),
    "becomes one that fails, before it has imported torch": (f'become("{FAILS}")', "ValueError", 1),
    "becomes one that ends well": ('load(); become("load()")', "", 0),
    "becomes another program that ends well": ('load(); os.execvp("true", ["true"])', "", 0),
    "becomes a shell that starts the training": (
        f"""os.execvp("sh", ["sh", "-c", f'{{sys.executable}} -c "{FAILS}"; exit 1'])""",
        "ValueError",
        1,
    ),
    "can't become one, and is killed": (
        f'load()\ntry: os.execvp("no-such-program", ["no"])\nexcept OSError: pass\n{KILLED}',
        "SIGKILL",
        -9,
    ),
    "starts the training": (f'sys.exit(run("{FAILS}"))', "ValueError", 1),
    "starts the training, and raises": (f'run("{FAILS}", check=True)', "ValueError", 1),
    "starts the training again": (f'run("load(); {FAILS}"); sys.exit(run("load()"))', "", 0),
    "has imported torch, and starts the training": (
        f'load(); sys.exit(run("{GROUP_FAILS}"))',
        "ValueError",
        1,
    ),
    "has imported torch, and starts a helper that fails": (
        f'load(); run("load(); {FAILS}")',
        "",
        0,
    ),
    "trains, and starts a helper that fails": (f'load(True); run("{GROUP_FAILS}")', "", 0),
    "starts a helper, and trains": (
        'run("load()"); load(True); raise ValueError(7)',
        "ValueError",
        1,
    ),
    "kills its helper": ("p = start(); load(True); meet(p).kill(); p.wait()", "", 0),
    "kills its helper, without a group": ("p = start(); load(); meet(p).kill(); p.wait()", "", 0),
    "kills its helper, which has become another program": (
        """p = start('become("load(); print(flush=True); input()"); '); load(); meet(p).kill(); p.wait()""",
        "",
        0,
    ),
    "terminates its helper, and fails": (
        f"p = start(); load(True); meet(p).terminate(); p.wait(); {FAILS}",
        "ValueError",
        1,
    ),
    "fails while its helper runs": (f"p = start(); load(); meet(p); {FAILS}", "ValueError", 1),
    "trains after its late helper has failed": (f"load(); run({GROUP_FAILS!r}); load(True)", "", 0),
    "starts the training, which is killed": (f"sys.exit(run({KILLED!r}))", "SIGKILL", 247),
}
"""What a rank does, what is recorded about its end (a signal or an exception; empty: a good end),
and its exit code.
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variable of a package that has torch's names; torch itself is slow to import."""
    library = tmp_path_factory.mktemp("library")
    (library / "torch" / "distributed").mkdir(parents=True)
    for name in ("__init__.py", "distributed/__init__.py", "distributed/distributed_c10d.py"):
        (library / "torch" / name).touch()
    return {"PYTHONPATH": str(library)}


@pytest.fixture(scope="module")
def ended(
    library: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[int], JobErrors]:
    """Run each case as a rank; return their exit codes, and what was recorded."""
    folder = tmp_path_factory.mktemp("documents")
    common = {**library, "WORLD_SIZE": str(len(CASES)), "FIRSTFAULT_FOLDER": str(folder)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"{START}LOADS = {LOADS!r}\n{code}"],
            env=_environment(RANK=str(rank), **common),
            stderr=subprocess.DEVNULL,
        )
        for rank, (code, _, _) in enumerate(CASES.values())
    ]
    codes = [rank.wait(LONGEST_S) for rank in ranks]
    prefix = Prefix(folder / "0")
    # their recorders
    wait_until(
        lambda: not find_running_processes((), f"FIRSTFAULT_FOLDER={folder}"), seconds=LONGEST_S
    )
    return codes, MultiErrorFileOutputReader(prefix.uri).job()


@pytest.mark.parametrize("case", CASES)
def test_the_training_process_of_a_rank_is_recorded(
    case: str, ended: tuple[list[int], JobErrors]
) -> None:
    """The process that trains is recorded, a good end is good,
    and an end that nobody can know isn't called a death.
    """
    codes, job = ended
    rank = list(CASES).index(case)
    _, recorded, code = CASES[case]
    failures = [failure for failure in job.failures if failure.rank == rank]
    told = [
        failure.signal or failure.exception.type
        for failure in failures
        if failure.signal or failure.exception
    ]
    phases = {entry.phase for entry in job.roster if rank in entry.ranks} - {Phase.JOINED}
    assert (codes[rank], told) == (code, [recorded] if recorded else [])
    assert phases == {Phase.FAILED if recorded else Phase.SUCCEEDED}


def test_a_helper_that_the_only_rank_ends_is_no_failure(
    library: dict[str, str], tmp_path: Path
) -> None:
    """Without peers a helper looks like a training, so a process that was ended isn't a failure."""
    environment = _environment(RANK="0", WORLD_SIZE="1", FIRSTFAULT_FOLDER=str(tmp_path), **library)
    code = (
        f"{START}LOADS = {LOADS!r}\nfor end in 'kill', 'terminate': getattr(meet(p := start()),"
        " end)(); p.wait()"
    )
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    wait_until(
        lambda: not find_running_processes((), f"FIRSTFAULT_FOLDER={tmp_path}"), seconds=LONGEST_S
    )
    assert list(tmp_path.rglob("*.pb")) == []


def test_a_rank_that_fails_leaves_a_pointer(tmp_path: Path) -> None:
    """Slurm's script finds the attempt also if the only document is of a later rank,
    which hasn't imported torch.
    """
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "XDG_STATE_HOME": str(tmp_path / "home")}
    environment = _environment(RANK="1", WORLD_SIZE="2", FIRSTFAULT_FOLDER=str(tmp_path), **slurm)
    subprocess.run(
        [sys.executable, "-c", START + FAILS],
        env=environment,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    (pointer,) = find_pointers("4711", environment={"XDG_STATE_HOME": slurm["XDG_STATE_HOME"]})
    assert (pointer.uri, pointer.step) == (f"{tmp_path}/4711.2/0", "2")


SUBMITS = """
if os.fork() == 0:
    parent = os.getpid()
    os.environ["FIRSTFAULT_FOLDER"] = sys.argv[1]
    os.setsid()
    if os.fork() == 0:
        while os.getppid() == parent: pass
        # as a batch system does: with all variables, but no ancestor
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("asks", ["", "import firstfault_torch.record; "])
def test_a_job_that_a_rank_submits_is_not_part_of_it(
    asks: str, library: dict[str, str], tmp_path: Path
) -> None:
    """A job that inherits a rank's variables isn't part of that rank,
    and is recorded if it asks for it.
    """
    submitted = tmp_path / "submitted"
    environment = _environment(
        RANK="0",
        WORLD_SIZE="1",
        FIRSTFAULT_FOLDER=str(tmp_path / "first"),
        **library,
    )
    reading, writing = os.pipe()
    subprocess.run(
        [sys.executable, "-c", START + "load()" + SUBMITS, str(submitted), "-c", asks + FAILS],
        env=environment,
        stderr=writing,
        check=True,
    )
    os.close(writing)
    with os.fdopen(reading) as errors:
        assert "ValueError: 7" in errors.read()  # until the submitted job has ended
    first = Prefix(tmp_path / "first" / "0")
    await_last_roster_entries(first, 1)
    assert first.failures() == []
    if not asks:
        assert not submitted.exists()
    else:
        await_last_roster_entries(Prefix(submitted / "0"), 1)
        (failure,) = Prefix(submitted / "0").failures()
        assert failure.exception.message == "7"


def test_a_variable_counts_only_if_a_living_ancestor_set_it() -> None:
    """A variable counts if the process that set it is this one or one above it,
    and still the same.
    """
    process, start = identify(os.getpid()).split()
    assert is_ancestor(f"{process} {start}")
    assert is_ancestor(identify(os.getppid()))
    assert not is_ancestor(f"{process} {int(start) + 1}")
    child = subprocess.Popen(["sleep", "60"])
    assert not is_ancestor(identify(child.pid))
    child.kill()
    child.wait()
    assert identify(child.pid) == ""
    assert not is_ancestor("")


def test_torchrun_in_a_submitted_job_is_recorded_without_an_agent_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torchrun is recorded with FIRSTFAULT=1 unless an agent of firstfault above it is running."""
    monkeypatch.setenv("FIRSTFAULT", "1")
    monkeypatch.setenv("FIRSTFAULT_RECORDING", "{}")
    for agent, is_recorded in (
        (identify(os.getpid()), False),
        (f"{os.getpid()} 1", True),
        ("", True),
    ):
        monkeypatch.setenv("FIRSTFAULT_AGENT", agent)
        create = registry.create_handler
        firstfault_start.handler()
        assert (registry.create_handler != create) is is_recorded
        monkeypatch.setattr(registry, "create_handler", create)
