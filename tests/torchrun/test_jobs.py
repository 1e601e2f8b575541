"""Jobs of programs on two nodes, started by torchrun's command line: cascades of the lab,
and a job that succeeds.
"""

import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from firstfault import MultiErrorFileOutputReader
from firstfault.conclude import Conclusion
from firstfault.render.html import page
from lab.cascades.cases import Case, Way
from lab.cascades.programs import complaints_of, files_of, run_program
from tests.torchrun.nodes import Job, run_job

pytestmark = pytest.mark.jobs

FAULTY = str(Path(__file__).parent / "faulty.py")


def case_of_two_ranks(
    fault: str, rendezvous: str = "c10d", folder: str = "own", **inputs: object
) -> Case:
    """Return a case of the second of two nodes with a rank each."""
    return Case(fault, 1, per_node=1, inputs=inputs, way=Way("forked", rendezvous, folder))


FORKED = Way("forked")
ONE_EACH = ("--nproc-per-node=1",)
CASCADES = [
    (
        case_of_two_ranks("raise", "static", "common", early=True),
        "ValueError, rank 1 on host-1: the batch has no labels",
    ),
    (case_of_two_ranks("SIGKILL", "file"), "SIGKILL, rank 1 on host-1: "),
    (case_of_two_ranks("sys.exit-3", folder="common"), "SystemExit, rank 1 on host-1: "),
    (case_of_two_ranks("hang", "static"), "hang, rank 1 on host-1: "),
    (Case("all-ranks", 1, per_node=1, scope="ranks", way=Way("variable")), "ValueError, "),
    (replace(case_of_two_ranks("recoverable", rounds=1), task="restarted", scope="none"), ""),
]
"""Cases, and how both nodes' lines begin; empty: a restart, and then success."""
AT_ONCE = 2


@pytest.fixture(scope="module")
def jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Job]]]:
    """Run the cascades of the chosen tests, some at once; return their jobs by name."""
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path
        and getattr(item, "originalname", "")
        == test_all_nodes_print_the_same_verdict_and_leave_no_process.__name__
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            case.name: pool.submit(run_program, case, tmp_path_factory.mktemp("job"))
            for case in chosen
        }


def _report(prefix: str) -> tuple[str, Conclusion]:
    """Return the page of an attempt, without the names of the node's folders,
    and the conclusion.
    """
    reader = MultiErrorFileOutputReader(prefix)
    conclusion = reader.conclude()
    assert conclusion is not None
    return re.sub(r"\S*/node-\d/\S*", "FOLDER", page(reader.report(conclusion))), conclusion


def test_a_success_prints_what_torchrun_prints(tmp_path: Path) -> None:
    """A job that succeeds prints what it prints under torchrun,
    also if the nodes' store is a file.
    """
    job = run_job(tmp_path, ["--no-python", "echo", "trained"], Way("variable", "file"))
    assert [(node.code, node.out, node.err) for node in job.nodes] == [
        (0, "trained\ntrained\n", "")
    ] * 2
    assert job.left == []


def test_a_rank_that_leaves_its_group_early_is_the_root_cause(tmp_path: Path) -> None:
    """A rank that destroys its process group and ends, while the others need it,
    is the root cause.
    """
    job = run_job(tmp_path, [FAULTY, "leave"], FORKED, options=ONE_EACH)
    assert job.find_problems() == []
    assert job.nodes[0].headline.startswith("ended early, rank 1 on host-1: ")


def test_peers_report_a_node_that_cannot_start_its_workers(tmp_path: Path) -> None:
    """The other node, whose workers run, hears of it."""
    job = run_job(
        tmp_path,
        ["--no-python", "sleep", "1200"],
        FORKED,
        environments={1: {"PATH": str(tmp_path)}},
    )
    assert job.find_problems() == []
    assert job.nodes[0].headline.startswith("FileNotFoundError, the agent of host-1: ")
    assert "because the agent of host-1 failed: FileNotFoundError" in job.nodes[0].err


KILLS = """
import os, signal, sys, time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
marks = Path(os.environ["MARKS"])
(marks / f"runs-{os.environ['RANK']}").touch()
while len(list(marks.glob("runs-*"))) < 2:
    time.sleep(0.01)
time.sleep(1)  # the agents connect in the background
if os.environ["RANK"] == sys.argv[1]:
    os.kill(os.getppid(), signal.SIGKILL)
time.sleep(300)
"""


@pytest.mark.parametrize("lost", [1, 0])
def test_peers_report_a_killed_agent_even_if_it_hosted_the_store(lost: int, tmp_path: Path) -> None:
    """The other node says which one is lost, also if that one hosted the store,
    and with it all that they share.
    """
    impatient = {node: {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"} for node in range(2)}
    words = ["--no-python", sys.executable, "-c", KILLS, str(lost)]
    job = run_job(tmp_path, words, FORKED, options=ONE_EACH, environments=impatient)
    assert job.find_problems(killed=1) == []
    (alive,) = job.alive
    assert alive is job.nodes[1 - lost]
    assert "firstfault: failed" not in alive.err
    assert alive.headline.startswith(f"node lost, host-{lost}: ")
    verdict = MultiErrorFileOutputReader(alive.prefix).verdict()
    assert verdict.coverage.notes == (f"took part but sent no report: host-{lost}",)


SAVES = """
import os, signal, sys, time
from pathlib import Path

marks = Path(os.environ["MARKS"])
rank = os.environ["RANK"]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def save(*_):
    deadline = time.monotonic() + 25
    while rank == "0" and runs(int((marks / "agent-1").read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    sys.exit()


signal.signal(signal.SIGTERM, save)
written = marks / f"new-{rank}"
written.write_text(str(os.getppid()))
written.rename(marks / f"agent-{rank}")
while len(list(marks.glob("agent-*"))) < 2:
    time.sleep(0.01)
time.sleep(1)  # the agents connect in the background
if rank == "1":
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(300)
"""


def test_a_node_that_must_end_leaves_the_verdict_to_the_one_that_stays(tmp_path: Path) -> None:
    """The other node's workers are still saving; its verdict has the reports of both nodes."""
    words = ["--no-python", sys.executable, "-c", SAVES]
    job = run_job(tmp_path, words, FORKED, options=ONE_EACH)
    staying, leaving = job.nodes
    assert (staying.code, leaving.code, job.left) == (1, 1, [])
    assert "this process has to end; the other nodes conclude on the failure" in leaving.err
    assert "Traceback" not in leaving.err
    assert leaving.lines == []
    assert "SIGTERM" in staying.err
    verdict = MultiErrorFileOutputReader(staying.prefix).verdict()
    assert (verdict.category, verdict.node) == ("preemption", "host-1")
    assert verdict.coverage.notes == ()


@pytest.mark.parametrize(("case", "begins"), CASCADES, ids=[case.name for case, _ in CASCADES])
def test_all_nodes_print_the_same_verdict_and_leave_no_process(
    case: Case, begins: str, jobs: dict[str, Future[Job]]
) -> None:
    """All nodes end with the same few lines, which name the injected fault, and code 1,
    and leave no process.
    """
    job = jobs[case.name].result()
    assert complaints_of(case, job, files_of(job)) == []
    for node in job.alive:
        assert node.headline.startswith(begins)
        assert bool(node.headline) == bool(begins)
    if "-own-" in case.name and begins:
        pages, conclusions = zip(*map(_report, job.prefixes), strict=True)
        assert pages[0] == pages[1]
        for found in conclusions:
            assert (found.verdict.coverage.complete, found.verdict.coverage.notes) == (True, ())
            assert {place.rank for place in found.job.places if place.rank is not None} == set(
                range(2 * case.per_node)
            )
