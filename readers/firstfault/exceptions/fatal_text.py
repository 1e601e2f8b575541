"""The lines of stderr that are about the end of the process."""

from __future__ import annotations

import re
from collections.abc import Sequence

from firstfault.exceptions.printed_tracebacks import find_chain_spans, find_tracebacks
from firstfault.exceptions.stderr_lines import RANK_PREFIX, strip_rank_prefix

_LIVES_ON = re.compile(r"\b(?:(?:connect|try)ing again|(?:re-?try|reconnect|ignor|recover|skipp)ing)\b", re.IGNORECASE)
"""Found in a line about something that the process survives."""
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
    |\bin-process\ restart:\ this\ rank\ is\ still\ at\   # firstfault's own, before it ends a rank
    """,
    re.VERBOSE,
)
"""Found in lines that tell of an end by a signal. Native code prints them: torch, NCCL and its kin, the C library."""
_LAST_ERROR = "Last error:"
"""NCCL prints the cause of an error in the line after this one."""
_DUMP = re.compile(
    r"^(?:Fatal Python error: .*|(?:Current thread|Thread) 0x[0-9a-f]+.*|  File \"[^\"]*\", line \d+ in .*|"
    r"  <no Python frame>|  \.\.\.|Extension modules: .*)$"
)
"""Lines of faulthandler."""
_WHAT = re.compile(r"^\s*what\(\):\s*(?P<text>\S.*)$")
_NOISE = re.compile(
    r"""
    \b\w*Warning:\ |^\s+warnings\.warn\(|\bwarnings\.warn\b|\bWARN(?:ING)?\b|\b(?:INFO|DEBUG|TRACE|NOTICE)\b
    |^\[(?:rank\d+\]:\s?\[)?[WI]\d{0,4}\s|^[WI]\d{4}\s
    |resource_tracker:|\bleaked\ \w+\ objects?\b|was\ not\ called\ before\ program\ exit|nodename\ nor\ servname
    |^Exception\ ignored\ |^\s|^[\W_]*$|\d{1,3}%\|.*\||\bit/s\b|\bs/it\b
    |^(?:Aborted|Killed|Terminated|Segmentation\ fault)\b.{0,30}$|^terminate\ called\b|^Fatal\ Python\ error
    |^\S{0,200}/(?:site|dist)-packages/\S{1,200}\.py:\d+:\ |\bGLOBAL_RANK:\ \d
    |^(?:OMP:|huggingface/tokenizers:|wandb:|Setting\ OMP_NUM_THREADS|I\ tensorflow|To\ disable\ this\ warning)
    |\bdeprecated\b|newly\ initialized|^There\ were\ (?:missing|unexpected)\ keys
    |^\#\d+\s|^frame\ \#\d|\(core\ dumped\)|^Extension\ modules:|^<\w+\ at\ 0x
    """,
    re.VERBOSE,
)
"""Found in lines that don't tell why a process ended: of libraries, progress bars, and of an end itself."""
_ASIDE = re.compile(
    r"""(?xi)
    ^\s|^[\W_]*$|^[^:]*\b(?:path|options|run):$
    |^(?:set|export)\ .{0,20}\b(?:env|variable)|^(?:for|more)\ (?:an?\ )?(?:more|further|full|detail|help|list|info)
    |^(?:note|hint|tip|help|usage|info|suggestion|warning):|^try\ (?:run|us|again|['"`-])|^(?:please|did\ you\ mean)\b
    |^to\ (?:see|show|get|enable|disable|debug|suppress|silence|avoid|learn)\b|^(?:you\ (?:can|may|should)|if\ you)\b
    |^(?:use|pass|run|add|see|check|visit|consider|available|traceback|stack)\b.{0,80}(?:--?\w|help|://|docs?\b|detail
      |documentation|trace|hint|options|commands|issue)
    """
)
"""Found in lines that continue the one above, or tell what to try, and don't tell what failed."""
_SIDES = re.compile(r"^[╭╰┌└│┃]─* ?|\s*─*[╮╯┐┘│┃]$")
"""Of a box around an error, as click's and tyro's."""
_LAST_LINES = 5
"""Of an exit without a traceback, besides those that tell what to try."""
_LAST_WORDS = 2
"""Lines before an abort."""


def extract_fatal_text(stderr: str, signal: str) -> str:
    """Return the lines of a process's stderr that belong to its end by `signal`; if that is empty, it exited."""
    lines = [line for line in stderr.splitlines() if line.strip() and not _DUMP.match(line)]
    if signal == "SIGKILL":
        return ""  # the kernel ends it between two instructions: it writes nothing
    if signal:
        native = find_native_lines(lines)
        # an abort may follow a text of any form; a crash follows what it likes
        last = [line for line in lines[-_LAST_WORDS:] if line not in native] if signal == "SIGABRT" else []
        return "\n".join((*native, *last))
    # an exit: the last traceback with those that it was raised from, and what was printed after it
    bare = [RANK_PREFIX.sub("", line) for line in lines]
    chains = find_chain_spans(bare, find_tracebacks(bare))
    if not chains:
        return "\n".join(line for line in _last_lines(bare) if not _LIVES_ON.search(line))
    return "\n".join(lines[chains[-1][0] :])


def find_telling_line(stderr: str) -> str:
    """Return the last line that may tell why a process ended; empty if none of the last few lines does.

    Warnings, advice, progress bars and what libraries print at the end don't count.
    """
    lines = [line for line in map(strip_rank_prefix, stderr.splitlines()) if line.strip() and not _DUMP.match(line)]
    own = [line.strip() for line in reversed(_last_lines(lines)) if not _NOISE.search(line)]
    return next((line for line in own if not _ASIDE.search(line)), own[0] if own else "")


def _last_lines(lines: Sequence[str]) -> list[str]:
    """Return the end of a text, from the first of the last few lines that tell something."""
    found: list[str] = []
    for line in (_SIDES.sub("", whole) for whole in lines[-4 * _LAST_LINES :]):
        if line[:1].isspace() and found and found[-1].endswith(":") and not _ASIDE.search(found[-1]):
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    telling = [at for at, line in enumerate(found) if not _ASIDE.search(line)][-_LAST_LINES:]
    return found[min([*telling[:1], max(len(found) - _LAST_LINES, 0)]) :]


def find_cpp_exception(stderr: str) -> str:
    """Return the text of the last C++ exception that ended a process; empty if there is none."""
    found = (_WHAT.match(strip_rank_prefix(line)) for line in reversed(stderr.splitlines()))
    return next((match["text"] for match in found if match), "")


def find_native_lines(lines: list[str]) -> list[str]:
    """Return the lines that native code printed, with the indented lines after each and NCCL's last error."""
    kept: list[str] = []
    continues = False
    for line in lines:
        if _NATIVE.search(line):
            continues = True
        elif not (continues and (line[:1].isspace() or kept[-1].endswith(_LAST_ERROR))):
            continues = False
        if continues and line.strip():
            kept.append(line)
    return kept
