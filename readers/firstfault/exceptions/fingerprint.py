"""Fingerprints: equal for the same fault on another rank, host or attempt, different for another fault.

It hashes the first cause of the exception, not its wrapper: its qualified name, the innermost frames by file name and
function (without line numbers, so that an edit above the fault doesn't matter), and the normalized message. An
exception that the process printed before it exited is hashed as one that it raised. Without an exception it hashes the
signal or the exit code, and the last line of an exit. If the agent stopped the process, it adds the stack position, the
last collective of the default process group, and whether its watchdog had timed out, which tell a hung process from
those that waited for it. If a deadline expired, it adds the deadline's name and the stack position. The version is part
of the text, because fingerprints of two versions can't be compared.
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
_DIGITS = 12
_FRAMES = 5
_MESSAGE = 400
"""Characters of the normalized message. It is cut after normalization: long paths and numbers would move the cut."""
_READ = 10 * _MESSAGE
_TIMED_OUT = "operation timeout"
"""What the watchdogs of process groups print."""
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"(?:/[^\s/'\":,)]+){2,}"), "<path>"),
    (re.compile(r"\d+"), "#"),
    (re.compile(r"\s+"), " "),
)


def compute_fingerprint(error: WorkerError) -> str:
    """Return ``"2:<12 hex digits>"`` for a failure; never empty."""
    exception = find_ending_exception(error)
    if exception is not None:
        first = find_first_cause(exception)
        frames = join_frames([*find_causes(exception).wrappers, first])[-_FRAMES:]
        places = [f"{frame.file.rsplit('/', 1)[-1]}:{frame.function}" for frame in frames]
        parts = [first.type, normalized(first.message), *places]
    elif error.signal or error.exit_code is not None:
        parts = [error.subject.value, error.signal, str(error.exit_code), *_of_a_death(error)]
    else:
        parts = [error.subject.value, error.code, normalized(error.message)]
    digest = hashlib.sha256("\x1f".join(parts).encode("utf-8", "replace")).hexdigest()
    return f"{FINGERPRINT_VERSION}:{digest[:_DIGITS]}"


def _of_a_death(error: WorkerError) -> list[str]:
    """Return what tells one death from another with the same signal or exit code."""
    parts = []
    if error.sent_signals:
        parts += ["stopped", locate_main_thread(error).frame]
        for progress in error.collectives:
            if progress.group == DEFAULT_GROUP:
                parts.append(f"{progress.last_operation} {progress.enqueued}")
        parts += ["timed out"] if _TIMED_OUT in error.printed else []
    if error.expired is not None:
        parts += ["expired", error.expired.scope, locate_main_thread(error).frame]
    if (
        error.exit_code
        and not (error.signal or error.sent_signals or error.expired)
        and (line := find_telling_line(error.printed))
    ):
        parts.append(normalized(line))
    return parts


def normalized(message: str) -> str:
    """Return `message` with placeholders for numbers, addresses and paths, which vary between ranks and runs."""
    text = message[:_READ]
    for pattern, replacement in _VARYING:
        text = pattern.sub(replacement, text)
    return text.strip()[:_MESSAGE]
