"""``firstfault show`` on logs: the state of each rank, and the names and number of nodes,
only as far as lines show.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from firstfault.cli import EXIT
from tests.readers.commands import Ran
from tests.readers.test_log_verdicts import LOST, RAISED, add_prefix

Read: TypeAlias = Callable[[dict[str, list[str]]], dict[str, Any]]
_IMAGE = (
    *RAISED[:-1],
    "PIL.UnidentifiedImageError: cannot identify image file <_io.BytesIO object at 0x7f00>",
)


@pytest.fixture
def read(run: Callable[..., Ran], tmp_path: Path) -> Read:
    """Return a function that shows files as the logs of one job: the JSON,
    with the text as "printed".
    """

    def shown(files: dict[str, list[str]]) -> dict[str, Any]:
        for name, lines in files.items():
            (tmp_path / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
        source = str(tmp_path if len(files) > 1 else tmp_path / next(iter(files)))
        printed = run("show", source).out
        return {**json.loads(run("show", "--json", source).out), "printed": printed}

    return shown


@pytest.mark.parametrize("raised", [_IMAGE, RAISED])
def test_silent_ranks_are_no_victims(read: Read, raised: tuple[str, ...]) -> None:
    """A rank without a line about its end has no report, if another one reports its own fault."""
    names = [f"[rank{rank}]: ready, rank={rank} world_size=4" for rank in (0, 2)]
    found = read(
        {"job.log": [*names, *add_prefix("[rank2]: ", raised), *add_prefix("[rank0]: ", LOST)]}
    )
    assert found["verdict"]["ranks"] == [2]
    assert "Silent" not in found["printed"]
    assert "no report   ranks 1, 3" in found["printed"]
    assert "Victims  1 lost a peer" in found["printed"]


def test_a_pod_is_named_by_its_file(read: Read) -> None:
    """A pod has the name of its file, if the number in it is another pod's, too."""
    names = {"job-master-0.log": 0, "job-worker-0.log": 1, "job-worker-1.log": 2}
    texts = {1: RAISED, 0: LOST, 2: LOST}
    files = {
        name: [f"starting, RANK={rank} WORLD_SIZE=3", *add_prefix(f"[rank{rank}]: ", texts[rank])]
        for name, rank in names.items()
    }
    found = read(files)
    assert (found["verdict"]["ranks"], found["verdict"]["node"]) == ([1], "job-worker-0")
    assert found["verdict"]["victims"]["count"] == 2


def test_a_file_of_a_node_names_and_counts_the_node(read: Read) -> None:
    """A file of a node names the node, not a task, and files of nodes are counted."""
    files = {
        f"node{node}.log": add_prefix(f"[rank{node}]: ", LOST if node else RAISED)
        for node in range(2)
    }
    found = read(files)
    assert (found["verdict"]["ranks"], found["verdict"]["node"]) == ([0], "node0")
    assert "2 nodes" in found["printed"]


def test_the_end_of_ranks_on_a_lost_node_is_unknown(read: Read) -> None:
    """A launcher stopped the tasks that it lists; of those on the lost node the end isn't known.
    The time is.
    """
    cancelled = (
        "slurmstepd: error: *** {} ON gpu-1 CANCELLED AT 2031-05-06T07:08:09 DUE TO NODE FAILURE,"
        " SEE LOG ***"
    )
    found = read(
        {
            "job.out": [
                *(f"{task}: rank {task}/8 is ready" for task in range(8)),
                "srun: error: Node failure on gpu-2",
                "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
                cancelled.format("STEP 77.0"),
                cancelled.format("JOB 77"),
                "srun: error: gpu-1: tasks 0-3: Terminated",
                "srun: error: gpu-3: tasks 6-7: Terminated",
            ]
        }
    )
    assert found["verdict"]["timestamp"].startswith("2031-05-06T07:08:09")
    assert (found["where"], "the agent of" in found["printed"]) == ("gpu-2", False)
    assert "stopped     ranks 0-3, 6-7" in found["printed"]
    assert "no report   ranks 4-5" in found["printed"]


def test_documentation_and_code_are_no_logs_of_a_failed_job(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """Pages about errors, a manual, code and a configuration in a folder
    aren't logs of a failed job.
    """
    about = (
        "the program exits with exit code 3\nsrun: error: gpu-1: task 3: Exited with exit code 3\n"
    )
    names = (
        "log.md",
        "about-logs.rst",
        "log_reader.py",
        "changelog.1",
        "logging.conf",
        "proc.yaml",
    )
    for name in names:
        (tmp_path / name).write_text(about, encoding="utf-8")
    (tmp_path / "logger.1").write_text(f'.\\" a manual\n.TH LOGGER 1\n{about}', encoding="utf-8")
    (tmp_path / "login-log").write_text(f"#!/bin/sh\n{about}", encoding="utf-8")
    ran = run("show", str(tmp_path))
    assert (ran.code, ran.out) == (EXIT.NOTHING_FOUND, "")
    (tmp_path / "train.log").write_text(about, encoding="utf-8")
    assert "rank 3" in run("show", str(tmp_path)).out


def test_a_default_of_a_program_is_no_job_size(read: Read) -> None:
    """The number of ranks among a program's options may be that of nodes, and 1 is its default."""
    options = "Namespace(epochs=90, lr=0.1, multiprocessing_distributed=True, world_size={})"
    killed = "run.sh: line 12: 2231 Killed                  python main.py"
    steps = [f"Epoch: [0][{step}/500] Loss 6.9" for step in range(9)]
    found = read({"job.out": [options.format(1), "Use GPU: 0", "Use GPU: 1", *steps, killed]})
    assert "rank 0" not in found["printed"]
    assert found["job"]["ranks"] != 1
    assert read({"job.out": [options.format(16), *steps, killed]})["job"]["ranks"] == 16


def test_a_files_name_suggests_the_command_that_reads_it(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """The name of a file suggests the command that reads it."""
    log = tmp_path / "job.log"
    log.write_text("step 1\n", encoding="utf-8")
    ran = run(str(log))
    assert (ran.code, f"did you mean 'firstfault show {log}'?" in ran.err) == (EXIT.USAGE, True)


def test_a_brief_keeps_times_without_a_year(run: Callable[..., Ran], tmp_path: Path) -> None:
    """A brief doesn't deny times that have no year."""
    log = tmp_path / "job.log"
    stamp = "W0506 07:08:09.812000 139834 torch/distributed/run.py:803] "
    log.write_text(
        "\n".join([f"{stamp}starting", *add_prefix("[rank1]: ", RAISED)]), encoding="utf-8"
    )
    out = run("show", "--brief", str(log)).out
    assert ("has a time" in out, "the times in job.log have none" in out) == (False, True)
