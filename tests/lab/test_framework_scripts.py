"""Trainings under frameworks as programs, started by ``firstfault torchrun``;
``make frameworks`` runs them.
"""

import os
from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from lab.cascades.cases import Way
from tests.lab.test_frameworks import EXPECTED, RANK
from tests.torchrun.nodes import run_job

pytestmark = [
    pytest.mark.jobs,
    pytest.mark.skipif(
        os.environ.get("FIRSTFAULT_FRAMEWORKS") != "all", reason="make frameworks runs it"
    ),
]

SCRIPT = Path(__file__).parents[2] / "lab" / "frameworks" / "script.py"
CASES = [
    ("lightning", "raise", "c10d"),
    ("lightning", "exit", "static"),
    ("transformers", "loader", "static"),
    ("accelerate", "hang", "c10d"),
    ("hydra", "raise", "static"),
    ("fsdp", "kill", "c10d"),
]


@pytest.mark.parametrize(("framework", "fault", "rendezvous"), CASES)
def test_both_nodes_report_the_failed_rank_and_leave_no_process(
    framework: str, fault: str, rendezvous: str, tmp_path: Path
) -> None:
    """Both nodes end with the same lines about the rank that failed, and leave no process."""
    job = run_job(tmp_path, [str(SCRIPT), framework, fault, str(RANK)], Way(rendezvous=rendezvous))
    assert job.find_problems() == [], [node.err for node in job.nodes]
    category, headline = EXPECTED[framework][fault]
    assert job.nodes[0].headline.startswith(headline)
    for prefix in job.prefixes:
        verdict = MultiErrorFileOutputReader(prefix).verdict()
        assert (verdict.ranks, verdict.category) == ((RANK,), category)
