"""What a process printed to stderr: the part that belongs to its death, and the last exception.

Most lines of a process have nothing to do with its end: errors that it handled and logged, warnings, a list of
loaded modules. A category may come only from lines about the end itself. Tracebacks are read as Python prints them, and
in the forms of rich and loguru.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from firstfault.exceptions.stack_position import PROGRAM_ENDED, frames_of_crash, is_of_a_group, where_it_stood
from firstfault.exceptions.tracebacks import RAISED, all_links, block_of, causes_of, original_of, short_name
from firstfault.model import ExceptionInfo, FrameInfo, Subject, WorkerError
from firstfault.model.failure import signal_of_exit_code
from firstfault.utils.text import printable

_PREFIX = re.compile(r"^(?:\[?(?:rank|default|local_rank)[ _]?\d+\]?:\s?|\d{1,5}: (?=\s|\w))+")
"""What torch, its launcher and srun put before each line."""
_TRACEBACK = "Traceback (most recent call last)"
_TRIES = 2
_BEGINS = re.compile(
    r"^(?P<gutter>[ |]*)(?P<group>\+ Exception Group )?(?P<above>.{0,80}?\s)?Traceback \(most recent call last\):\s*$"
)
_BOX = re.compile(r"^\s*[╭┌+][─-]+ ?Traceback \(most recent call last\) ?[─-]+[╮┐+]\s*$")
_BOX_ENDS = re.compile(r"^\s*[╰└+][─-]{10,}[╯┘+]\s*$")
_BOX_FRAME = re.compile(r"^(?P<file>.+?):(?P<line>\d{1,9}) in (?P<function>.+)$")
_BOX_CODE = re.compile(r"^❱ ?\s*(?P<line>\d{1,9}) [│|]?(?P<code>.*)$")
_LINK = re.compile(
    r"^\s*(?:(?P<cause>The above exception was the direct cause)|During handling of the above exception, another )"
)
_MEMBER = re.compile(r"^\s*\+?-?\+-+ \d+ -+\s*$")
_BORDER = re.compile(r"^\s*[+-]{9,}\s*$")
_INDENT = 2
"""Of a member, in the text of its group."""
_OF_GROUP = re.compile(r"^\s*(?:[|+] ?)?")
_NOT_A_DEATH = re.compile(
    r"^(?:Exception ignored |--- Logging error ---)"
    r"|\b(?:re-?try(?:ing)?|retried|ignor(?:ed|ing)|recover(?:ed|ing)|skipp(?:ed|ing))\b(?!\s*=)",
    re.IGNORECASE,
)
"""Found in the line above the traceback of an exception that did not end its process."""
_LIVES_ON = re.compile(r"\b(?:(?:connect|try)ing again|(?:re-?try|reconnect|ignor|recover|skipp)ing)\b", re.IGNORECASE)
"""Found in a line about something that the process survives."""
_WARNS = re.compile(r"\bWARN(?:ING)?\b")
"""Found there, too; but such a line may also be about something else, if the process printed nothing more."""
_OF_WARNINGS = re.compile(r"^\s|^\S+:\d+: \w*Warning: ")
"""Lines of Python's warnings; the second one is indented source. They are not about a traceback below."""
_NEXT = re.compile(
    r"^(?:Exception ignored |--- Logging|Traceback \(|\[[EWFI]\d|\[rank\d|terminate called|Fatal Python error)"
    r"|^\S+:\d+: \w*Warning: "
    r"|^[\[(]?\d{4}-\d\d-\d\d[ T]\d\d:\d\d|\b(?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\b *[:|\]-]"
)
"""A line that cannot belong to the message of the exception before it."""
_FATAL = re.compile(r"\b(?:fatal|critical|panic|abort\w*|giving up)\b", re.IGNORECASE)
TRIES_FAILED = re.compile(
    r"(?i)^(?:.{1,80}: )?(?:(?:the )?\w+(?: \d+)? failed(?: after)?|(?:it )?(?:gave|giving) up after|all) "
    r"\d+ (?:times|attempts|tries|retries)(?: failed)?[.!]?$"
)
"""Tells that something failed several times, and not why."""
_SECOND_TRY = "trying to initialize the default process group twice"
"""What torch raises if a program tries again after an error that left the process group behind."""
_PYTHONS = re.compile(
    r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Iteration|Timeout))(?::\s(?P<message>.*))?$"
)
_AT = re.compile(r"^\s{1,8}(?P<file>/[^\n()]{1,300})\((?P<line>\d{1,9})\): (?P<function>\S{1,200})$", re.MULTILINE)
"""A frame as pybind11 prints it, the innermost first."""
_READ = 32 * 1024
"""Characters of the end of what a process printed that are read."""
_TRIED = 64
"""Tracebacks that are looked at, from the last one back."""
_LATER = 10
"""Lines after a traceback that show that its process lived on."""
_MAX_HEAD = 1000
"""Characters of a path that rich wrapped."""
_WITHIN = 4
"""Lines between the tracebacks of a chain."""
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
_ONLY_AN_END = re.compile(r"terminate called without an active exception|^Aborted\b")
_DUMP = re.compile(
    r"^(?:Fatal Python error: .*|(?:Current thread|Thread) 0x[0-9a-f]+.*|  File \"[^\"]*\", line \d+ in .*|"
    r"  <no Python frame>|  \.\.\.|Extension modules: .*)$"
)
"""Lines of faulthandler."""
_WHAT = re.compile(r"^\s*what\(\):\s*(?P<text>\S.*)$")
_CARRIERS = re.compile(
    r"^\s*(?:what\(\):\s*|\[[EWFI]\d{0,4}(?:\s[\d:.]{0,30})?\s[^\]\s]{0,60}\]\s*|[EWFI]\d{3,4}\s[\d:.]+\s+\S+\s\S+:\d+\]\s*"
    r"|\[(?:PG\s[^\]\n]{0,100}\s)?Rank\s\d+\]\s*|Process group watchdog thread terminated with exception:\s*"
    r"|\S{1,200}\.(?:cuh?|cpp|cc|h(?:pp)?):\d+:[^\n]{0,200}?(?=Assertion )"
    r"|terminate called after throwing an instance of '[^']*'\s*"
    r"|(?:/\S{0,200}/)?python[\d.]*: (?=can't |Error while finding |No module named ))+"
)
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
"""Found in lines that do not tell why a process ended: of libraries, progress bars, and of an end itself."""
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
"""Found in lines that continue the one above, or tell what to try, and do not tell what failed."""
_SIDES = re.compile(r"^[╭╰┌└│┃]─* ?|\s*─*[╮╯┐┘│┃]$")
"""Of a box around an error, as click's and tyro's."""
_LAST_LINES = 5
"""Of an exit without a traceback, besides those that tell what to try."""
_LAST_WORDS = 2
"""Lines before an abort."""


# --- what belongs to a death ----------------------------------------------------------------------------------------


def text_of_death(stderr: str, signal: str) -> str:
    """Return the lines of a process's stderr that belong to its end by `signal`; if that is empty, it exited."""
    lines = [line for line in stderr.splitlines() if line.strip() and not _DUMP.match(line)]
    if signal == "SIGKILL":
        return ""  # the kernel ends it between two instructions: it writes nothing
    if signal:
        native = native_lines(lines)
        # an abort may follow a text of any form; a crash follows what it likes
        last = [line for line in lines[-_LAST_WORDS:] if line not in native] if signal == "SIGABRT" else []
        return "\n".join((*native, *last))
    # an exit: the last traceback with those that it was raised from, and what was printed after it
    bare = [_PREFIX.sub("", line) for line in lines]
    chains = _spans(bare, _tracebacks(bare))
    if not chains:
        return "\n".join(line for line in _last_lines(bare) if not _LIVES_ON.search(line))
    return "\n".join(lines[chains[-1][0] :])


def last_line(stderr: str) -> str:
    """Return the last line that may tell why a process ended; empty if none of the last few lines does.

    Warnings, advice, progress bars and what libraries print at the end do not count.
    """
    lines = [line for line in map(_bare, stderr.splitlines()) if line.strip() and not _DUMP.match(line)]
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


def thrown(stderr: str) -> str:
    """Return the text of the last C++ exception that ended a process; empty if there is none."""
    found = (_WHAT.match(_bare(line)) for line in reversed(stderr.splitlines()))
    return next((match["text"] for match in found if match), "")


def bare_line(line: str) -> str:
    """Return a line without what loggers, NCCL, C++ and Python's interpreter put before its text."""
    return _CARRIERS.sub("", _bare(line)).strip()


def _bare(line: str) -> str:
    return _PREFIX.sub("", printable(line))


def native_lines(lines: list[str]) -> list[str]:
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


# --- the last exception ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Printed:
    """An exception whose traceback a process printed."""

    exception: ExceptionInfo
    after: tuple[str, ...]
    """The lines that were printed after it, and are not part of its message."""


def exception_of(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception that ended a process: the one that it raised, else the last one that it printed.

    What it printed counts for an exit without a reason, for an abort without native code's own reason, for a program
    that had ended and whose process was stopped before it left a document, and for a second try that failed only
    because the first one had left its process group, or the step that its peers were at.
    """
    raised = failure.exception
    if raised is not None and is_second_try(raised):
        return _with_first_try(raised, _plain(failure.printed[-_READ:]))
    if (first := first_try(failure)) is not None:
        cause = replace(first, relation="context", causes=())
        return first if raised is None else replace(raised, causes=(*raised.causes, cause, *first.causes))
    if raised is not None and short_name(causes_of(raised).first) != "SystemExit":
        return raised
    if raised is None and failure.stopped_by_agent:
        has_ended = _TRACEBACK in failure.printed and where_it_stood(failure).returned == PROGRAM_ENDED
        return getattr(last_printed(failure.printed), "exception", None) if has_ended else None
    return _before_end(failure)


def _before_end(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception that a process printed before an exit or an abort that gives no reason, else its own."""
    raised = failure.exception
    if failure.sent_signals or failure.expired is not None or failure.subject is Subject.AGENT:
        return raised
    signal = failure.signal or signal_of_exit_code(failure.exit_code)
    # a program that is a worker does not know its own exit code
    code = (raised.message if raised is not None else "") or str(failure.exit_code)
    if signal != "SIGABRT" if signal else not code.lstrip("-").isdigit() or code == "0":
        return raised
    if signal and (hooked := _thrown_exception(failure.printed)):
        return hooked
    # native code printed why it aborted, not only that it did
    if signal and any(not _ONLY_AN_END.search(line) for line in native_lines(failure.printed.splitlines())):
        return raised
    printed = last_printed(failure.printed)
    if printed is None or (signal and _is_aborted_elsewhere(failure, printed.exception)):
        return raised
    # lines without a level or a date cannot be told from the exception's message
    more = [line for line in printed.exception.message.splitlines()[1:] if line and not line[0].isspace()]
    if len(more) + len(printed.after) > _LATER:
        return raised  # it printed so much later that it cannot have ended because of the exception
    # `sys.exit` outside of a handler: the program had dealt with the exception, and may tell why it ends
    later = (*printed.exception.message.splitlines()[1:], *printed.after)
    is_dealt_with = raised is not None and any(map(_FATAL.search, later))
    return raised if is_dealt_with else printed.exception


def _is_aborted_elsewhere(failure: WorkerError, exception: ExceptionInfo) -> bool:
    """Whether Python was in another function, when the process aborted, than the one that printed the exception."""
    called = {(frame.file, frame.function) for frame in frames_of_crash(failure)}
    return bool(called and exception.frames) and (exception.frames[0].file, exception.frames[0].function) not in called


def _thrown_exception(stderr: str) -> ExceptionInfo | None:
    """Return a Python exception that C++ could not handle, as one of an autograd hook; None: it had another reason."""
    match = _PYTHONS.match(thrown(stderr))
    if match is None:
        return None
    frames = [FrameInfo(found["file"], int(found["line"]), found["function"]) for found in _AT.finditer(stderr)]
    return ExceptionInfo(match["type"], match["message"] or "", frames=tuple(reversed(frames)))


@lru_cache(maxsize=256)
def last_printed(stderr: str) -> Printed | None:
    """Return the last exception that a process printed, with those that it was raised from; None if there is none.

    Exceptions that Python ignored, that logging could not write, or that the program reports as survived, do not count.
    """
    lines = _plain(stderr[-_READ:])
    for first, found in _chains(lines, [at for at in _tracebacks(lines) if not _is_handled(lines, at, _NOT_A_DEATH)]):
        if any(map(str.strip, found.after)) and _is_handled(lines, first, _WARNS):
            continue
        is_second = is_second_try(found.exception)
        return replace(found, exception=_with_first_try(found.exception, lines[:first])) if is_second else found
    return None


def first_try(failure: WorkerError) -> ExceptionInfo | None:
    """Return the exception with which a step failed first, if it was tried again and then failed in a collective.

    The process had printed it, from the same line of its own code. None: no step was tried again, the first try failed
    in a collective, too, or it is not known; if the program raised that it gave up, such a first try counts, too.
    """
    if failure.subject is Subject.AGENT or _TRACEBACK not in failure.printed:
        return None
    raised, text = failure.exception, failure.printed[-_READ:]
    if raised is not None and (tried := _before_giving_up(raised, text)) is not None:
        return tried
    is_exit = raised is not None and short_name(causes_of(raised).first) == "SystemExit"
    again = None if is_exit else raised
    # without an exception of its own it has printed those of two tries at least
    if not _waits(again) if again is not None else text.count(_TRACEBACK) < _TRIES or not is_of_a_group(text):
        return None
    lines, spans = _read(text)
    if again is None:
        printed = (_parsed(lines, *span) for span in reversed(spans))
        again = next((found.exception for found in printed if found is not None and _waits(found.exception)), None)
    frames = (frame for link in all_links(again) for frame in link.frames) if again is not None else ()
    calls = {f'File "{frame.file}", line {frame.line}, in {frame.function}' for frame in frames}
    same = (span for span in spans if "".join(lines[span[1] + 1 : span[1] + 2]).lstrip(" |") in calls)
    found = next((_parsed(lines, *span) for span in same), None)
    return None if found is None or _waits(found.exception) else found.exception


def _before_giving_up(raised: ExceptionInfo, text: str) -> ExceptionInfo | None:
    """Return the exception of a first try, if all that a program printed last are tries of the function that raised."""
    at = raised.frames[-1] if raised.frames and not raised.causes else None
    if at is None or not at.code.startswith("raise") or _TRACEBACK not in text:
        return None
    lines, spans = _read(text)
    parsed = ((lines[span[1] + 1].strip(" |"), _parsed(lines, *span)) for span in spans if span[1] + 1 < len(lines))
    printed = [(call, found) for call, found in parsed if found and found.exception.message != raised.message]
    call = printed[-1][0] if printed else ""
    tries = [found for _, found in itertools.takewhile(lambda item: item[0] == call, reversed(printed))]
    is_same = call.startswith(f'File "{at.file}", line ') and call.endswith(f", in {at.function}")
    if not is_same or len(tries) < (1 if TRIES_FAILED.match(raised.message) else _TRIES):
        return None
    later = (*tries[0].exception.message.splitlines()[1:], *tries[0].after)
    return tries[-1].exception if sum(not line[:1].isspace() for line in later) <= _LATER else None


@lru_cache(maxsize=256)
def _read(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    lines = _plain(text)
    return lines, _spans(lines, _tracebacks(lines))


def _waits(exception: ExceptionInfo) -> bool:
    """Whether an exception comes out of a collective."""
    return any(is_of_a_group(frame.file) for link in causes_of(exception).told for frame in link.frames)


def _tracebacks(lines: Sequence[str]) -> list[int]:
    """Return where tracebacks begin; that of a member of a group is read with its group."""
    return [at for at, line in enumerate(lines) if (match := _BEGINS.match(line)) and "|" not in match["gutter"]]


def is_second_try(exception: ExceptionInfo) -> bool:
    """Whether an exception only tells that a program tried again, with the process group of its first try."""
    return _SECOND_TRY in causes_of(exception).first.message


def _with_first_try(exception: ExceptionInfo, lines: Sequence[str]) -> ExceptionInfo:
    """Return the exception of a second try with the last one printed before it, handled or not, as its cause."""
    cut = itertools.takewhile(lambda line: not line or line[0].isspace(), lines)
    if any(line.lstrip().startswith('File "') for line in cut):  # the lines begin within a traceback
        lines = ["Traceback (most recent call last):", *lines]
    for _, found in _chains(lines, _tracebacks(lines)):
        if not is_second_try(found.exception):
            cause = replace(found.exception, relation="context", causes=())
            return replace(exception, causes=(*exception.causes, cause, *found.exception.causes))
    return exception


def _is_handled(lines: Sequence[str], at: int, tells: re.Pattern[str]) -> bool:
    """Whether the line above a traceback tells that its exception did not end the process."""
    above = next((line for line in reversed(lines[max(at - 2, 0) : at]) if line.strip()), "")
    return tells.search(above) is not None and not _OF_WARNINGS.match(above)


def _chains(lines: Sequence[str], begins: list[int]) -> Iterator[tuple[int, Printed]]:
    """Yield where chains of tracebacks begin, and their exceptions, from the last one back."""
    for first, last in reversed(_spans(lines, begins)):
        if (found := _parsed(lines, first, last)) is not None:
            yield first, found


def _spans(lines: Sequence[str], begins: list[int]) -> list[tuple[int, int]]:
    """Return where the first and the last traceback of each chain begin."""
    spans: list[tuple[int, int]] = []
    for at in begins[-_TRIED:]:
        if spans and any(map(_LINK.match, lines[max(at - _WITHIN, 0) : at])):
            spans[-1] = (spans[-1][0], at)
        else:
            spans.append((at, at))
    return spans


def _parsed(lines: Sequence[str], first: int, last: int) -> Printed | None:
    links: list[ExceptionInfo] = []
    after: Sequence[str] = ()
    at = first
    while at <= last:
        ends = range(at + 1, len(lines)) if at < last else ()
        end = next((number for number in ends if _LINK.match(lines[number])), len(lines))
        link, after = _one(lines[at:end])
        if link is None:
            return None
        between = _LINK.match(lines[end]) if end < len(lines) else None
        # the relation of a link is to the one that was raised after it
        links.insert(0, replace(link, relation="cause" if between is not None and between["cause"] else "context"))
        at = next((number for number in range(end, last + 1) if _BEGINS.match(lines[number])), last + 1)
    return Printed(replace(links[0], relation="", causes=tuple(links[1:])), tuple(after))


def _one(lines: Sequence[str]) -> tuple[ExceptionInfo | None, Sequence[str]]:
    """Return the exception of one traceback, or of a group, and the lines after it."""
    match = _BEGINS.match(lines[0])
    if match is not None and match["group"]:
        return _group(lines, len(match["gutter"]))
    raised = next((at for at, line in enumerate(lines[1:], 1) if line.strip() and not line[:1].isspace()), len(lines))
    end = next((at for at in range(raised + 1, len(lines)) if _NEXT.search(lines[at])), len(lines))
    found = block_of("\n".join(lines[1:end]))
    if found is None and raised < end and (named := RAISED.match(lines[raised])):
        found = ExceptionInfo(named["type"], named["message"] or "")  # its frames are missing
    return found, lines[end:]


def _group(lines: Sequence[str], indent: int) -> tuple[ExceptionInfo | None, Sequence[str]]:
    end = next((at for at, line in enumerate(lines[1:], 1) if not line.startswith((" ", "|", "+"))), len(lines))
    inner = [_OF_GROUP.sub("", line[indent:], count=1) if line.strip() else "" for line in lines[1:end]]
    borders = [
        at for at, line in enumerate(lines[1:end]) if _MEMBER.match(line) and _indent_of(line) <= indent + _INDENT
    ]
    own = block_of("\n".join(inner[: borders[0]] if borders else inner))
    if own is None:
        return None, lines[end:]
    members = []
    for border, until in itertools.pairwise([*borders, len(inner)]):
        body = [_OF_GROUP.sub("", line[indent + _INDENT :], count=1) for line in lines[border + 2 : until + 1]]
        found = last_printed("\n".join(line for line in body if not _BORDER.match(line)))
        if found is not None:
            members.append(found.exception)
    return replace(own, members=tuple(members)), lines[end:]


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def _plain(stderr: str) -> list[str]:
    """Return the lines as Python prints tracebacks: without colours, prefixes, boxes and the marks of loguru."""
    found: list[str] = []
    in_box, indent, head = False, 0, ""
    for whole in stderr.splitlines():
        line = _bare(whole)
        indent = indent if line[:indent].isspace() or not line.strip() else 0
        line = line[indent:]
        if _BOX.match(line):
            in_box, indent = True, indent or _indent_of(line)
            found.append("Traceback (most recent call last):")
        elif in_box and _BOX_ENDS.match(line):
            in_box = False
        elif in_box:
            head, texts = _of_box(head, line)
            found += texts
        else:
            found.append(f"  {line[2:]}" if line.startswith("> File ") else line)
    return found


def _of_box(head: str, line: str) -> tuple[str, list[str]]:
    """Return the line of a frame as far as it is known, which rich may wrap, and the lines that Python prints."""
    text = line.strip().rstrip("│|").rstrip()
    text = text[2:] if text.startswith(("│ ", "| ")) else ""
    if code := _BOX_CODE.match(text):
        return "", [f"    {code['code'].strip()}"]
    if not text or text[0].isspace():
        return "", []
    # rich wraps a long frame before or after its "in", or within the path
    head += f" {text}" if head.endswith(" in") or text.startswith("in ") else text
    frame = _BOX_FRAME.match(head)
    if frame is None:
        return head[:_MAX_HEAD], []
    return "", [f'  File "{frame["file"]}", line {frame["line"]}, in {frame["function"]}']


# --- without what a document has already -----------------------------------------------------------------------------


def without_traceback(text: str, exception: ExceptionInfo) -> str:
    """Return what a process printed, without the tracebacks of `exception` and of what it was raised from.

    Lines before and after them stay, and so do the tracebacks of other exceptions. The text may begin in the middle of
    a traceback.
    """
    lines = text.splitlines()
    bare = [_PREFIX.sub("", line) for line in lines]
    chain = [one for link in all_links(exception) for one in (link, original_of(link))]
    names = {short_name(link) for link in chain}
    first = {line for link in chain for line in link.message.splitlines()[:1]} | {""}
    said = {line.strip() for link in chain for line in (*link.message.splitlines(), *link.notes)} | {""}
    kept: list[str] = []
    at = 0
    while at < len(lines):
        end, raised = _block(bare, at)
        if any(match["type"].rsplit(".", 1)[-1] in names and (match["message"] or "") in first for match in raised):
            end += sum(
                1 for _ in itertools.takewhile(lambda line: line.strip() in said or _LINK.match(line), bare[end:])
            )
        else:
            end = max(end, at + 1)
            kept += lines[at:end]
        at = end
    return "\n".join(kept).strip("\n")


def _block(lines: Sequence[str], begin: int) -> tuple[int, list[re.Match[str]]]:
    """Return where the traceback at a line ends, and the lines that name its exceptions; none if there is none."""
    match = _BEGINS.match(lines[begin])
    is_cut = begin == 0 and lines[0][:1].isspace()
    if not is_cut and (match is None or match["above"]):
        return begin, []
    end = begin + 1
    while end < len(lines) and (lines[end][:1].isspace() or not lines[end].strip()):
        end += 1
    is_group = match is not None and match["group"]
    end = end if is_group else min(end + 1, len(lines))
    if is_cut and not any(line.lstrip().startswith('File "') for line in lines[begin:end]):
        return begin, []
    named = lines[begin:end] if is_group else lines[end - 1 : end]
    return end, [raised for line in named if (raised := RAISED.match(_OF_GROUP.sub("", line, count=1)))]
