"""The part of a dead process's stderr that belongs to its death.

Most of what a process printed has nothing to do with its end: errors that it handled and logged, warnings, a list of
loaded modules. A category may come only from what the end itself wrote.
"""

from __future__ import annotations

import re

from firstfault.text import printable

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
_ONLY_AN_END = re.compile(r"terminate called without an active exception|^Aborted\b")
_DUMP = re.compile(
    r"^(?:Fatal Python error: .*|(?:Current thread|Thread) 0x[0-9a-f]+.*|  File \"[^\"]*\", line \d+ in .*|"
    r"  <no Python frame>|  \.\.\.|Extension modules: .*)$"
)
"""Lines of faulthandler."""
_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?|\[default\d+\]:\s?)+")
_WHAT = re.compile(r"^\s*what\(\):\s*(?P<text>\S.*)$")
_CARRIERS = re.compile(
    r"^\s*(?:what\(\):\s*|\[[EWFI]\d{0,4}(?:\s[\d:.]{0,30})?\s[^\]\s]{0,60}\]\s*|[EWFI]\d{3,4}\s[\d:.]+\s+\S+\s\S+:\d+\]\s*"
    r"|\[(?:PG\s[^\]\n]{0,100}\s)?Rank\s\d+\]\s*|Process group watchdog thread terminated with exception:\s*"
    r"|\S{1,200}\.(?:cuh?|cpp|cc|h(?:pp)?):\d+:[^\n]{0,200}?(?=Assertion )"
    r"|terminate called after throwing an instance of '[^']*'\s*)+"
)
_TRACEBACK = re.compile(r"^(?:.{0,80}?\s)?(?:\[rank\d+\]:\s?)*Traceback \(most recent call last\):")
_RAISED_FROM = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_LINKED_WITHIN = 2
"""Lines before a traceback in which Python tells what it follows from."""
_NOISE = re.compile(
    r"""
    \b\w*Warning:\ |^\s+warnings\.warn\(|\bwarnings\.warn\b|\bWARN(?:ING)?\b|\b(?:INFO|DEBUG|TRACE|NOTICE)\b
    |^\[(?:rank\d+\]:\s?\[)?[WI]\d{0,4}\s|^[WI]\d{4}\s
    |resource_tracker:|\bleaked\ \w+\ objects?\b|was\ not\ called\ before\ program\ exit|nodename\ nor\ servname
    |^Exception\ ignored\ |^\s|^[\W_]*$|\d{1,3}%\|.*\||\bit/s\b|\bs/it\b
    |^(?:Aborted|Killed|Terminated|Segmentation\ fault)\b.{0,30}$|^terminate\ called\b|^Fatal\ Python\ error
    |^(?:OMP:|huggingface/tokenizers:|wandb:|Setting\ OMP_NUM_THREADS|I\ tensorflow|To\ disable\ this\ warning)
    |^\#\d+\s|^frame\ \#\d|\(core\ dumped\)|^Extension\ modules:|^<\w+\ at\ 0x
    """,
    re.VERBOSE,
)
"""Found in lines that do not tell why a process ended: of libraries, progress bars, and of an end itself."""
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


def last_line(stderr: str) -> str:
    """Return the last line that may tell why a process ended; empty if none of the last few lines does.

    Warnings, progress bars and what libraries print at the end do not count.
    """
    lines = [line for line in _without_prefix(stderr) if line.strip() and not _DUMP.match(line)]
    own = (line.strip() for line in reversed(lines[-_LAST_LINES:]) if not _NOISE.search(line))
    return next(own, "")


def thrown(stderr: str) -> str:
    """Return the text of the last C++ exception that ended a process; empty if there is none."""
    found = [match["text"] for line in _without_prefix(stderr) if (match := _WHAT.match(line))]
    return found[-1] if found else ""


def bare_line(line: str) -> str:
    """Return a line without what loggers, NCCL and C++ put before its text."""
    return _CARRIERS.sub("", _PREFIX.sub("", printable(line))).strip()


def _without_prefix(stderr: str) -> list[str]:
    return [_PREFIX.sub("", printable(line)) for line in stderr.splitlines()]


def has_native_text(stderr: str) -> bool:
    """Whether native code printed anything: its reason for an abort, most often."""
    return bool(_native(stderr.splitlines()))


def has_native_reason(stderr: str) -> bool:
    """Whether native code printed why it aborted, not only that it did."""
    return any(not _ONLY_AN_END.search(line) for line in _native(stderr.splitlines()))


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
