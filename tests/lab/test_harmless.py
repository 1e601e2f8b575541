"""Jobs that firstfault must leave alone end as under plain torchrun:
a part of ``make harmless``.
"""

from pathlib import Path

import pytest

from lab.harmless.pairs import find_differences, run_pair
from lab.harmless.plans import Plan, SentSignal, draw_plan

pytestmark = pytest.mark.jobs
PLANS = (
    Plan(0, "fault", max_restarts=2, fault="SIGKILL", faulty_rank=1),
    Plan(1, "fault", max_restarts=1, fault="chained", habits=("atexit", "own_handlers")),
    Plan(2, "fault", max_restarts=1, fault="exit 3", habits=("close_descriptors",)),
    Plan(3, "fault", max_restarts=1, fault="RuntimeError", nodes=2, workers=1),
    Plan(4, "mode", max_restarts=2, fault="TypeError", decisions="observe"),
    Plan(5, "mode", max_restarts=2, fault="TypeError", decisions="off"),
    Plan(
        6,
        "signal",
        nodes=2,
        workers=1,
        signals=(SentSignal(0, 0.0), SentSignal(1, 2.0)),
        handler="exit",
    ),
    Plan(7, "elastic", nodes=2, workers=1, max_restarts=1, joins=True),
    Plan(
        8,
        "habit",
        habits=("daemon", "children", "thread_at_exit", "clear_environment", "much_output"),
    ),
    Plan(9, "ranks", door="ranks", habits=("exec", "wrapper")),
    Plan(10, "stall", communicates=True, native_wait=True, habits=("own_handlers",)),
    Plan(11, "machine", machine="cleaner", max_restarts=1, fault="OSError"),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.title)
def test_a_job_ends_the_same_with_and_without_firstfault(plan: Plan, tmp_path: Path) -> None:
    """Files, output, exit codes and the number of starts are the same with
    and without firstfault.
    """
    plain, ours = run_pair(plan, tmp_path / "pair", uses_forks=True)
    assert not (found := find_differences(plain, ours)), "\n".join(found)


def test_a_job_that_firstfault_ends_early_counts_as_different(tmp_path: Path) -> None:
    """A job that firstfault ends, because its fault would come again, differs from torchrun's:
    the lab can see.
    """
    plain, ours = run_pair(
        Plan(12, "fault", max_restarts=1, fault="TypeError"),
        tmp_path / "pair",
        uses_forks=True,
    )
    assert any(line.startswith("exit codes [0] became") for line in find_differences(plain, ours))


def test_a_seed_always_draws_the_same_plan() -> None:
    """A seed always draws the same plan, and ten seeds draw each kind of job."""
    plans = [draw_plan(seed) for seed in range(50)]
    assert plans == [draw_plan(seed) for seed in range(50)]
    assert {plan.kind for plan in plans[:10]} == {plan.kind for plan in plans}
