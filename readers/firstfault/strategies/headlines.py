"""How a failure is named: the headline of a verdict, the category, and "rank 3 on worker-1"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from firstfault.evidence.texts import find_message
from firstfault.exceptions.stack_position import locate_main_thread
from firstfault.model import TIME_LIMIT, Origin, Subject, WorkerError, Writer
from firstfault.model.failure import (
    CTRL_C,
    HANGUP,
    JOB_END_CODES,
    JOB_END_WORDS,
    OF_LOGS,
    explain_end,
)
from firstfault.model.job import UNNAMED_PROCESS
from firstfault.utils.text import extract_sentence, one_line

NO_PROGRESS = "no progress for"
"""Begins the sentence about a stall before the end of a job."""
MAX_HEADLINE_CHARS = 160
_MAX_RANKS_IN_TEXT = 8
"""Maximum number of ranks that fit into a line."""
_WORDS_FOR_INTERRUPTS = {CTRL_C: "Ctrl-C, SIGINT", HANGUP: "SIGHUP, the terminal was closed"}
_SIGINT_EXITS = {"KeyboardInterrupt", "SIGINT", "exit code 130"}
"""How a process ends after SIGINT. A shell exits with 130."""


def name_process(failure: WorkerError) -> str:
    """Return the name of a failure's process: "rank 3 on worker-1", "the agent of worker-1" or, for
    a node, "worker-1".
    """
    node = failure.node
    if failure.rank is not None:
        return f"rank {failure.rank} on {node}" if node else f"rank {failure.rank}"
    if failure.subject is Subject.AGENT and failure.code in JOB_END_CODES and not node:
        return "the job"
    if failure.place.engine == OF_LOGS and failure.category == "node_lost" and node:
        return node  # nobody has reported an agent there
    if failure.subject is Subject.AGENT:
        return f"the agent of {node}" if node else "an agent"
    if failure.place.local_rank is not None:
        return f"local rank {failure.place.local_rank}" + (f" on {node}" if node else "")
    return node or UNNAMED_PROCESS


def build_headline(
    root: WorkerError,
    ranks: Sequence[int] = (),
    more_ranks: str = "",
    explanation: str = "",
) -> str:
    """Return one line: what happened, to which ranks (then `more_ranks`), and the first line of the
    message, or `explanation` instead of it.
    """
    subject = (f"ranks {join_ranks(ranks)}" if len(ranks) > 1 else name_process(root)) + more_ranks
    # a log that names no process may be of one
    subject = "" if root.place.engine == OF_LOGS and subject == UNNAMED_PROCESS else subject
    text = explanation or describe_failure(root)
    category = find_category(root)
    what = find_message(root).what
    # a preempted agent got SIGTERM, which alone would explain nothing
    if category == "preemption":
        what = JOB_END_WORDS.get(root.code, "terminated")
    if category == "interrupted":
        what = f"interrupted ({_WORDS_FOR_INTERRUPTS.get(root.code, what)})"
        subject, text = (
            (root.node, "") if root.subject is Subject.AGENT and root.node else (subject, text)
        )
    if root.code == TIME_LIMIT:
        what = "time limit"
    headline = ", ".join(filter(None, (what, subject))) + (
        f": {text}" if text and text != what else ""
    )
    return one_line(headline, MAX_HEADLINE_CHARS)


def describe_failure(root: WorkerError) -> str:
    """Return what happened to a process, without the process's name, or "" if it is unknown."""
    text = _describe_failure(root)
    if root.place.engine != OF_LOGS or not text:
        return text
    # an exception's own message may be one sign: "KeyError: 7"
    says_something = root.exception is not None or re.search(r"[^\W_]{2}", text)
    lines = text if says_something else root.message
    return one_line(strip_log_prefixes(lines, root.rank), 2000)


def _describe_failure(root: WorkerError) -> str:
    message = find_message(root)
    if text := "; ".join(filter(None, (message.text, message.wrapper))):
        return text
    if root.subject is Subject.AGENT:
        return extract_sentence(root.message)
    if root.expired is not None:
        where = locate_main_thread(root)
        stage = f": {where.exit_stage}" if where.exit_stage else ""
        return f"{root.expired.text}{f' at {where.frame}' if where.frame else stage}"
    # a process that its agent stopped has the agent's signal, which doesn't explain the fault
    is_stopped = root.sent_signals and not root.crashed_while_stopped
    if (root.signal and not is_stopped) or (root.exit_code is not None and not root.signal):
        return explain_end(root)
    # flytekit's messages begin with ``Trace:``; the sentence follows ``Message:``
    _, separator, tail = root.message.rpartition("\nMessage:")
    text = extract_sentence(tail if separator else root.message)
    if not text.endswith("error="):
        return text
    # flytekit prints torch's box after an empty line; the last line of the box has the exception
    lines = [line.strip() for line in tail.splitlines() if line.strip(" =-")]
    return extract_sentence(lines[-1])


def join_ranks(ranks: Sequence[int], count: int | None = None) -> str:
    """Return "0, 1, 2 and 5 more". `count` is the number of all ranks,
    if `ranks` is only a part of them.
    """
    shown = ranks[:_MAX_RANKS_IN_TEXT]
    more = (len(ranks) if count is None else count) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {more} more" if more > 0 else "")


def find_category(failure: WorkerError) -> str:
    """Return the category in the document, else the category of the exception,
    the signal or the exit code.
    """
    if failure.category:
        return failure.category
    if failure.recoverable and failure.origin is not Origin.SYSTEM:
        return "recoverable"
    if failure.stopped_by_agent:
        return "stopped"
    if find_message(failure).what in _SIGINT_EXITS:
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


_LOG_PREFIX = r"""
  [\[(]? \d{4}[-/]\d\d[-/]\d\d [T_ -] \d\d:\d\d:\d\d [\d.,:]* (?:Z|[+-]\d\d:?\d\d)? [\])]? (?:[ ]?[-|:,])?
| [\[(]? \d\d:\d\d:\d\d (?:[.,]\d+)? [\])]? (?:[ ]?[-|:,])? (?=\s)
| \[? [EWFI]\d{3,4} [ ] \d\d:\d\d:\d\d [\d.]* (?:[ ]+\d+)? [ ]+ [\w./-]+:\d+ \] :?
| \[ [EWFI] [ ] [\w./:-]+ \]
| [EWFI] [ ] (?=\S+\.(?:cc|cpp|cu|h):\d+)
| \[PG[ ][^\]]{0,80}\]
| [\w.-]+:\d+:\d+ [ ] \[\d+\] (?:[ ]\S+\.cc:\d+)? [ ] NCCL [ ] (?:INFO|WARN|ERROR|TRACE)
| \[ (?:default|rank|worker|trainer|proc)? [ ]? \d{1,6} \] :
| \d{1,5} : (?=\s)
| (?:srun|slurmstepd(?:-[\w.-]+)?|mpirun|mpiexec|torchrun|deepspeed) : (?:[ ]error:)?
| \( [A-Za-z_][\w.-]* [ ] pid=\d+ [^)]{0,80} \)
| [\[(]? (?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL) (?:[\])] :? | [ ]?[:|-](?!\w) | (?=[ \t]+[\w./-]+\.py:\d))
| [\[(]? [\w./-]+\.(?:py|cc|cpp|cu|h):\d+ (?::\w+)? [\])]? [ ]* (?:--?|:|\]) (?=[ ])
| [\u2500-\u259f|]+ (?=\s|$)
"""
"""A time, native code, a NCCL group, NCCL, launchers, Ray, levels, places in code, drawings;
in this order.
"""
_OWN_RANK = r"\[Rank (?P<rank>\d{1,6})\]"
_KEY_ECHO = r"^(?:\^[A-Z\\])+(?=\S)"
"""What a terminal prints for a key such as Ctrl-C, before the next output."""
_MAX_PREFIXES = 8
_WORD = r"[^\W_]{2}"


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return (
        re.compile(rf"\s*(?:{pattern})\s*", re.VERBOSE) if "\n" in pattern else re.compile(pattern)
    )


def strip_log_prefixes(text: str, rank: int | None = None) -> str:
    """Return the first informative line of a log's text, without its prefixes and drawings.

    Args:
        text: some lines of a log.
        rank: of the process; its own rank is a prefix, too.
    """
    for line in text.splitlines():
        message = _strip_line(line.strip(), rank)
        if _compile(_WORD).search(message):
            return message
    return text.strip()


def _strip_line(line: str, rank: int | None) -> str:
    line = _compile(_KEY_ECHO).sub("", line)
    for _ in range(_MAX_PREFIXES):
        prefix = _compile(_LOG_PREFIX).match(line)
        own = _compile(_OWN_RANK).match(line) if prefix is None else None
        if own is not None and int(own["rank"]) == rank:
            prefix = own
        if prefix is None or not prefix[0]:
            break
        line = line[prefix.end() :].lstrip()
    return re.sub(r"[\u2500-\u259f]+", "", line).strip(" =*")
