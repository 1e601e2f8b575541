"""``firstfault show`` on logs that name processes, pods and waits: whom a failure is about,
and how many there are.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstfault.utils.toml import parse_toml
from tests.readers.commands import Ran

_FOLDER = Path(__file__).parent
_CASES = {
    name: case
    for table in ("log_waits.toml", "log_identities.toml")
    for name, case in parse_toml((_FOLDER / table).read_text(encoding="utf-8")).items()
}
TRACEBACK = """
Traceback (most recent call last):
  File "/job/train.py", line 12, in main
    fetch(url)
OSError: no answer from the store
"""
PODS = """
NAME             READY   STATUS      RESTARTS   AGE
other-app-7      0/1     Error       0          10m
train-worker-0   1/1     Running     0          10m
train-worker-1   1/1     Running     0          10m
"""
RESTARTED = "\nBack-off restarting failed container pytorch in pod train-worker-1_team(3a2b)\n"
STEPS = "".join(f"step {number} loss 2\n" for number in range(1, 9))
LOST_TASK = (
    "31/05/06 07:08:09 WARN TaskSetManager: Lost task 3.0 in stage 1.0 (TID 7) (gpu-2 executor 2):"
    " {}: "
)
FINISHED_TASK = (
    "31/05/06 07:08:12 INFO TaskSetManager: Finished task 3.1 in stage 1.0 (TID 9) in 9 ms on gpu-3"
)


@pytest.fixture
def show(run: Callable[..., Ran], tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Return a function that shows a text as the log of a job,
    as JSON with the exit code as "code".
    """

    def shown(text: str) -> dict[str, Any]:
        path = tmp_path / "job.txt"
        path.write_text(text, encoding="utf-8")
        ran = run("show", "--json", str(path))
        return {"code": ran.code, **(json.loads(ran.out) if ran.out else {"stderr": ran.err})}

    return shown


@pytest.mark.parametrize("name", _CASES)
def test_the_headline_names_who_waited_or_failed(
    show: Callable[[str], dict[str, Any]], name: str
) -> None:
    """The headline tells who waited or failed;
    one failure that is printed several times has no victims.
    """
    case = _CASES[name]
    verdict = show(case["log"])["verdict"]
    assert case["headline"] in verdict["headline"]
    assert (verdict["ranks"], verdict["category"]) == (case.get("ranks", []), case["category"])
    assert verdict["node"] == case["node"] if "node" in case else True
    assert verdict["victims"]["count"] == case["victims"] if "victims" in case else True
    assert (verdict["timestamp"] or "").startswith(case.get("time", ""))
    assert case.get("why", "") in json.dumps(verdict)


@pytest.mark.parametrize(
    "log",
    [
        f"step 1\n{PODS}",
        f"step 1\n{PODS.replace('other-app-7', 'train-worker-0-abcde').replace('0  ', '0-x1y2z ')}",
        f"{RESTARTED}{STEPS}",
        LOST_TASK.format("org.PythonException") + TRACEBACK.strip() + f"\n{FINISHED_TASK}\n",
        "INFO Lost executor 2 on gpu-2: Executor decommission finished.\nstep 2\n",
    ],
    ids=[
        "a pod of another job",
        "a pod that was replaced",
        "a container that was restarted",
        "a task that finished on its second try",
        "an executor that was taken away",
    ],
)
def test_a_line_about_another_job_is_no_failure(
    show: Callable[[str], dict[str, Any]], log: str
) -> None:
    """A line about another job, or about what was made good, is no failure."""
    assert not show(log).get("verdict")


def test_the_place_is_only_the_local_rank_without_a_node(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """The place is as much as the log names: the local rank."""
    log = tmp_path / "job.txt"
    report = (
        "E0506 07:08:11.000000 1 torch/distributed/elastic/api.py:9] failed (exitcode: 1)"
        " local_rank: 2 (pid: 33)"
    )
    log.write_text(f"{TRACEBACK}{report}\n", encoding="utf-8")
    assert "local rank 2 of a node that the log doesn't name" in " ".join(
        run("show", str(log)).out.split()
    )
