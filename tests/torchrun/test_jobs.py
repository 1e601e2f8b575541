"""Jobs of programs on two nodes, started by torchrun's command line: cascades of the lab, and a job that succeeds."""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.render.html import page
from tests.cascades.cases import PROGRAMS, Way
from tests.cascades.programs import complaints_of, files_of, run_program
from tests.torchrun.nodes import Job, run_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from firstfault.conclude import Conclusion

pytestmark = pytest.mark.jobs

ROOT = Path(__file__).parents[2]
FAULTY = str(Path(__file__).parent / "faulty.py")
FILES = Way(rendezvous="file")
CASCADES: dict[str, str | tuple[str, ...]] = {
    "raise-earlyTrue-firstfault-static-common-rank3-of4": "ValueError, rank 3 on host-1: the batch has no labels",
    "SIGKILL-firstfault-c10d-common-rank3-of4": "SIGKILL, rank 3 on host-1: ",
    "exit-1-variable-static-own-rank3-of4": "exit code 1, rank 3 on host-1: ",
    "sys.exit-3-firstfault-c10d-common-rank3-of4": "SystemExit, rank 3 on host-1: ",
    "hang-firstfault-static-own-rank3-of4": "hang, rank 3 on host-1: ",
    "all-ranks-variable-c10d-own-rank1-of4": "ValueError, ",
    "node-killed-firstfault-c10d-common-rank3-of4": ("AgentLost, the agent of host-1: ", "node lost, host-1: "),
    "recoverable-rounds1-variable-c10d-own-rank3-of4": "",
}
"""By name of a case: how both nodes' lines begin; empty: a restart, and then success."""
AT_ONCE = 2


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Job]]]:
    """Run the cascades of the chosen tests, some at once; return their jobs by name."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and getattr(item, "originalname", "") == test_a_cascade.__name__
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(run_program, PROGRAMS[name], tmp_path_factory.mktemp("job")) for name in chosen}


def _report(prefix: str) -> tuple[str, Conclusion]:
    """Return the page of an attempt, without the names of the node's folders, and the conclusion."""
    reader = MultiErrorFileOutputReader(prefix)
    conclusion = reader.conclude()
    assert conclusion is not None
    return re.sub(r"\S*/node-\d/\S*", "FOLDER", page(reader.report(conclusion))), conclusion


@pytest.mark.parametrize("way", [Way("variable", "static"), FILES], ids=str)
def test_success(way: Way, tmp_path: Path) -> None:
    """A job that succeeds prints what it prints under torchrun."""
    job = run_job(tmp_path, [FAULTY, "none"], way)
    assert [(node.code, sorted(node.out.splitlines()), node.err) for node in job.nodes] == [
        (0, ["rank 0: 4", "rank 1: 4"], ""),
        (0, ["rank 2: 4", "rank 3: 4"], ""),
    ]
    assert job.left == []


def test_the_example_of_readme(tmp_path: Path) -> None:
    """The example prints the lines that README shows."""
    job = run_job(tmp_path, [str(ROOT / "examples" / "script.py")], Way("firstfault", "c10d"))
    assert "\n".join([*job.nodes[0].lines, "  more: "]) in (ROOT / "README.md").read_text(encoding="utf-8")
    assert job.complaints() == []


# --- without a common folder ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "way", "headline"),
    [("kill", FILES, "SIGKILL, rank 3 on host-1: "), ("leave", Way(), "returned early, rank 3 on host-1: ")],
)
def test_a_fault(fault: str, way: Way, headline: str, tmp_path: Path) -> None:
    """The nodes hear of a failure, also over files, and print the same verdict.

    A rank that destroys its process group and ends, while the others need it, is a root cause.
    """
    job = run_job(tmp_path, [FAULTY, fault], way)
    assert job.complaints() == []
    assert job.nodes[0].headline.startswith(headline)


def test_a_node_that_cannot_start_its_workers(tmp_path: Path) -> None:
    """The other node, whose workers run, hears of it."""
    job = run_job(tmp_path, ["--no-python", "sleep", "1200"], Way(), environments={1: {"PATH": str(tmp_path)}})
    assert job.complaints() == []
    assert job.nodes[0].headline.startswith("FileNotFoundError, the agent of host-1: ")


@pytest.mark.parametrize(("fault", "lost"), [("agent-killed", 1), ("first-agent-killed", 0)])
def test_an_agent_is_killed(fault: str, lost: int, tmp_path: Path) -> None:
    """The other node says which one is lost, also if that one hosted the store, and with it all that they share.

    The workers ignore SIGTERM, and end nevertheless.
    """
    impatient = {node: {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"} for node in range(2)}
    job = run_job(tmp_path, [FAULTY, fault], Way(), environments=impatient)
    assert job.complaints(killed=1) == []
    (alive,) = job.alive
    assert alive is job.nodes[1 - lost]
    assert "firstfault failed" not in alive.err
    assert alive.headline.startswith(f"node lost, host-{lost}: ")
    verdict = MultiErrorFileOutputReader(alive.prefix).verdict()
    assert verdict is not None
    assert verdict.coverage.notes == (f"took part but sent no report: host-{lost}",)


# --- the lab's cascades ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade(name: str, jobs: dict[str, Future[Job]]) -> None:
    """All nodes end with the same few lines, which name the injector's truth, with exit code 1, and leave no process.

    If each node has a folder of its own, each has the complete report.
    """
    job = jobs[name].result()
    assert complaints_of(PROGRAMS[name], job, files_of(job)) == []
    for node in job.alive:
        assert node.headline.startswith(CASCADES[name])
        assert bool(node.headline) == bool(CASCADES[name])
    if "-own-" in name and CASCADES[name] and len(job.alive) == len(job.nodes):
        pages, conclusions = zip(*map(_report, job.prefixes), strict=True)
        assert pages[0] == pages[1]
        for found in conclusions:
            assert (found.verdict.coverage.complete, found.verdict.coverage.notes) == (True, ())
            assert {place.rank for place in found.job.places if place.rank is not None} == {0, 1, 2, 3}
