"""What a worker had done before its failure: returned a value, or lost a thread."""

from dataclasses import replace

from firstfault.conclude import conclude
from firstfault.model import ExceptionInfo, SentSignal, ThreadFailure, Writer
from firstfault.render.terminal import terminal_text
from firstfault.report.data import report_conclusion
from firstfault.testing import make_error, make_job

KEPT = """Traceback (most recent call last):
  File "/x/site-packages/torch/multiprocessing/spawn.py", line 87, in _wrap
    fn(i, *args)
  File "/x/site-packages/torch/distributed/elastic/multiprocessing/api.py", line 707, in _wrap
    ret_val_.put(ret)
  File "/x/lib/python3.11/multiprocessing/queues.py", line 371, in put
    obj = _ForkingPickler.dumps(obj)
          ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/x/lib/python3.11/multiprocessing/reduction.py", line 51, in dumps
    cls(buf, protocol).dump(obj)
TypeError: cannot pickle '_thread.lock' object
"""
ELSEWHERE = KEPT.replace("ret_val_.put(ret)", "fn(*args)")
SENT = "the function's result can't be pickled: "


def print_report_on(kept: str) -> str:
    """Return the report on a worker of which torch kept a traceback, and on one that was stopped
    250 ms after its end.
    """
    raised = ExceptionInfo("TypeError", "cannot pickle '_thread.lock' object")
    error = make_error(
        0, exception=raised, message=kept, exit_code=1, writer=Writer.AGENT, world_size=2
    )
    stopped = make_error(
        1,
        at_ms=350,
        exception=None,
        exit_code=-15,
        signal="SIGTERM",
        sent_signals=(SentSignal("SIGTERM", "another worker of this node had failed"),),
        category="stopped",
        world_size=2,
    )
    failures = [
        replace(failure, boot_id="b00t", monotonic_ns=at_ms * 1_000_000)
        for failure, at_ms in ((error, 100), (stopped, 350))
    ]
    report = report_conclusion(conclude(make_job(*failures)), uri="")
    return " ".join(terminal_text(report).split())


def test_a_result_that_cannot_be_pickled_is_at_fault_not_a_line() -> None:
    """The value that the function returned is at fault, not a line of the function.

    When the exception was raised isn't known, only when its process had ended.
    """
    text = print_report_on(KEPT)
    assert f"Cause TypeError: {SENT}cannot pickle '_thread.lock' object" in text
    assert "Next return a value that pickle can write" in text
    assert "1 stopped by its agent, at least 250 ms later" in text
    assert SENT not in print_report_on(ELSEWHERE)


def test_a_threads_earlier_exception_explains_that_of_the_main_thread() -> None:
    """The exception of a thread explains that of the main thread, if it came before."""
    error = make_error(1, exception="RuntimeError", message="the prefetch thread died", at_ms=500)
    assert error.timestamp_ns is not None
    for before_ns, is_shown in ((1_000_000, True), (-1_000_000, False)):
        dead = ThreadFailure(
            "prefetch", error.timestamp_ns - before_ns, ExceptionInfo("KeyError", "'shard'")
        )
        verdict = conclude(make_job(replace(error, thread_failures=(dead,)))).verdict
        reason = "before, its thread 'prefetch' ended with KeyError: 'shard'"
        assert (reason in verdict.why) is is_shown
