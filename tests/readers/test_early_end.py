"""A rank whose program reaches its end while its peers still need it."""

from dataclasses import replace

from firstfault.conclude import conclude
from firstfault.model import CollectiveProgress, ExceptionInfo, FrameInfo, WorkerError
from firstfault.render.terminal import terminal_text
from firstfault.report import Report
from firstfault.report.data import report_conclusion
from firstfault.testing import make_error, make_job

ENDED = ExceptionInfo("SystemExit", "its program reached its end", bases=("BaseException",))
LOST = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:4711"
CALL = FrameInfo("/job/train.py", 7, "step", "dist.all_reduce(loss)")


def _victim(rank: int, called: int, line: int = 7) -> WorkerError:
    raised = ExceptionInfo(
        "RuntimeError",
        LOST,
        bases=("Exception",),
        frames=(replace(CALL, line=line),),
    )
    return make_error(
        rank,
        at_ms=500,
        exception=raised,
        message=LOST,
        collectives=_progress(called),
        world_size=3,
    )


def _progress(called: int) -> tuple[CollectiveProgress, ...]:
    return (CollectiveProgress("default_pg", "gloo:all_reduce", called, called),)


def _early(*victims: WorkerError) -> Report:
    root = make_error(
        1,
        exception=ENDED,
        message=ENDED.message,
        category="exit",
        collectives=_progress(11),
        world_size=3,
    )
    return report_conclusion(conclude(make_job(root, *victims)), uri="")


def test_the_headline_says_where_the_peers_were() -> None:
    """Nobody called `sys.exit`: the program ended while its peers were at the next collective,
    at this line.
    """
    report = _early(_victim(0, 12), _victim(2, 12))
    where = (
        "its program reached its end while its peers were at all_reduce #12 (train.py:7 in step)"
    )
    assert report.verdict.headline == f"ended early, rank 1 on worker-0: {where}"
    assert report.answers.what == f"ended early: {where}"
    step, *_ = report.answers.steps
    assert step.text.startswith("find out why this rank ran fewer steps than its peers")
    # what the cause says isn't repeated in the row of the root cause
    assert terminal_text(report).count("its program reached its end") == 2


def test_peers_at_different_places() -> None:
    """A line or a collective is named only if all peers agree on it."""
    lines = _early(_victim(0, 12), _victim(2, 12, line=9)).verdict.headline
    assert lines.endswith("its program reached its end while its peers were at all_reduce #12")
    for counts in ((12, 13), (11, 11)):
        headline = _early(
            *(_victim(rank, count) for rank, count in zip((0, 2), counts, strict=True))
        ).verdict.headline
        assert headline == "ended early, rank 1 on worker-0: its program reached its end"


def test_one_peer() -> None:
    """The only peer that tells where it was is named by its rank."""
    headline = _early(_victim(0, 12)).verdict.headline
    assert "while rank 0 was at all_reduce #12 (train.py:7 in step)" in headline
