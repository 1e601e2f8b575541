"""Lines below a completion, and at the end of a process, that report no failure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.completion.words import FAILURE_REPORT, is_below_error, is_continuation
from firstfault_logs.framing.lines import TRACEBACK

if TYPE_CHECKING:
    from firstfault_logs.framing.labels import Label, LogRecord

_INTERPRETER_EXIT = "_run_finalizers | _exit_function | _run_exitfuncs | __del__"
_EXIT_FUNCTION = rf"""
  {_INTERPRETER_EXIT} | \w*shut_?down\w* | \w*tear_?down\w* | \w*clean_?up\w*
| \w*destroy_\w+ | close | finali[sz]e | finish | __exit__
"""
_EXIT_FUNCTION_NAME = LazyPattern(rf"(?i){_EXIT_FUNCTION}")
_INTERPRETER_EXIT_NAME = LazyPattern(_INTERPRETER_EXIT)

# A file that is closed while results are written is part of the work
_SAVING_FUNCTION = LazyPattern(r"(?i)\w*(?:save|checkpoint|state_dict|dump|export|upload)\w*")
_LAST_FRAME = LazyPattern(r"^\s+File[ ]\".*,[ ]in[ ](?P<function>\S+)\s*$")
_TEARDOWN_NOISE = LazyPattern(
    r"""(?i)
            terminate[ ]called | ^\s*what\(\): | \bTCPStore\b | \bc10d\b | \bsocket\b | broken[ ]pipe
          | connection[ ](?:reset|closed|refused) | process[ ]?group | \bNCCL\b | leaked | semaphore
          | resource_tracker | bad[ ]file[ ]descriptor | interpreter[ ]shutdown | ^Exception[ ]ignored
        """
)

# A metric: "class_error: 12.50", "mean error = 0.3"
_MEASURED_ERROR = LazyPattern(
    r"(?i)(?<![a-z])(?:\w+_)?error[ ]{0,2}[:=]?[ ]{0,2}\(?\d{1,9}\.\d{1,9}(?![\w.])"
)

# In a line about an error that the program handled.
HANDLED_ERROR = LazyPattern(r"""(?i)
\b(?:re-?try|again\b|attempt[ ]\d+[ ]?(?:of|/)[ ]?\d|ignor|skipp|recover|continu|keep\b|fall(?:ing)?[ ]?back)
""")

# In a line about an error that matters no more at the end of a program.
SHUTDOWN_NOISE = LazyPattern(
    r"(?i)\b(?:clos(?:e|ing)\b|clean|shut[ ]?down|destroy|leak|tear|at[ ]exit)|\bWarn"
)


def drop_ignored_exceptions(records: Iterable[LogRecord]) -> list[LogRecord]:
    """Return records without tracebacks that ended no process.

    These are exceptions of finalizers ("Exception ignored in") and threads, and exceptions that the
    line above reports as handled.
    """
    kept: list[LogRecord] = []
    announced: set[Label] = set()
    within: set[Label] = set()
    for record in records:
        text, label = record.text, record.label
        if label in within or (TRACEBACK in text and label in announced):
            (within.add if text[:1].isspace() or TRACEBACK in text else within.discard)(label)
            continue
        is_ignored = "Exception ignored " in text or "Exception in thread " in text
        (announced.add if is_ignored or HANDLED_ERROR.search(text) else announced.discard)(label)
        kept += [] if is_ignored else [record]
    return kept


def find_doubts(records: Iterable[LogRecord]) -> list[LogRecord]:
    """Return the records that report a failure,
    apart from noise and from what the program handled.
    """
    reports = (
        record
        for record in drop_below_error(records)
        if FAILURE_REPORT.search(_drop_metrics(record.text))
    )
    return [
        one
        for one in reports
        if not HANDLED_ERROR.search(one.text) and not SHUTDOWN_NOISE.search(one.text)
    ]


def _drop_metrics(text: str) -> str:
    return _MEASURED_ERROR.sub("", text) if "rror" in text else text


def drop_teardown_noise(records: Iterable[LogRecord]) -> list[LogRecord]:
    """Return records without what a program prints while it ends: exceptions of finalizers,
    a store that's gone.
    """
    kept: list[LogRecord] = []
    blocks: dict[Label, list[LogRecord]] = {}
    for record in records:
        block = blocks.get(record.label)
        if TRACEBACK in record.text:
            blocks[record.label] = [record]
        elif block is not None:
            block.append(record)
            if not record.text[:1].isspace():
                frames = [
                    last_frame for one in block if (last_frame := _LAST_FRAME.search(one.text))
                ]
                kept += [] if is_at_exit([frame["function"] for frame in frames]) else block
                del blocks[record.label]
        elif not _TEARDOWN_NOISE.search(record.text) and not is_continuation(record.text):
            kept.append(record)
    kept += itertools.chain.from_iterable(blocks.values())
    return sorted(kept, key=lambda record: record.number)


def is_at_exit(functions: Sequence[str]) -> bool:
    """Whether these functions run when a program ends or gives its resources back,
    none of them to save results.

    Args:
        functions: names of a traceback's functions, the outermost first.
    """
    if any(_INTERPRETER_EXIT_NAME.fullmatch(name) for name in functions):
        return True
    has_exit = any(_EXIT_FUNCTION_NAME.fullmatch(name) for name in functions)
    return has_exit and not any(_SAVING_FUNCTION.fullmatch(name) for name in functions)


def drop_below_error(records: Iterable[LogRecord]) -> list[LogRecord]:
    """Return records without those of a level below error,
    and without the lines that belong to such a message.
    """
    kept: list[LogRecord] = []
    dropped: set[Label] = set()
    for record in records:
        if is_below_error(record.text):
            dropped.add(record.label)
        elif record.label not in dropped or not is_continuation(record.text):
            dropped.discard(record.label)
            kept.append(record)
    return kept
