"""The lines of stderr that are about the end of the process.

Most lines have nothing to do with it: errors that the process handled and logged, warnings, a list
of loaded modules.
"""

from __future__ import annotations

from collections.abc import Sequence

from firstfault.exceptions.printed_tracebacks import (
    RANK_PREFIX,
    find_chain_spans,
    find_tracebacks,
    strip_rank_prefix,
)
from firstfault.utils.lazy_pattern import LazyPattern

_NCCL_LAST_ERROR = "Last error:"
"""Ends a line of NCCL; the next line has the cause of the error."""
_EXIT_LINES_READ = 5
"""Lines read before an exit without a traceback, not counting advice."""
_ABORT_LINES_READ = 2
"""Lines read before an abort."""

# In a line about something that the process survives
_SURVIVAL_NOTICE = LazyPattern(
    r"(?i)\b(?:(?:connect|try)ing[ ]again|(?:re-?try|reconnect|ignor|recover|skipp)ing)\b"
)

# The lines of faulthandler's dump of all threads
_DUMP_LINE = LazyPattern(r"""
  ^(?:
    Fatal[ ]Python[ ]error:[ ].*
    |(?:Current[ ]thread|Thread)[ ]0x[0-9a-f]+.*
    |[ ][ ]File[ ]"[^"]*",[ ]line[ ]\d+[ ]in[ ].*
    |[ ][ ]<no[ ]Python[ ]frame>
    |[ ][ ]\.\.\.
    |Extension[ ]modules:[ ].*
  )$
""")

# In lines that continue the line above, or advise what to try
_ADVICE_LINE = LazyPattern(r"""(?i)
  ^\s
  |^[\W_]*$
  |^[^:]*\b(?:path|options|run):$
  |^(?:set|export)[ ].{0,20}\b(?:env|variable)
  |^(?:for|more)[ ](?:an?[ ])?(?:more|further|full|detail|help|list|info)
  |^(?:note|hint|tip|help|usage|info|suggestion|warning):
  |^try[ ](?:run|us|again|['"`-])
  |^(?:please|did[ ]you[ ]mean)\b
  |^to[ ](?:see|show|get|enable|disable|debug|suppress|silence|avoid|learn)\b
  |^(?:you[ ](?:can|may|should)|if[ ]you)\b
  |^(?:use|pass|run|add|see|check|visit|consider|available|traceback|stack)\b.{0,80}
    (?:--?\w|help|://|docs?\b|detail|documentation|trace|hint|options|commands|issue)
""")


def extract_fatal_text(stderr: str, signal: str) -> str:
    """Return the lines of stderr about a process's death by `signal`, or "" if it exited."""
    lines = [line for line in stderr.splitlines() if line.strip() and not _DUMP_LINE.match(line)]
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
    bare_lines = [RANK_PREFIX.sub("", line) for line in lines]
    chains = find_chain_spans(bare_lines, find_tracebacks(bare_lines))
    if not chains:
        return "\n".join(
            line for line in _extract_exit_lines(bare_lines) if not _SURVIVAL_NOTICE.search(line)
        )
    return "\n".join(lines[chains[-1][0] :])


# In lines that don't explain why a process ended: a library's, a progress bar's, or lines that just
# report the end
_NOISE_LINE = LazyPattern(r"""
  \b\w*Warning:[ ]
  |^\s+warnings\.warn\(
  |\bwarnings\.warn\b
  |\bWARN(?:ING)?\b
  |\b(?:INFO|DEBUG|TRACE|NOTICE)\b
  |^\[(?:rank\d+\]:\s?\[)?[WI]\d{0,4}\s
  |^[WI]\d{4}\s
  |resource_tracker:
  |\bleaked[ ]\w+[ ]objects?\b
  |was[ ]not[ ]called[ ]before[ ]program[ ]exit
  |nodename[ ]nor[ ]servname
  |^Exception[ ]ignored[ ]
  |^\s
  |^[\W_]*$
  |\d{1,3}%\|.*\|
  |\bit/s\b
  |\bs/it\b
  |^(?:Aborted|Killed|Terminated|Segmentation[ ]fault)\b.{0,30}$
  |^terminate[ ]called\b
  |^Fatal[ ]Python[ ]error
  |^\S{0,200}/(?:site|dist)-packages/\S{1,200}\.py:\d+:[ ]
  |\bGLOBAL_RANK:[ ]\d
  |^(?:OMP:|huggingface/tokenizers:|wandb:|Setting[ ]OMP_NUM_THREADS|I[ ]tensorflow|To[ ]disable[ ]this[ ]warning)
  |\bdeprecated\b
  |newly[ ]initialized
  |^There[ ]were[ ](?:missing|unexpected)[ ]keys
  |^\#\d+\s
  |^frame[ ]\#\d
  |\(core[ ]dumped\)
  |^Extension[ ]modules:
  |^<\w+[ ]at[ ]0x
""")


def find_telling_line(stderr: str) -> str:
    """Return the last line that may explain why a process ended;
    empty if none of the last few lines does.

    Skips warnings, advice, progress bars, and lines that libraries print at the end.
    """
    plain_lines = map(strip_rank_prefix, stderr.splitlines())
    lines = [line for line in plain_lines if line.strip() and not _DUMP_LINE.match(line)]
    candidates = [
        line.strip()
        for line in reversed(_extract_exit_lines(lines))
        if not _NOISE_LINE.search(line)
    ]
    return next(
        (line for line in candidates if not _ADVICE_LINE.search(line)),
        candidates[0] if candidates else "",
    )


_BOX_SIDES = LazyPattern(r"^[╭╰┌└│┃]─*[ ]?|\s*─*[╮╯┐┘│┃]$")


def _extract_exit_lines(lines: Sequence[str]) -> list[str]:
    """Return the last few lines, more if there is advice among them. "Error:" is
    joined with the next line.
    """
    joined: list[str] = []
    # command-line tools end with usage hints, which may push the error out of the last few lines
    for line in (_BOX_SIDES.sub("", boxed_line) for boxed_line in lines[-4 * _EXIT_LINES_READ :]):
        if (
            line[:1].isspace()
            and joined
            and joined[-1].endswith(":")
            and not _ADVICE_LINE.search(joined[-1])
        ):
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    telling = [number for number, line in enumerate(joined) if not _ADVICE_LINE.search(line)][
        -_EXIT_LINES_READ:
    ]
    return joined[min([*telling[:1], max(len(joined) - _EXIT_LINES_READ, 0)]) :]


_CPP_WHAT_LINE = LazyPattern(r"^\s*what\(\):\s*(?P<text>\S.*)$")


def find_cpp_exception(stderr: str) -> str:
    """Return the text of the last C++ exception that ended a process, or "" if there is none."""
    matches = (
        _CPP_WHAT_LINE.match(strip_rank_prefix(line)) for line in reversed(stderr.splitlines())
    )
    return next((match["text"] for match in matches if match), "")


# In lines about an end by a signal, printed by native code: torch, NCCL and similar libraries, the
# C library
_NATIVE_LINE = LazyPattern(r"""
  \[[EWFI]\d{0,4}(?:\s[\d:.]{0,30})?\s[^\]\s]{0,60}\.(?:cpp|cc|hpp|h|cu):\d+\]   # torch's own log
  |\[(?:PG\s[^\]\n]{0,100}\s)?Rank\s\d+\]\s
  |\]?:\[[EWF]\d{3,4}\s
  |terminate[ ]called
  |^\s*what\(\):
  |^Exception[ ]raised[ ]from
  |^frame[ ]\#\d
  |\bNCCL[ ](?:WARN|INFO)\b
  |\bnccl[A-Z]\w{0,30}Error:
  |^Last[ ]error:
  |\|CCL_(?:ERROR|WARN)\|
  |\bUCX\s+(?:ERROR|FATAL|WARN)\b
  |\bFATAL:
  |^mlx\d
  |\bNVRM:
  |^EE?[A-Z0-9]\d{4}:
  |\bAssertion[ ][`'].{0,300}[ ]failed
  |^[FE]\d{4}\s\d\d:\d\d
  |\bCheck[ ]failed:
  |^\*\*\*\s
  |^(?:malloc|free|realloc)\(\)
  |^munmap_chunk
  |^corrupted\s
  |^double[ ]free
  |^Fatal[ ]glibc
  |^\*+\s?stack[ ]smashing
  |^Memory[ ]access[ ]fault
  |^HW[ ]Exception
  |^Aborted\b
  |^Bus[ ]error
  |\bin-process[ ]restart:[ ]this[ ]rank[ ]is[ ]still[ ]at[ ]   # firstfault's own, before it ends a rank
""")


def find_native_lines(lines: list[str]) -> list[str]:
    """Return the lines that native code printed, each with the indented lines after it,
    and NCCL's last error.
    """
    native: list[str] = []
    is_native = False
    for line in lines:
        is_continued = is_native and (line[:1].isspace() or native[-1].endswith(_NCCL_LAST_ERROR))
        is_native = is_continued or _NATIVE_LINE.search(line) is not None
        if is_native and line.strip():
            native.append(line)
    return native
