"""Jobs on two nodes without a common folder: over a store of files, and without the node that hosted the store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

from firstfault import MultiErrorFileOutputReader
from tests.cascades.cases import Way
from tests.torchrun.ends import processes_in
from tests.torchrun.nodes import run_job
from tests.waiting import until

pytestmark = pytest.mark.jobs

TRAINING = Path(__file__).parent / "faulty.py"
DYNAMIC = "--rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=is_host={hosts}"
FILES = "--rdzv-endpoint={folder}/store --rdzv-conf=store_type=file"
LONGEST_S = 120


def _ended(folder: Path, fault: str, rendezvous: str) -> list[tuple[int, str, str]]:
    """Run a job on two nodes, each in a folder of its own; return each node's exit code, stdout and stderr."""
    port = get_free_port()
    nodes = []
    for node in range(2):
        own = folder / f"node-{node}"
        own.mkdir()
        environment = {
            **os.environ,
            "FIRSTFAULT_NODE": f"host-{node}",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1",
        }
        options = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=job"]
        options += rendezvous.format(port=port, hosts=int(node == 0), folder=folder).split()
        command = [sys.executable, "-m", "firstfault", "torchrun", *options, str(TRAINING), fault]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen(command, cwd=own, env=environment, **pipes))
    try:
        texts = [node.communicate(timeout=LONGEST_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    return [(node.returncode, *text) for node, text in zip(nodes, texts, strict=True)]


def _headline(stderr: str) -> str:
    return next(line for line in stderr.splitlines() if line.startswith("firstfault: "))


def test_files_and_a_fault(tmp_path: Path) -> None:
    """The nodes hear of a failure, and print the same verdict."""
    ended = _ended(tmp_path, "kill", FILES)
    assert [code for code, _, _ in ended] == [1, 1]
    first, second = (_headline(text) for _, _, text in ended)
    assert first == second
    assert first.startswith("firstfault: SIGKILL, rank 3 on host-1: ")


def test_files_and_success(tmp_path: Path) -> None:
    """A job that succeeds prints what it prints under torchrun."""
    ended = _ended(tmp_path, "none", FILES)
    assert [(code, sorted(out.splitlines()), err) for code, out, err in ended] == [
        (0, ["rank 0: 4", "rank 1: 4"], ""),
        (0, ["rank 2: 4", "rank 3: 4"], ""),
    ]


def test_a_rank_leaves_early(tmp_path: Path) -> None:
    """A rank that destroys its process group and ends, while the others need it, is the root cause on both nodes."""
    first, second = (_headline(text) for _, _, text in _ended(tmp_path, "leave", DYNAMIC))
    assert first == second
    assert first.startswith("firstfault: returned early, rank 3 on host-1: ")


def test_a_node_that_cannot_start_its_workers(tmp_path: Path) -> None:
    """The other node, whose workers run, hears of it."""
    program = ["--no-python", "sleep", str(10 * LONGEST_S)]
    job = run_job(tmp_path, program, Way(), environments={1: {"PATH": str(tmp_path)}})
    assert job.complaints() == []
    assert job.nodes[0].headline.startswith("FileNotFoundError, the agent of host-1: ")


@pytest.mark.parametrize(("fault", "lost"), [("agent-killed", 1), ("first-agent-killed", 0)])
def test_an_agent_is_killed(fault: str, lost: int, tmp_path: Path) -> None:
    """The other node says which one is lost, also if that one hosted the store, and with it all that they share.

    The workers ignore SIGTERM, and end nevertheless.
    """
    ended = _ended(tmp_path, fault, DYNAMIC)
    assert ended[lost][0] == -9
    code, _, text = ended[1 - lost]
    assert code == 1
    assert "firstfault failed" not in text
    assert _headline(text).startswith(f"firstfault: node lost, host-{lost}: ")
    folder = re.findall(r"more: firstfault show (\S+)", text)[-1]
    verdict = MultiErrorFileOutputReader(folder).verdict()
    assert verdict is not None
    assert verdict.coverage.notes == (f"took part but sent no report: host-{lost}",)
    until(lambda: not processes_in(tmp_path))
