"""What ``firstfault requeue`` reads of Slurm, and what it decides;
rows as Slurm 22.05 prints them.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from firstfault.conclude import Judgment, find_judgment
from firstfault.model import ExceptionInfo, FrameInfo, WorkerError
from firstfault.model.job import Action
from firstfault.slurm.client import SEPARATOR, SlurmError
from firstfault.slurm.command import _read_judgments
from firstfault.slurm.job import JobInfo, find_job_id, parse_job
from firstfault.slurm.placement import (
    Constraints,
    explain_exclusion_problem,
    find_blocked_nodes,
    parse_nodes,
)
from firstfault.slurm.plan import make_plan
from firstfault.slurm.starts import count_requeues, record_requeue
from firstfault.slurm_pointer import leave_pointer
from firstfault.testing import make_error
from tests.readers.conftest import Attempt
from tests.seals import DECISION, VERDICT, encode_sealed_verdict

COLUMN_WIDTH = 40
ROWS = """
10 10 5 N/A FAILED 0 2026-11-29T01:10:57 0 0 NonZeroExitCode
14 10 3 N/A FAILED 2 2026-11-29T01:10:56 0 0 NonZeroExitCode
16 16 2-3%1 N/A PENDING 0 N/A 0 0 JobArrayTaskLimit
17 16 1 N/A RUNNING 0 2026-11-29T01:16:38 0 0 None
8 8 N/A 8 COMPLETING 1 2026-11-29T01:11:08 0 0 None
9 9 N/A 8 PENDING 1 N/A 0 0 None
3 3 N/A N/A COMPLETING 0 2026-11-29T01:09:54 0 0 TimeLimit
20 20 N/A N/A RUNNING 0 2026-11-29T01:09:54 1 0 None
"""


def rows(*numbers: str) -> str:
    """Return what squeue prints about jobs with these numbers,
    after a line with the cluster's name.
    """
    chosen = [row.split() for row in ROWS.split("\n") if row.partition(" ")[0] in numbers]
    return "CLUSTER: lab\n" + "".join(
        "".join(f"{text:<{COLUMN_WIDTH}}" for text in row) + "\n" for row in chosen
    )


@pytest.mark.parametrize(
    ("printed", "job_id", "is_own", "expected"),
    [
        (("14",), "14", False, ("10_3", "14", "FAILED", 2)),
        (("10", "14"), "10_3", False, ("10_3", "14", "FAILED", 2)),
        (("10", "14"), "10", True, ("10_5", "10", "FAILED", 0)),
        (("17",), "17", True, ("16_1", "17", "RUNNING", 0)),
        (("8", "9"), "8", True, ("8", "8", "COMPLETING", 1)),
        (("8", "9"), "9", False, ("9", "9", "PENDING", 1)),
    ],
)
def test_a_job_is_found_by_any_of_its_ids(
    printed: tuple[str, ...],
    job_id: str,
    is_own: bool,
    expected: tuple[str, str, str, int],
) -> None:
    """A task of an array has a number of its own, and the last one the array's;
    a component has its job's besides.
    """
    job = parse_job(rows(*printed), job_id, is_own=is_own)
    assert (job.id, job.number, job.state, job.restarts) == expected


@pytest.mark.parametrize(
    ("printed", "job_id", "problem"),
    [
        (("10", "14"), "10", "10 is an array of jobs; name one of its tasks, such as 10_5"),
        (("16",), "16", "16 is an array of jobs; name one of its tasks, such as 16_1"),
        ((), "42", "Slurm doesn't know job 42"),
        (("16", "17"), "16_9", "Slurm doesn't know job 16_9"),
    ],
)
def test_a_whole_array_and_a_forgotten_job_are_refused(
    printed: tuple[str, ...], job_id: str, problem: str
) -> None:
    """A whole array isn't requeued, and a job that Slurm has forgotten is an error."""
    with pytest.raises(SlurmError, match=problem):
        parse_job(rows(*printed), job_id)


def test_an_outer_jobs_array_variables_are_ignored() -> None:
    """The variables of an array may be an outer job's: sbatch passes them on."""
    assert (
        find_job_id({"SLURM_JOB_ID": "18", "SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "5"})
        == "18"
    )
    assert find_job_id({}) == ""


# --- where the job can run without a node ---------------------------------------------------------

NODES = """
n1 mixed 2 2 1 1 gpu:a100:4 4000 0 a100,rack1
n2 allocated 2 2 1 1 gpu:a100:4 4000 0 a100,rack1
n3 idle~ 2 2 1 1 gpu:a100:4 4000 0 a100,rack2
n4 idle 2 2 1 1 gpu:v100:4 4000 0 v100,rack2
n5 idle 2 2 1 1 gpu:a100:4 2000 0 a100,rack2
n6 drained 2 2 1 1 gpu:a100:4 4000 0 a100,rack1
n7 idle* 2 2 1 1 gpu:a100:4 4000 0 a100,rack1
"""
PARTITION = parse_nodes("\n".join(SEPARATOR.join(row.split()) for row in NODES.strip().split("\n")))
RAN = Constraints(frozenset({"n1", "n2"}), frozenset(), frozenset(), "all", "(null)", "(null)")
TOO_FEW = "the job needs 2 nodes, and 1 that satisfy it would be left"


@pytest.mark.parametrize(
    ("constraints", "reserved", "connected", "problem"),
    [
        (RAN, set(), None, ""),  # n3 replaces n1: of the same kind, and Slurm starts it
        (RAN._replace(nodes=frozenset({"n1"})), set(), None, ""),
        (
            RAN._replace(nodes=frozenset({"n2"})),
            set(),
            None,
            "Slurm doesn't list it as a node of this job",
        ),
        (RAN._replace(required=frozenset({"n1"})), set(), None, "the job requires it"),
        (RAN._replace(required=frozenset({"n2"})), set(), None, ""),
        (RAN._replace(excluded=frozenset({"n3"})), set(), None, TOO_FEW),
        (RAN, {"n3"}, None, TOO_FEW),
        (RAN, None, None, "the nodes of reservation (null) are unknown"),
        (RAN, set(), {"n1", "n2"}, TOO_FEW),  # no switch connects n3
        (RAN._replace(features="a100"), set(), None, ""),
        (RAN._replace(features="a100&rack1"), set(), None, TOO_FEW),
        # not understood: n3 isn't quite the same
        (
            RAN._replace(features="[rack1|rack2]"),
            set(),
            None,
            TOO_FEW,
        ),
        # n6 has been drained: n2, n3
        (
            RAN._replace(nodes=frozenset({"n1", "n6"})),
            set(),
            None,
            "",
        ),
        (
            RAN._replace(nodes=frozenset({"n1", "n9"})),
            set(),
            None,
            "Slurm doesn't list all nodes of partition all",
        ),
        (RAN._replace(other="several components"), set(), None, "the job has several components"),
    ],
)
def test_a_node_is_excluded_only_if_usable_ones_are_left(
    constraints: Constraints,
    reserved: set[str] | None,
    connected: set[str] | None,
    problem: str,
) -> None:
    """A node is excluded only if others of its kind that the job can use are left."""
    assert explain_exclusion_problem(constraints, "n1", PARTITION, reserved, connected) == problem


def test_nodes_of_other_reservations_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of other active reservations can't be used,
    and of those in a job's own reservation no others can.
    """
    monkeypatch.setattr("firstfault.slurm.placement.expand_nodes", lambda names: names.split(","))
    row = "{} ACTIVE 2026-11-29T01:10:14 2026-11-29T02:10:14 01:00:00 {}\n"
    later = "later INACTIVE 2026-12-29T01:10:14 2026-12-29T02:10:14 01:00:00 n4\n"
    printed = row.format("mine", "n1,n2,n3") + row.format("of them", "n3,n4") + later
    assert find_blocked_nodes(printed, "(null)", PARTITION) == {"n1", "n2", "n3", "n4"}
    assert find_blocked_nodes(printed, "mine", PARTITION) == {"n3", "n4", "n5", "n6", "n7"}
    assert find_blocked_nodes(printed, "gone", PARTITION) is None
    assert find_blocked_nodes("No reservations in the system\n", "(null)", PARTITION) == set()


# --- what is decided ------------------------------------------------------------------------------

JOB = JobInfo("42", "42", "RUNNING", "None", 0, 0.0, "")
PREEMPTED = Judgment(
    replace(VERDICT, category="preemption"), replace(DECISION, action=Action.SYSTEM)
)
RETRY = Judgment(VERDICT, replace(DECISION, action=Action.RETRY))
STOP = Judgment(VERDICT, replace(DECISION, retry=False, action=Action.STOP, reason="a bug"))


ECC = make_error(
    exception=ExceptionInfo(
        "RuntimeError",
        "CUDA error: uncorrectable ECC error encountered",
        frames=(FrameInfo("/v/site-packages/torch/cuda/__init__.py", 9, "forward", "raise error"),),
    ),
    category="gpu_hardware",
)


@pytest.mark.parametrize(
    ("failure", "is_enough"),
    [(make_error(), True), (ECC, False)],
    ids=["of the program", "of the machine"],
)
def test_the_sealed_verdict_suffices_unless_a_machine_may_be_faulty(
    attempt: Attempt, requested_paths: list[str], failure: WorkerError, is_enough: bool
) -> None:
    """The sealed verdict is enough, unless the document of its root cause may prove a machine
    faulty. Without a sealed verdict, or with a damaged one, all is read.
    """
    documents = attempt.write(failure, make_error(1, at_ms=9))
    conclusion = attempt.reader().conclude()
    assert conclusion is not None
    own = Judgment(conclusion.verdict, conclusion.decision)
    assert _read_judgments([attempt.uri]) == [own]
    attempt.put("error.pb", b"damaged")
    requested_paths.clear()
    (unsealed,) = _read_judgments([attempt.uri])
    assert (unsealed.verdict.headline, unsealed.is_sealed) == (own.verdict.headline, False)
    assert len(requested_paths) > len(documents)
    attempt.put("error.pb", encode_sealed_verdict(conclusion.verdict, conclusion.decision))
    requested_paths.clear()
    (judgment,) = _read_judgments([attempt.uri])
    assert (requested_paths == ["error.pb"]) is is_enough
    counts = find_judgment(attempt.reader().conclude())
    assert replace(judgment.verdict, root=counts.verdict.root) == counts.verdict
    assert (judgment.decision, judgment.is_sealed) == (counts.decision, True)
    plan = make_plan(JOB, [judgment], count=0, max_requeues=2)
    assert plan == make_plan(JOB, [counts], count=0, max_requeues=2)._replace(judgment=judgment)
    assert bool(plan.bad_node) is not is_enough


def test_a_missing_folder_has_no_verdict(attempt: Attempt) -> None:
    """A folder that isn't there has no verdict."""
    assert _read_judgments([attempt.uri]) == []


@pytest.mark.parametrize(
    ("job", "judgments", "stop_reason", "is_counted"),
    [
        # only a SIGTERM: `timeout`, --signal=TERM@60
        (
            JOB,
            (PREEMPTED,),
            "all 2 requeues are used up",
            True,
        ),
        (JOB._replace(state="TIMEOUT"), (PREEMPTED,), "all 2 requeues are used up", True),
        (JOB._replace(state="NODE_FAIL"), (PREEMPTED,), "all 2 requeues are used up", True),
        (JOB._replace(state="PREEMPTED"), (PREEMPTED,), "", False),
        (JOB._replace(state="PREEMPTED"), (RETRY, STOP), "a bug", False),
        (
            JOB._replace(state="COMPLETING", reason="TimeLimit"),
            (RETRY,),
            "all 2 requeues are used up",
            True,
        ),
        # scancel
        (
            JOB._replace(state="COMPLETING"),
            (PREEMPTED,),
            "Slurm shows it as COMPLETING",
            True,
        ),
        (JOB._replace(state="COMPLETED"), (RETRY,), "Slurm shows it as COMPLETED", True),
        # `srun eval.py || true; srun train.py || firstfault requeue`: the bug of eval.py didn't end
        # the job
        (JOB, (STOP, RETRY), "all 2 requeues are used up", True),
    ],
)
def test_only_slurm_announces_a_preemption(
    job: JobInfo,
    judgments: tuple[Judgment, ...],
    stop_reason: str,
    is_counted: bool,
) -> None:
    """A requeue counts unless Slurm shows the job as preempted; the last step decides,
    and a canceled job stays.
    """
    plan = make_plan(job, judgments, count=2, max_requeues=2)
    assert (plan.stop_reason, plan.is_counted) == (stop_reason, is_counted)


def test_each_job_counts_its_own_requeues_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job counts its own; repeating the command counts once,
    and a requeue whose record is out of sight counts.
    """
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("FIRSTFAULT_FOLDER", raising=False)
    monkeypatch.chdir(tmp_path)
    attempts = [tmp_path / "run" / str(number) for number in range(4)]
    for number, attempt in enumerate(attempts[1:], 1):
        attempt.mkdir(parents=True)
        variables = {
            "HOME": str(tmp_path),
            "SLURM_JOB_ID": "42",
            "SLURM_RESTART_COUNT": str(number),
        }
        assert leave_pointer(str(attempt), environment=variables)
    # start 0 left nothing on this node, start 1 was preempted, start 2 was requeued
    record_requeue(JOB._replace(restarts=2), [str(attempts[2])])
    last = JOB._replace(restarts=3)
    record_requeue(last, [str(attempts[3])])
    assert count_requeues(last, [str(attempts[3])]) == len({"start 0", "start 2"})
    assert count_requeues(JOB._replace(id="43", number="43"), [str(attempts[3])]) == 0
