"""The time limits of a pod: they stand in one table, their sums fit,
and the pages give the same numbers.
"""

import ast
import pickle
from pathlib import Path

import pytest

import firstfault_torch
from firstfault import recorder
from firstfault.recorder import time_limits as of_recorder
from firstfault_torch import time_limits
from tools.describe_limits import CONCLUDES_ALONE, CONCLUDES_FOR_ALL, KUBERNETES_GRACE_S, limits

ROOT = Path(__file__).parents[2]


def _own_limits(file: Path) -> list[str]:
    """Return the constants of a module that are numbers and look like times."""
    nodes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign)]
    numbers = [
        node
        for node in nodes
        if isinstance(node.value, ast.Constant) and type(node.value.value) in {int, float}
    ]
    names = [
        target.id for node in numbers for target in node.targets if isinstance(target, ast.Name)
    ]
    return [f"{file.name}: {name}" for name in names if name.endswith(("_S", "_SECONDS"))]


def test_every_time_limit_is_in_a_table() -> None:
    """No module of the pod has a time limit of its own, each in the tables has its row,
    and no name occurs twice.
    """
    here, there = Path(str(firstfault_torch.__file__)).parent, Path(str(recorder.__file__)).parent
    files = [
        file for file in [*here.rglob("*.py"), *there.glob("*.py")] if file.name != "time_limits.py"
    ]
    assert not [name for file in files for name in _own_limits(file)]
    tables = (time_limits, of_recorder)
    names = [name for table in tables for name in vars(table) if "_SECONDS" in name]
    assert len(names) == len(set(names))
    rows = [
        ast.unparse(node.value)
        for table in tables
        for node in ast.parse(Path(str(table.__file__)).read_text()).body
        if isinstance(node, ast.Assign)
    ]
    assert len(rows) == len(names)
    assert all(row.startswith("TimeLimit(") for row in rows)


def test_every_limit_says_who_waits_and_what_happens() -> None:
    """Each limit says who waits, for what, and what happens at the end,
    and other processes get a plain number.
    """
    for limit in limits().values():
        assert limit.who
        assert limit.waits_for
        assert limit.then
        assert type(pickle.loads(pickle.dumps(limit))) is float  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("chain", "most"),
    [
        (CONCLUDES_FOR_ALL, KUBERNETES_GRACE_S),
        (CONCLUDES_ALONE, KUBERNETES_GRACE_S),
        # the next node waits for a verdict that is being published
        (
            (
                time_limits.PUBLISH_TIMEOUT_SECONDS,
                time_limits.DECK_TIMEOUT_SECONDS,
                time_limits.HANDOVER_TIMEOUT_SECONDS,
                time_limits.HANDOVER_SLACK_SECONDS,
            ),
            time_limits.LEADER_PUBLISH_TIMEOUT_SECONDS,
        ),
        # the signal thread ends the pod by itself before the other nodes conclude without it
        (
            (time_limits.MAIN_THREAD_TIMEOUT_SECONDS, time_limits.EXIT_STEP_TIMEOUT_SECONDS),
            time_limits.ACKNOWLEDGMENT_TIMEOUT_SECONDS,
        ),
        # a worker answers its agent before that gives up on it
        (
            (
                time_limits.LAST_DECKS_TIMEOUT_SECONDS,
                time_limits.HANDLED_EXCEPTIONS_TIMEOUT_SECONDS,
            ),
            time_limits.WORKER_QUERY_TIMEOUT_SECONDS,
        ),
        # reading an exception and its surroundings leaves time for the upload
        (
            (
                time_limits.UPLOAD_DEADLINE_SECONDS / 2,
                time_limits.FLIGHT_RECORDER_TIMEOUT_SECONDS,
                time_limits.HANDLED_EXCEPTIONS_TIMEOUT_SECONDS,
                time_limits.FILE_SYSTEMS_TIMEOUT_SECONDS,
                time_limits.GPU_UUID_TIMEOUT_SECONDS,
                time_limits.MIN_SPOOL_TIMEOUT_SECONDS,
            ),
            time_limits.UPLOAD_DEADLINE_SECONDS,
        ),
        # the recorder answers before its client kills it
        ((of_recorder.UPLOADS_DRAIN_TIMEOUT_SECONDS,), of_recorder.RECORDER_EXIT_GRACE_SECONDS),
    ],
)
def test_all_waits_fit_into_the_grace_period(chain: tuple[float, ...], most: float) -> None:
    """What a process waits for one after the other ends before another one gives up on it,
    or Kubernetes kills it.
    """
    assert sum(chain) <= most


@pytest.mark.parametrize(
    ("page", "promise", "limit"),
    [
        (
            "guides/hangs",
            "connections are shut down after {:g} s",
            time_limits.CLEAN_EXIT_GRACE_SECONDS,
        ),
        (
            "start/torchrun",
            "the start takes {:g} s longer",
            time_limits.ROUND_NUMBER_TIMEOUT_SECONDS,
        ),
        ("project/design", "not restored within {:g} s", time_limits.RECONNECT_TIMEOUT_SECONDS),
        ("project/design", "lists the roster every {:g} s", time_limits.ROSTER_POLL_SECONDS),
        ("project/design", "raised again every {:g} s", time_limits.SIGNAL_RAISE_INTERVAL_SECONDS),
        (
            "project/design",
            "together may take {:g} s",
            time_limits.TERMINATED_UPLOADS_TIMEOUT_SECONDS,
        ),
        ("project/design", "and reading {:g} s", time_limits.TERMINATED_READ_TIMEOUT_SECONDS),
    ],
)
def test_pages_promise_the_times_of_the_table(page: str, promise: str, limit: float) -> None:
    """A page that promises a time has the number of the table."""
    assert promise.format(limit) in " ".join((ROOT / f"docs/{page}.md").read_text().split())
