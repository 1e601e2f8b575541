"""The headline of a verdict, its category, and the names of processes in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from firstfault.evidence.texts import message_of
from firstfault.exceptions.stack_position import locate_main_thread
from firstfault.model import TIME_LIMIT, Origin, Subject, WorkerError, Writer
from firstfault.model.failure import CTRL_C, explain_end
from firstfault.utils.text import one_line, sentence_of

HEADLINE = 160
"""Characters of a headline at most."""
_INTERRUPTED = {"KeyboardInterrupt", "SIGINT", "exit code 130"}
"""How a process ends by SIGINT: the last one is a shell's exit code."""


def who(failure: WorkerError) -> str:
    """Name a failure's process: "rank 3 on worker-1", "the agent of worker-1", "worker-1"."""
    node = failure.node
    if failure.rank is not None:
        return f"rank {failure.rank} on {node}" if node else f"rank {failure.rank}"
    if failure.subject is Subject.AGENT:
        return f"the agent of {node}" if node else "an agent"
    return node or "a worker without a name"


def headline_of(root: WorkerError, ranks: Sequence[int] = (), more: str = "") -> str:
    """One line: what, who, and the first line of its message; `more` follows who."""
    subject = (f"ranks {listed(ranks)}" if len(ranks) > 1 else who(root)) + more
    text = sentence_about(root)
    category, what = category_of(root), message_of(root).what
    if category == "preemption":
        what = "terminated"
    if category == "interrupted":
        what = f"interrupted ({'Ctrl-C, SIGINT' if root.code == CTRL_C else what})"
        subject, text = (root.node, "") if root.subject is Subject.AGENT and root.node else (subject, text)
    if root.code == TIME_LIMIT:
        what = "time limit"
    headline = f"{what}, {subject}" + (f": {text}" if text and text != what else "")
    return one_line(headline, HEADLINE)


def sentence_about(root: WorkerError) -> str:
    """Return what happened to a process, without its name; empty: not known."""
    said = message_of(root).with_wrapper
    if said:
        return said
    if root.subject is Subject.AGENT:
        return sentence_of(root.message)
    if root.expired is not None:
        at = locate_main_thread(root).frame
        return f"{root.expired.text} at {at}" if at else root.expired.text
    is_stopped = root.sent_signals and not root.crashed_while_stopped
    if (root.signal and not is_stopped) or (root.exit_code is not None and not root.signal):
        return explain_end(root)
    # flytekit's texts start with ``Trace:`` and carry the sentence after ``Message:``
    _, found, tail = root.message.rpartition("\nMessage:")
    text = sentence_of(tail if found else root.message)
    if not text.endswith("error="):
        return text
    # flytekit puts torch's box after an empty line; the last line of the box is the exception's
    lines = [line.strip() for line in tail.splitlines() if line.strip(" =-")]
    return sentence_of(lines[-1])


def listed(ranks: Sequence[int], count: int | None = None) -> str:
    """Return at most 8 ranks as a text; `count` tells how many there are, if it is not their length."""
    shown = ranks[:8]  # as many as fit a line
    more = (len(ranks) if count is None else count) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {more} more" if more > 0 else "")


def category_of(failure: WorkerError) -> str:
    """Return the category that the writer claims, else the one of the exception, the signal or the exit code."""
    if failure.category:
        return failure.category
    if failure.recoverable and failure.origin is not Origin.SYSTEM:
        return "recoverable"
    if failure.stopped_by_agent:
        return "stopped"
    if message_of(failure).what in _INTERRUPTED:
        return "interrupted"
    if failure.exception is not None:
        return "user_code"
    if failure.signal:
        return "signal"
    if failure.exit_code is not None:
        return "exit"
    if failure.writer is Writer.STOCK:
        return "infrastructure" if failure.origin is Origin.SYSTEM else "user_code"
    return "unknown"
