"""The lines of stderr that are about the end of the process.

Most lines have nothing to do with it: errors that the process handled and logged, warnings, a list
of loaded modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstfault.exceptions.printed_tracebacks import (
    find_chain_spans,
    find_tracebacks,
    strip_rank_prefix,
)
from firstfault.exceptions.texts import PATTERNS

_NCCL_LAST_ERROR = "Last error:"
"""Ends a line of NCCL; the next line has the cause of the error."""
_EXIT_LINES_READ = 5
"""Lines read before an exit without a traceback, not counting advice."""
_ABORT_LINES_READ = 2
"""Lines read before an abort."""


def extract_fatal_text(stderr: str, signal: str) -> str:
    """Return the lines of stderr that belong to a process's end by `signal`; empty: it exited."""
    lines = [
        line
        for line in stderr.splitlines()
        if line.strip() and not PATTERNS["dump_line"].match(line)
    ]
    if signal == "SIGKILL":
        # the kernel kills the process between two instructions, so it prints nothing about that
        return ""
    if signal:
        native = find_native_lines(lines)
        # Before an abort the program may print its reason in any form. A crash comes without
        # warning, so the lines before it are about something else.
        last = (
            [line for line in lines[-_ABORT_LINES_READ:] if line not in native]
            if signal == "SIGABRT"
            else []
        )
        return "\n".join((*native, *last))
    # an exit: the last traceback with its causes, and the lines after it
    bare_lines = [PATTERNS["rank_prefix"].sub("", line) for line in lines]
    chains = find_chain_spans(bare_lines, find_tracebacks(bare_lines))
    if not chains:
        return "\n".join(
            line for line in _extract_exit_lines(bare_lines) if not _is("survival_notice", line)
        )
    return "\n".join(lines[chains[-1][0] :])


def find_telling_line(stderr: str) -> str:
    """Return the last line that may explain why a process ended;
    empty if none of the last few lines does.

    Skips warnings, advice, progress bars, and lines that libraries print at the end.
    """
    plain_lines = map(strip_rank_prefix, stderr.splitlines())
    lines = [line for line in plain_lines if line.strip() and not PATTERNS["dump_line"].match(line)]
    candidates = [
        line.strip() for line in reversed(_extract_exit_lines(lines)) if not _is("noise_line", line)
    ]
    return next(
        (line for line in candidates if not _is("advice_line", line)),
        candidates[0] if candidates else "",
    )


def _extract_exit_lines(lines: Sequence[str]) -> list[str]:
    """Return the last few lines, more if there is advice among them. "Error:" is
    joined with the next line.
    """
    joined: list[str] = []
    # command-line tools end with usage hints, which may push the error out of the last few lines
    for line in (
        PATTERNS["box_sides"].sub("", boxed_line) for boxed_line in lines[-4 * _EXIT_LINES_READ :]
    ):
        if (
            line[:1].isspace()
            and joined
            and joined[-1].endswith(":")
            and not _is("advice_line", joined[-1])
        ):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    telling = [number for number, line in enumerate(joined) if not _is("advice_line", line)][
        -_EXIT_LINES_READ:
    ]
    return joined[min([*telling[:1], max(len(joined) - _EXIT_LINES_READ, 0)]) :]


def _is(name: str, line: str) -> bool:
    """Whether a line fits the pattern with this name."""
    return PATTERNS[name].search(line) is not None


def find_cpp_exception(stderr: str) -> str:
    """Return the text of the last C++ exception that ended a process; empty: there is none."""
    matches = (
        PATTERNS["cpp_what_line"].match(strip_rank_prefix(line))
        for line in reversed(stderr.splitlines())
    )
    return next((match["text"] for match in matches if match), "")


def find_native_lines(lines: list[str]) -> list[str]:
    """Return the lines that native code printed, each with the indented lines after it,
    and NCCL's last error.
    """
    native: list[str] = []
    is_native = False
    for line in lines:
        is_continued = is_native and (line[:1].isspace() or native[-1].endswith(_NCCL_LAST_ERROR))
        is_native = is_continued or PATTERNS["native_line"].search(line) is not None
        if is_native and line.strip():
            native.append(line)
    return native
