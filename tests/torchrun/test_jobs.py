"""Jobs of programs on two nodes that share no folder, started by torchrun's own command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from torch.distributed.elastic.utils.distributed import get_free_port

from firstfault import MultiErrorFileOutputReader
from firstfault.render.html import page

if TYPE_CHECKING:
    from firstfault.conclude import Conclusion

pytestmark = pytest.mark.jobs

TRAINING = Path(__file__).parent / "training.py"
OURS = ("-m", "firstfault", "torchrun")
TORCHS = ("-m", "torch.distributed.run")
STATIC = "--master-addr=127.0.0.1 --master-port={port} --node-rank={node}"
DYNAMIC = "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=job --rdzv-conf=is_host={hosts}"
LONGEST_S = 120


def _ended(
    folder: Path, fault: str, launcher: tuple[str, ...] = OURS, rendezvous: str = DYNAMIC
) -> list[tuple[int, str, str]]:
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
        }
        environment |= {"FIRSTFAULT": "1"} if launcher is TORCHS else {}
        options = [
            "--nnodes=2",
            "--nproc-per-node=2",
            *rendezvous.format(port=port, node=node, hosts=int(node == 0)).split(),
        ]
        command = [sys.executable, *launcher, *options, str(TRAINING), fault]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen(command, cwd=own, env=environment, **pipes))
    try:
        texts = [node.communicate(timeout=LONGEST_S) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.communicate()
    return [(node.returncode, *text) for node, text in zip(nodes, texts, strict=True)]


def _told(stderr: str) -> list[str]:
    """Return firstfault's lines at the end of a node's output, without the one that names this node's folder."""
    lines = stderr.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("firstfault: "))
    last = next(number for number, line in enumerate(lines) if line.startswith("  more: firstfault show "))
    assert last - first < 12
    return lines[first:last]


def _report(folder: Path) -> tuple[str, Conclusion]:
    """Return the page of a node's only attempt, without the names of its folders, and the conclusion."""
    (attempt,) = folder.glob(".firstfault/torchrun/*/0")
    reader = MultiErrorFileOutputReader(str(attempt))
    conclusion = reader.conclude()
    assert conclusion is not None
    return re.sub(r"\S*/node-\d/\S*", "FOLDER", page(reader.report(conclusion))), conclusion


@pytest.mark.parametrize(
    ("fault", "headline", "category"),
    [
        ("raise", "ValueError, rank 3 on host-1: batch 7 has no labels", "user_code"),
        ("kill", "SIGKILL, rank 3 on host-1: ", "signal"),
        ("exit", "SystemExit, rank 3 on host-1: ", "exit"),
        ("hang", "hang, rank 3 on host-1: ", "hang"),
    ],
)
def test_a_fault(fault: str, headline: str, category: str, tmp_path: Path) -> None:
    """Both nodes end with the same few lines, although neither can read the other's folder."""
    (code, _, first), (other_code, _, second) = _ended(tmp_path, fault)
    assert (code, other_code) == (1, 1)
    assert _told(first) == _told(second)
    assert _told(first)[0].startswith(f"firstfault: {headline}")
    pages, conclusions = zip(*(_report(folder) for folder in sorted(tmp_path.glob("node-*"))), strict=True)
    assert pages[0] == pages[1]
    for found in conclusions:
        assert found.verdict.category == category
        assert (found.verdict.coverage.complete, found.verdict.coverage.notes) == (True, ())
        assert {place.rank for place in found.job.places if place.rank is not None} == {0, 1, 2, 3}


def test_an_agent_is_killed(tmp_path: Path) -> None:
    """The other node says which one is lost; what its workers wrote lies in a folder that only they can read."""
    (code, _, text), (other_code, _, _) = _ended(tmp_path, "agent-killed")
    assert (code, other_code) == (1, -9)
    assert _told(text)[0].startswith("firstfault: node lost, host-1: ")


@pytest.mark.parametrize(("launcher", "rendezvous"), [(OURS, DYNAMIC), (TORCHS, STATIC)])
def test_success(launcher: tuple[str, ...], rendezvous: str, tmp_path: Path) -> None:
    """A job that succeeds prints what it prints under torchrun."""
    ended = _ended(tmp_path, "none", launcher, rendezvous)
    assert [(code, sorted(out.splitlines()), err) for code, out, err in ended] == [
        (0, ["rank 0: 4", "rank 1: 4"], ""),
        (0, ["rank 2: 4", "rank 3: 4"], ""),
    ]


def test_a_restart(tmp_path: Path) -> None:
    """A recoverable exception uses up a restart, and the next round succeeds. torch's static rendezvous cannot."""
    ended = _ended(tmp_path, "once", rendezvous=f"{DYNAMIC} --max-restarts=1")
    assert [(code, sorted(out.splitlines())) for code, out, _ in ended] == [
        (0, ["rank 0: 4", "rank 1: 4"]),
        (0, ["rank 2: 4", "rank 3: 4"]),
    ]


def test_the_variable(tmp_path: Path) -> None:
    """With FIRSTFAULT=1, torchrun with a static rendezvous says what ``firstfault torchrun`` says."""
    (_, _, first), (_, _, second) = _ended(tmp_path, "raise", TORCHS, STATIC)
    assert _told(first) == _told(second)
    assert _told(first)[0] == "firstfault: ValueError, rank 3 on host-1: batch 7 has no labels"
