"""Fingerprints: equal for the same fault on another rank, host or attempt,
different for another fault.

A fingerprint is a hash of:

- an exception, raised or only printed: the first cause (not its wrappers) with its qualified name,
  its normalized message, and its innermost frames by file name and function. Line numbers would
  change with any edit above the fault.
- a death or an exit: the signal or exit code, and for an exit the last line of stderr.
- a process that its agent stopped: also the stack position, the last collective of the default
  process group, and whether its watchdog had timed out. They separate a hung process from the
  processes that waited for it.
- an expired deadline: also its name and the stack position.

The text of a fingerprint begins with a version, because fingerprints of two versions can't be
compared.
"""

from __future__ import annotations

import hashlib
import re

from firstfault.exceptions.ending_exception import find_ending_exception
from firstfault.exceptions.fatal_text import find_telling_line
from firstfault.exceptions.first_cause import find_causes, find_first_cause, join_frames
from firstfault.exceptions.stack_position import locate_main_thread
from firstfault.model import WorkerError
from firstfault.model.failure import DEFAULT_GROUP

FINGERPRINT_VERSION = 2
_HEX_DIGITS = 12
_FRAMES_HASHED = 5
_MAX_MESSAGE_CHARS = 400
"""Limit of the normalized message. Cutting before the normalization would move the cut with
long paths and numbers.
"""
_MESSAGE_CHARS_READ = 10 * _MAX_MESSAGE_CHARS
_WATCHDOG_TIMEOUT = "operation timeout"
"""Printed by the watchdogs of process groups."""
_PLACEHOLDERS = (
    (re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"(?:/[^\s/'\":,)]+){2,}"), "<path>"),
    (re.compile(r"\d+"), "#"),
    (re.compile(r"\s+"), " "),
)


def compute_fingerprint(error: WorkerError) -> str:
    """Return a failure's fingerprint, ``"2:<12 hex digits>"``; never empty."""
    exception = find_ending_exception(error)
    if exception is not None:
        first = find_first_cause(exception)
        frames = join_frames([*find_causes(exception).wrappers, first])[-_FRAMES_HASHED:]
        places = [f"{frame.file.rsplit('/', 1)[-1]}:{frame.function}" for frame in frames]
        parts = [first.type, normalize_message(first.message), *places]
    elif error.signal or error.exit_code is not None:
        parts = [error.subject.value, error.signal, str(error.exit_code), *_describe_death(error)]
    else:
        parts = [error.subject.value, error.code, normalize_message(error.message)]
    digest = hashlib.sha256("\x1f".join(parts).encode("utf-8", "replace")).hexdigest()
    return f"{FINGERPRINT_VERSION}:{digest[:_HEX_DIGITS]}"


def _describe_death(error: WorkerError) -> list[str]:
    """Return what distinguishes deaths with the same signal or exit code."""
    parts = []
    if error.sent_signals:
        # Rank 3 hung at step 40 while its peers were in the all-reduce of step 41. All of them died
        # of the agent's SIGTERM, but they have different faults.
        parts += ["stopped", locate_main_thread(error).frame]
        for progress in error.collectives:
            if progress.group == DEFAULT_GROUP:
                parts.append(f"{progress.last_operation} {progress.enqueued}")
        parts += ["timed out"] if _WATCHDOG_TIMEOUT in error.printed else []
    if error.expired is not None:
        parts += ["expired", error.expired.scope, locate_main_thread(error).frame]
    is_exit = error.exit_code and not (error.signal or error.sent_signals or error.expired)
    if is_exit and (line := find_telling_line(error.printed)):
        parts.append(normalize_message(line))
    return parts


def normalize_message(message: str) -> str:
    """Return a message with placeholders for numbers, addresses and paths,
    which vary between ranks and runs.
    """
    text = message[:_MESSAGE_CHARS_READ]
    for pattern, replacement in _PLACEHOLDERS:
        text = pattern.sub(replacement, text)
    return text.strip()[:_MAX_MESSAGE_CHARS]
