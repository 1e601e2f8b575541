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


_RECORD_PREFIXES = [
    "2031-05-06 07:08:0{second} {level} [rank {rank}] ",
    "2031-05-06 07:08:0{second} [{level}] [Rank {rank}] ",
    "2031-05-06 07:08:0{second} {level} rank={rank} ",
    "2031-05-06 07:08:0{second} {level} (rank {rank}) ",
    "2031-05-06 07:08:0{second} {level} R{rank}: ",
    "2031-05-06 07:08:0{second}.123 | {level:<8} | rank={rank} | __main__:main:44 - ",
    "2031-05-06 07:08:0{second},123 - {level} - [rank {rank}] - ",
    "2031-05-06 07:08:0{second},123 {level} trainer [rank:{rank}] ",
    "[2031-05-06 07:08:0{second}] [rank{rank}] {level}: ",
    "2031-05-06 07:08:0{second} [{level:<8}] [rank{rank}] ",
    "[Rank {rank}] {level}: ",
    "{level}:root:[rank {rank}/4] ",
]
_FRAMES = """Traceback (most recent call last):
  File "/job/train.py", line 44, in main
    step(batch)
  File "/job/train.py", line 31, in step
    loss = model(batch["labels"])
KeyError: 'labels'
"""


def _write_records(prefix: str, first: int, last: int) -> str:
    """Return the steps of four ranks as their loggers print them."""
    return "".join(
        prefix.format(second=step, level="INFO", rank=rank) + f"step {step} loss 2.{step}\n"
        for step in range(first, last)
        for rank in range(4)
    )


def _prefix_lines(prefix: str, text: str) -> str:
    """Return lines with the prefix of an error of rank 2."""
    before = prefix.format(second=7, level="ERROR", rank=2)
    return "".join(f"{before}{line}\n" for line in text.splitlines())


@pytest.mark.parametrize("prefix", _RECORD_PREFIXES)
@pytest.mark.parametrize("is_whole", [True, False], ids=["every line", "first line"])
def test_a_logger_with_a_rank_names_the_rank_of_a_traceback(
    show: Callable[[str], dict[str, Any]], prefix: str, is_whole: bool
) -> None:
    """The rank in a logger's records is the traceback's: of each line, or of the record above."""
    traceback = _prefix_lines(prefix, _FRAMES) if is_whole else _FRAMES
    announced = _prefix_lines(prefix, "training failed")
    verdict = show(f"{_write_records(prefix, 0, 6)}{announced}{traceback}")["verdict"]
    assert (verdict["headline"], verdict["ranks"]) == ("KeyError, rank 2: 'labels'", [2])


def test_chained_exceptions_below_a_record_are_of_its_rank(
    show: Callable[[str], dict[str, Any]],
) -> None:
    """All tracebacks of chained exceptions are of the rank that logged them."""
    chain = "\nDuring handling of the above exception, another exception occurred:\n\n"
    last = _FRAMES.replace("KeyError: 'labels'", "ValueError: no labels in shard 9")
    log = f"{_write_records(_BRACKETS, 0, 6)}{_ANNOUNCED}{_FRAMES}{chain}{last}"
    verdict = show(log)["verdict"]
    assert verdict["ranks"] == [2]
    assert "no labels in shard 9" in json.dumps(verdict)
    # without the words between, the second traceback may be of any rank
    log = f"{_write_records(_BRACKETS, 0, 6)}{_ANNOUNCED}{_FRAMES}\n{last}"
    assert show(log)["verdict"]["headline"] == "KeyError, rank 2: 'labels'"


_BRACKETS = _RECORD_PREFIXES[0]
_ANNOUNCED = _prefix_lines(_BRACKETS, "training failed")
_OF_RANK_1 = _BRACKETS.format(second=7, level="{}", rank=1)


@pytest.mark.parametrize(
    "log",
    [
        f"{_ANNOUNCED}{_OF_RANK_1.format('INFO')}step 6 loss 2.1\n{_FRAMES}",
        f"{_OF_RANK_1.format('ERROR')}training failed\n{_ANNOUNCED}{_FRAMES}",
        f"{_ANNOUNCED}library: using 4 threads\n{_FRAMES}",
        _FRAMES,
    ],
    ids=["another rank's record between", "two ranks' errors", "another line between", "no error"],
)
def test_a_traceback_that_several_ranks_may_have_printed_names_none(
    show: Callable[[str], dict[str, Any]], log: str
) -> None:
    """Only the record directly above a traceback names its rank."""
    verdict = show(f"{_write_records(_BRACKETS, 0, 6)}{log}")["verdict"]
    assert (verdict["headline"], verdict["ranks"]) == ("KeyError: 'labels'", [])


@pytest.mark.parametrize(
    "prefix",
    [
        "2031-05-06 07:08:0{second} INFO rank {rank} joined: ",
        "2031-05-06 07:08:0{second} INFO waiting for rank {rank} ",
        "2031-05-06 07:08:0{second} INFO R7: ",
        "2031-05-06 07:08:0{second} INFO [shard_of_rank {rank}] ",
        "2031-05-06 07:08:0{second} INFO [rank_{rank}.txt] ",
    ],
    ids=[
        "a rank in a sentence",
        "a rank that is waited for",
        "a release",
        "a name with a rank",
        "a file",
    ],
)
def test_words_in_a_record_name_no_rank(show: Callable[[str], dict[str, Any]], prefix: str) -> None:
    """A record that mentions a rank isn't that rank's."""
    verdict = show(f"{_write_records(prefix, 0, 6)}{_FRAMES}")["verdict"]
    assert (verdict["headline"], verdict["ranks"]) == ("KeyError: 'labels'", [])


@pytest.mark.parametrize("is_whole", [True, False], ids=["every line", "first line"])
@pytest.mark.parametrize(
    "below",
    [
        _write_records(_BRACKETS, 6, 9),
        _BRACKETS.format(second=9, level="INFO", rank=0) + "Training completed successfully\n",
    ],
    ids=["later steps", "success of the job"],
)
def test_an_exception_that_a_logger_printed_and_a_rank_handled_is_no_failure(
    show: Callable[[str], dict[str, Any]], below: str, is_whole: bool
) -> None:
    """What the ranks print below a logged exception shows that the training continued."""
    announced = _prefix_lines(_BRACKETS, "evaluation failed, continuing")
    traceback = _prefix_lines(_BRACKETS, _FRAMES) if is_whole else _FRAMES
    log = f"{_write_records(_BRACKETS, 0, 6)}{announced}{traceback}{below}"
    assert not show(log).get("verdict")


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
