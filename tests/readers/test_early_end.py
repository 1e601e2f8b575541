"""A rank whose program reaches its end while its peers still need it."""

from dataclasses import replace

from firstfault.conclude import conclude
from firstfault.model import (
    CollectiveProgress,
    ExceptionInfo,
    FrameInfo,
    NodePresence,
    Phase,
    Receipt,
    WorkerError,
)
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


def build_early_end_report(*victims: WorkerError) -> Report:
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
    report = build_early_end_report(_victim(0, 12), _victim(2, 12))
    where = (
        "its program reached its end while its peers were at all_reduce #12 (train.py:7 in step)"
    )
    assert report.verdict.headline == f"ended early, rank 1 on worker-0: {where}"
    assert report.answers.what == f"ended early: {where}"
    step, *_ = report.answers.steps
    assert step.text.startswith("find out why this rank ran fewer steps than its peers")
    # what the cause says isn't repeated in the row of the root cause
    assert terminal_text(report).count("its program reached its end") == 2


def test_a_line_is_named_only_if_all_peers_agree() -> None:
    """A line or a collective is named only if all peers agree on it."""
    lines = build_early_end_report(_victim(0, 12), _victim(2, 12, line=9)).verdict.headline
    assert lines.endswith("its program reached its end while its peers were at all_reduce #12")
    for counts in ((12, 13), (11, 11)):
        headline = build_early_end_report(
            *(_victim(rank, count) for rank, count in zip((0, 2), counts, strict=True))
        ).verdict.headline
        assert headline == "ended early, rank 1 on worker-0: its program reached its end"


def test_the_only_peer_with_a_position_is_named() -> None:
    """The only peer that tells where it was is named by its rank."""
    headline = build_early_end_report(_victim(0, 12)).verdict.headline
    assert "while rank 0 was at all_reduce #12 (train.py:7 in step)" in headline


def _raised(at_ms: int, called: int) -> WorkerError:
    """Return rank 0's own exception, after so many collectives."""
    error = ExceptionInfo("ValueError", "cannot save the model", bases=("Exception",))
    return make_error(
        0,
        at_ms=at_ms,
        exception=error,
        message=error.message,
        collectives=_progress(called),
        world_size=2,
    )


def _on_machine(failure: WorkerError, at_ms: int) -> WorkerError:
    return replace(failure, boot_id="b00t", monotonic_ns=at_ms * 1_000_000)


def _conclude(own_at_ms: int, own_called: int, *, ended_at_ms: int = 100) -> Report:
    ended = make_error(
        1,
        at_ms=ended_at_ms,
        exception=ENDED,
        message=ENDED.message,
        category="exit",
        collectives=_progress(11),
        world_size=2,
    )
    # one boot of one machine, so the order of both is certain
    job = make_job(
        _on_machine(_raised(own_at_ms, own_called), own_at_ms), _on_machine(ended, ended_at_ms)
    )
    return report_conclusion(conclude(job), uri="")


def test_a_program_that_no_peer_needs_has_finished() -> None:
    """A program that ends after another rank has failed, or when no rank is further than it,
    has finished.
    """
    for own_at_ms, own_called in ((0, 12), (0, 11), (200, 11)):
        report = _conclude(own_at_ms, own_called)
        assert report.verdict.headline == "ValueError, rank 0 on worker-0: cannot save the model"
        assert not report.verdict.suspects
        states = {item.rank: item.state.value for item in report.cascade.ranks}
        assert states == {0: "root cause", 1: "finished"}
    # it ended first, and rank 0 may have waited for it
    assert _conclude(200, 12).verdict.headline.startswith("ended early, rank 1 ")


def test_exit_code_0_refuses_no_command_line() -> None:
    """Libraries for command lines also exit after a success: only another code refuses options."""
    exit_frame = FrameInfo("/env/lib/python3.11/site-packages/click/core.py", 1612, "main", "")
    error = ExceptionInfo("SystemExit", "", bases=("BaseException",), frames=(CALL, exit_frame))
    categories = [
        conclude(
            make_job(make_error(1, exception=error, message="", category="exit", exit_code=code))
        ).verdict.category
        for code in (None, 0, 2)
    ]
    assert categories == ["exit", "exit", "config"]


def test_a_finished_rank_is_not_one_without_a_report() -> None:
    """A rank that its agent saw finish before the failure isn't one without a report."""
    failure = _raised(0, 11)
    entry = NodePresence(
        Phase.FAILED,
        replace(failure.place, rank=None, local_rank=None),
        (0, 1),
        finished_ranks=(1,),
        receipts=(Receipt("e1-0.pb", durable=True, rank=0),),
    )
    job = make_job(failure, roster=(entry,))
    report = report_conclusion(conclude(job), uri="")
    states = {item.rank: item.state.value for item in report.cascade.ranks}
    assert states == {0: "root cause", 1: "finished"}
    assert "what happened to rank 1" not in terminal_text(report)
