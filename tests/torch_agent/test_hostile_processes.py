"""A healthy training must not notice firstfault: not if it changes its own process,
nor if its machine refuses much.

Real workers under a real agent, in a process of its own that may be given a small or read-only
disk, another network or a system call that is refused.
"""

import contextlib
import logging
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from firstfault import MultiErrorFileOutputReader
from firstfault_torch import NodeFailedError, PlainEngine, launch
from tests.torch_agent.hostile import HABITS, MACHINES, MEGABYTES, NotAllowedError
from tests.waiting import wait_until

pytestmark = [pytest.mark.jobs, pytest.mark.forks]
PATIENCE_S = 120.0
STDERR_HABITS = {"close stderr", "replace stderr", "own session"}
"""After these the training's stderr is not the pod's."""
SAID = {
    "no FIFO": "listening to the workers' stderr",
    "no program": "starting the recorder",
    "no unix socket": "starting the recorder",
    "no threads": "can't start more threads",
}
"""The one line that names what is missing."""


IS_ALL = os.environ.get("FIRSTFAULT_PROCESS") == "all"
SOME_HABITS = ("children + reset handlers",)
SOME_MACHINES = ("no FIFO", "no threads")


@dataclass(frozen=True)
class Ended:
    results: dict[int, int] | None
    """None: it failed."""
    seconds: float
    peak_kb: int
    """The agent's memory."""
    stderr: str

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("firstfault_torch")]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    made = Path(tempfile.mkdtemp(prefix="ff-"))
    yield made
    shutil.rmtree(made)


def _train(habit: str, fails: bool) -> int:
    for one in habit.split(" + ") if habit else ():
        HABITS[one]()
    with contextlib.suppress(OSError):
        os.write(2, b"still here\n")
    rank = int(os.environ["RANK"])
    if fails and rank == 1:
        raise ValueError("asked for")
    if fails:
        time.sleep(PATIENCE_S)
    return rank


def _agent(
    folder: Path,
    answer: Connection,
    habit: str,
    machine: str,
    *,
    fails: bool,
    plain: bool,
) -> None:
    """Run a job in this process, which is a fork of the test's."""
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    logging.getLogger("firstfault_torch").addHandler(handler)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
    os.chdir(folder / "store")
    try:
        if machine:
            MACHINES[machine]()
    except NotAllowedError as error:
        answer.send(str(error))
        return
    config = LaunchConfig(
        1,
        1,
        2,
        start_method="fork",
        max_restarts=0,
        monitor_interval=0.1,
        rdzv_backend="c10d",
    )
    config.rdzv_endpoint, config.run_id = "localhost:0", "job"
    began = time.monotonic()
    results = None
    with contextlib.suppress(NodeFailedError):
        if plain:
            results = elastic_launch(config, _train)(habit, fails)
        else:
            results = launch(
                config,
                _train,
                habit,
                fails,
                engine=PlainEngine(str(folder / "store"), node="worker-0"),
            )
    answer.send(
        (results, time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    )


def _job(
    folder: Path,
    habit: str = "",
    machine: str = "",
    *,
    fails: bool = False,
    plain: bool = False,
) -> Ended:
    for name in ("store", "tmp"):
        (folder / name).mkdir(exist_ok=True)
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    options = {"fails": fails, "plain": plain}
    agent = fork.Process(target=_agent, args=(folder, sender, habit, machine), kwargs=options)
    agent.start()
    sender.close()
    try:
        answered = receiver.poll(PATIENCE_S)
        said = (folder / "stderr").read_text(errors="replace")
        assert answered, said[-5000:]
        found = receiver.recv()
        agent.join(PATIENCE_S)
    finally:
        agent.kill()
        agent.join()
    if isinstance(found, str):
        pytest.skip(found)
    return Ended(*found, (folder / "stderr").read_text(errors="replace"))


def _names_the_fault(folder: Path) -> bool:
    conclusion = MultiErrorFileOutputReader(f"{folder}/store/0").conclude()
    root = conclusion.verdict.root
    return conclusion.verdict.ranks == (1,) and root is not None and "asked for" in root.message


@pytest.mark.parametrize(
    "habit", sorted(HABITS.keys() - {"much stderr", "full disk"}) if IS_ALL else SOME_HABITS
)
def test_a_training_may_change_its_own_process(habit: str, folder: Path) -> None:
    """A training may change its own process: if it succeeds, nothing is logged; if it fails,
    it is reported.
    """
    healthy = _job(folder, habit)
    assert (healthy.results, healthy.warnings) == ({0: 0, 1: 1}, [])
    assert healthy.stderr.count("still here\n") == (0 if habit in STDERR_HABITS else 2)
    if "children" in habit:
        assert healthy.stderr.count("a grandchild\n") == healthy.stderr.count("nested 1\n") == 2
    assert _job(folder, habit, fails=True).results is None
    assert _names_the_fault(folder)


@pytest.mark.parametrize("machine", MACHINES if IS_ALL else SOME_MACHINES)
def test_a_restricted_machine_costs_one_line_each(machine: str, folder: Path) -> None:
    """What the machine refuses is done without, with one line;
    a failure is reported all the same.
    """
    healthy = _job(folder, machine=machine)
    assert healthy.results == {0: 0, 1: 1}, healthy.stderr
    # the agent and each worker may say so once
    assert len(healthy.warnings) in ({1, 2, 3} if machine in SAID else {0}), healthy.stderr
    assert all(SAID[machine] in line for line in healthy.warnings)
    lines = 0 if machine == "closed files" else 2
    # without a thread another process passes them on, and may end after the agent
    wait_until(
        lambda: (folder / "stderr").read_text(errors="replace").count("still here\n") == lines
    )
    assert _job(folder, machine=machine, fails=True).results is None
    assert _names_the_fault(folder)


def test_a_report_is_uploaded_directly_if_the_disk_is_full(folder: Path) -> None:
    """A training that fills the disk for temporary files succeeds; if it fails,
    the report is uploaded directly.
    """
    healthy = _job(folder, "full disk", "read-only")
    assert (healthy.results, healthy.warnings) == ({0: 0, 1: 1}, [])
    assert _job(folder, "full disk", "read-only", fails=True).results is None
    assert _names_the_fault(folder)


def test_much_stderr_arrives_in_whole_lines(folder: Path) -> None:
    """Many megabytes arrive in whole lines, in bounded memory,
    without much more time than torch alone takes.
    """
    quiet = _job(folder)  # first: a fork begins with its parent's memory
    ours = _job(folder, "much stderr")
    assert ours.results == {0: 0, 1: 1}
    assert ours.stderr.count("x" * 99 + "\n") == 2 * MEGABYTES * 10_000
    assert ours.peak_kb - quiet.peak_kb < 64 * 1024
    if not IS_ALL:
        return
    (folder / "stderr").unlink()
    torchs = _job(folder, "much stderr", plain=True)
    times = f"{ours.seconds:.1f} s, torch's own agent {torchs.seconds:.1f} s"
    print(
        f"{2 * MEGABYTES} MB of stderr: {times}; {ours.peak_kb - quiet.peak_kb} kB of memory more"
    )
    assert ours.seconds < 10 * torchs.seconds + 20
