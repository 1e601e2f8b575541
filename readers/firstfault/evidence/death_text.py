"""The part of a dead process's stderr that belongs to its death.

Most of what a process printed has nothing to do with its end: errors that it handled and logged, warnings, a list of
loaded modules. A category may come only from what the end itself wrote.
"""

from __future__ import annotations

import re

__all__ = ["has_native_text", "has_traceback", "last_exception", "text_of_death"]

_NATIVE = re.compile(
    r"""
    \[[EWFI]\d{0,4}(?:\s[\d:.]{0,30})?\s[^\]\s]{0,60}\.(?:cpp|cc|hpp|h|cu):\d+\]   # torch's own log
    |\[(?:PG\s[^\]\n]{0,100}\s)?Rank\s\d+\]\s|\]?:\[[EWF]\d{3,4}\s
    |terminate\ called|^\s*what\(\):|^Exception\ raised\ from|^frame\ \#\d
    |\bNCCL\ (?:WARN|INFO)\b|\bnccl[A-Z]\w{0,30}Error:|^Last\ error:
    |\|CCL_(?:ERROR|WARN)\||\bUCX\s+(?:ERROR|FATAL|WARN)\b|\bFATAL:|^mlx\d|\bNVRM:|^EE?[A-Z0-9]\d{4}:
    |\bAssertion\ [`'].{0,300}\ failed|^[FE]\d{4}\s\d\d:\d\d|\bCheck\ failed:|^\*\*\*\s
    |^(?:malloc|free|realloc)\(\)|^munmap_chunk|^corrupted\s|^double\ free|^Fatal\ glibc|^\*+\s?stack\ smashing
    |^Memory\ access\ fault|^HW\ Exception|^Aborted\b|^Bus\ error
    """,
    re.VERBOSE,
)
"""Found in lines that native code prints, without Python's logging: torch, NCCL and its kin, the C library."""
_DUMP = re.compile(
    r"^(?:Fatal Python error: .*|(?:Current thread|Thread) 0x[0-9a-f]+.*|  File \"[^\"]*\", line \d+ in .*|"
    r"  <no Python frame>|  \.\.\.|Extension modules: .*)$"
)
"""Lines of faulthandler."""
_TRACEBACK = re.compile(r"^(?:.{0,80}?\s)?(?:\[rank\d+\]:\s?)*Traceback \(most recent call last\):")
_RAISED = re.compile(r"(?:\[rank\d+\]:\s?)*(?P<type>[A-Za-z_][\w.]*)(?::\s(?P<message>.*))?$")
"""The line of a traceback that names the exception: it is not indented."""
_RAISED_FROM = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_LINKED_WITHIN = 2
"""Lines before a traceback in which Python says what it follows from."""
_LAST_LINES = 5
"""Of an exit without a traceback."""
_LAST_WORDS = 2
"""Lines before an abort."""


def text_of_death(stderr: str, signal: str) -> str:
    """Return the lines of a process's stderr that belong to its end.

    Args:
        stderr: the end of what it printed.
        signal: the name of the signal that ended it; empty: it exited.
    """
    lines = [line for line in stderr.splitlines() if line.strip() and not _DUMP.match(line)]
    if signal == "SIGKILL":
        return ""  # the kernel ends it between two instructions: it writes nothing
    if signal:
        native = _native(lines)
        # an abort may follow a text of any form; a crash follows what it likes
        last = [line for line in lines[-_LAST_WORDS:] if line not in native] if signal == "SIGABRT" else []
        return "\n".join((*native, *last))
    # an exit: the last traceback with those that it was raised from, and what was printed after it
    begins = [at for at, line in enumerate(lines) if _TRACEBACK.match(line)]
    first = begins.pop() if begins else max(len(lines) - _LAST_LINES, 0)
    while begins and any(_RAISED_FROM.search(line) for line in lines[max(first - _LINKED_WITHIN, 0) : first]):
        first = begins.pop()
    return "\n".join(lines[first:])


def has_traceback(stderr: str) -> bool:
    """Whether a process printed a traceback."""
    return any(map(_TRACEBACK.match, stderr.splitlines()))


def last_exception(stderr: str) -> tuple[str, str]:
    """Return type and message of the last exception whose traceback a process printed; empty if there is none."""
    lines = stderr.splitlines()
    begins = [at for at, line in enumerate(lines) if _TRACEBACK.match(line)]
    for line in lines[begins[-1] + 1 :] if begins else []:
        found = _RAISED.match(line)
        if found:
            return found["type"], found["message"] or ""
    return "", ""


def has_native_text(stderr: str) -> bool:
    """Whether native code printed anything: its reason for an abort, most often."""
    return bool(_native(stderr.splitlines()))


def _native(lines: list[str]) -> list[str]:
    """Return the lines that native code printed, with the indented lines after each."""
    kept: list[str] = []
    continues = False
    for line in lines:
        if _NATIVE.search(line):
            continues = True
        elif not (continues and line[:1].isspace()):
            continues = False
        if continues and line.strip():
            kept.append(line)
    return kept
