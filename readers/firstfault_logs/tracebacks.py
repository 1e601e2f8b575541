"""Find the tracebacks in a stream, and separate a program's exceptions from a launcher's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstfault.credentials import redact
from firstfault.evidence.signatures import Role
from firstfault.evidence.texts import classify
from firstfault.exceptions.exceptions_in_text import format_exception, get_short_name
from firstfault.exceptions.fingerprint import normalize_message
from firstfault.exceptions.first_cause import find_first_cause
from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.exceptions.source_files import is_library_file
from firstfault.model import ExceptionInfo
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault_logs.completion.noise import HANDLED_ERROR, is_at_exit
from firstfault_logs.completion.words import is_noise, is_success_report
from firstfault_logs.framing.labels import GLOG_STAMP
from firstfault_logs.framing.lines import EXCEPTION_LINE, TRACEBACK

if TYPE_CHECKING:
    from firstfault_logs.attempt_logs import Excerpt, Stream
    from firstfault_logs.framing.labels import LogRecord


MAX_LINES_AFTER_END = 10
"""A process that printed more lines after its traceback was still alive."""
_LINES_TO_QUOTED = 2
"""From the message of an exception to the traceback that it quotes below an empty line."""

# Files of launchers, in the outermost frames of what they raise themselves.
LAUNCHER_FILE = LazyPattern(r"""
  torch/distributed/(?:launcher|run\.py|elastic/(?:agent|rendezvous|timer))
| /accelerate/commands/
| deepspeed/launcher
| lightning/(?:fabric/)?cli
| /bin/(?:torchrun|accelerate|deepspeed)\b
| torch/multiprocessing/spawn\.py
| ray/train/.*(?:controller|trainer)
""")

# The message of an exception of any type that a launcher raises only to report that one of its
# processes failed.
_COMMAND_FAILED = LazyPattern(r"""
  (?:Command|Process|Subprocess|Job|Task)\b [^\n]{0,400} \b(?:failed[ ]with|returned|exited[ ]with)[ ](?:a[ ])?
  (?:non-?zero|return[ ]code|exit[ ](?:code|status)|status|code)
| (?:Distributed[ ]job|Training)\b [^\n]{0,20} \b(?:exited|failed)\b [^\n]{0,60} \b(?:attempts|workers?|logs)\b
""")

# What a process prints when a signal ends it: headings, numbered native frames, threads and their
# frames
_CRASH_REPORT = LazyPattern(
    r"""
            ^(?:C\+\+|Python|Native)[ ](?:Traceback|Call[ ]Stacks?)\b | ^Error[ ]Message[ ]Summary
          | ^\s*\#?\d{1,3}[ ]+(?:0x[0-9a-f]+\b|[\w~<>:*&(]+(?:::|\()) | ^\[[^\]\s]+:\d+\][ ](?:\*\*\*|\[[ ]?\d+\])[ ]
          | ^Fatal(?:[ ]Python[ ]error|Error): | ^(?:Current[ ]thread|Thread)[ ]0x[0-9a-f]+ | ^[ ]+\[\w+Info:[ ]
          | ^terminate[ ]called | ^[ ]+what\(\): | ^\*\*\*[ ] | ^Extension[ ]modules: | \(core[ ]dumped\)
        """
)

# Spark's driver prints it above the exception of a task, perhaps in the same line.
SPARK_TASK_ERROR = LazyPattern(r"""
\bLost[ ]task[ ](?P<task>\d{1,9})\.\d{1,4}[ ]in[ ]stage[ ](?P<stage>[\d.]{1,20})[ ]
\(TID[ ]\d{1,12}\)?[ ]?[,(][ ]?(?P<node>[\w.-]{1,250}),?[ ]executor[ ](?P<executor>\w{1,20})\):
""")

# The level of a logged error.
ERROR_LEVEL = LazyPattern(
    r"(?:^|[\s\[|:])(?:ERROR|FATAL|CRITICAL)(?:[\s\]|:]|$)"
    r"|^\[?\d{4}-\d\d-\d\d[ T][\d:.,]+:?[ ][EF][ ]"
)

# The line of a logger above the traceback that it logs
LOGGED_ERROR = LazyPattern(r"""
  (?:^|[\s\[|:(-])(?:ERROR|CRITICAL|WARNING|WARN|EXCEPTION)(?:[\s\]|:)-]|$)
| ^\[?[EW]\d{4}[ ]\d\d:\d\d:\d\d
""")

_LAUNCHER_EXCEPTIONS = (
    "ChildFailedError",
    "CalledProcessError",
    "ProcessExitedException",
)
"""Exceptions in which a launcher reports that a process failed."""
EXIT_FUNCTIONS = (
    "_run_finalizers",
    "_exit_function",
    "_run_exitfuncs",
    "_shutdown",
)
"""Functions in which Python cleans up after a program that has ended."""


@dataclass(frozen=True, slots=True)
class Traceback:
    """A traceback in a stream."""

    exception: ExceptionInfo
    text: str
    stream: Stream
    lines: tuple[int, int]
    """Numbers of the first and the last one."""
    later_lines: int = 0
    """Number of lines below it in the same stream, without meaningless ones."""
    is_handled: bool = False
    """Whether the lines around it show that the program continued."""
    is_before_success: bool = False
    """Whether a later line of the same stream reports success."""
    is_uncaught: bool = False
    """Whether Python printed it because nothing had caught it, so it ended its process."""
    heading: str = ""
    """The line above."""
    lines_around: tuple[str, ...] = ()
    """The line above and the first one below."""
    is_mixed: bool = False
    """Whether lines of another traceback are among its lines."""
    is_in_thread: bool = False
    """Whether Python printed it for a thread, which it ended."""
    time_ns: int | None = None
    """From its first line, or from an error directly above it; None if neither has a time."""

    @property
    def fault(self) -> tuple[str, str, str]:
        """Equal for the same fault of several processes."""
        return find_fault(self.exception)

    @property
    def is_summary(self) -> bool:
        """Whether a launcher raised it only to report that one of its processes failed."""
        name = get_short_name(self.exception)
        files = (frame.file for frame in self.exception.frames)
        is_signal = name == "SignalException" and any(map(LAUNCHER_FILE.search, files))
        is_command = _COMMAND_FAILED.match(self.exception.message) is not None
        return is_signal or is_command or name in _LAUNCHER_EXCEPTIONS

    @property
    def is_of_launcher(self) -> bool:
        """Whether a launcher itself failed, so that all frames but the outermost are the launcher's
        own or libraries'.
        """
        files = [frame.file for frame in self.exception.frames]
        inner = [file for file in files[1:] if not LAUNCHER_FILE.search(file)]
        return any(map(LAUNCHER_FILE.search, files)) and all(map(is_library_file, inner))


def find_fault(exception: ExceptionInfo) -> tuple[str, str, str]:
    """Return what is equal for the same fault of several processes: type, message, and place."""
    frame = exception.frames[-1] if exception.frames else None
    position = f"{frame.file}:{frame.line}" if frame else ""
    # a line below the first one may be the program's next output
    first_line = exception.message.partition("\n")[0]
    return exception.type, normalize_message(first_line), position


def find_tracebacks(stream: Stream) -> Iterator[Traceback]:
    """Yield the tracebacks in a stream, in order.

    If an exception's message ends with a colon, an empty line and a traceback, it quotes the
    exception that caused it: one failure, which is the quoted one.
    """
    quoting: Traceback | None = None
    for traceback in _read_excerpts(stream):
        if quoting is not None and traceback.lines[0] - quoting.lines[1] == _LINES_TO_QUOTED:
            yield replace(
                traceback,
                lines=(quoting.lines[0], traceback.lines[1]),
                heading=quoting.heading,
                lines_around=(*quoting.lines_around[:1], *traceback.lines_around[1:]),
                time_ns=quoting.time_ns if traceback.time_ns is None else traceback.time_ns,
            )
            quoting = None
            continue
        if quoting is not None:
            yield quoting
        message = traceback.exception.message.rstrip()
        quoting = traceback if message.endswith(":") and "\n" not in message else None
        if quoting is None:
            yield traceback
    if quoting is not None:
        yield quoting


def _read_excerpts(stream: Stream) -> Iterator[Traceback]:
    for excerpt in stream.excerpts:
        above = excerpt.lines[: excerpt.at]
        lines = _cut_at_crash(excerpt.lines[excerpt.at :])
        printed = find_printed_exception(redact("\n".join(_list_texts(lines))))
        # Python prints "Exception ignored in" for exceptions of finalizers, which end no process
        if printed is None or any("Exception ignored " in record.text for record in above):
            continue
        # nor does a library's thread
        is_in_thread = any("Exception in thread " in record.text for record in above)
        is_of_library = all(is_library_file(frame.file) for frame in printed.exception.frames)
        if is_in_thread and is_of_library and not ends_resource(printed.exception):
            continue
        # nor does a function that Python calls while a process exits
        frames = printed.exception.frames
        if frames and frames[0].function in EXIT_FUNCTIONS:
            continue
        # a line without a level or a date may belong to the exception's message, or be the
        # program's next output
        message_rest = printed.exception.message.splitlines()[1:]
        message_rest = message_rest[
            next(
                (
                    index
                    for index, line in enumerate(message_rest)
                    if line and not line[0].isspace()
                ),
                len(message_rest),
            ) :
        ]
        later = [line for line in (*message_rest, *printed.after) if line.strip()]
        traceback_lines = lines[: len(lines) - len(printed.after)]
        below = [record.text for record in stream.tail if record.number > lines[-1].number]
        later_lines = sum(
            not (is_noise(line) or _CRASH_REPORT.search(line)) for line in (*later, *below)
        )
        around = (*(record.text for record in above), *(*later, *below)[:1])
        is_uncaught = (
            starts_at_program(printed.exception)
            and later_lines <= MAX_LINES_AFTER_END
            and not is_in_thread
            and not _is_caught(stream, excerpt, (*later, *below)[:1])
        )
        yield Traceback(
            printed.exception,
            "\n".join(record.text for record in traceback_lines),
            stream,
            (
                lines[0].number,
                traceback_lines[max(len(traceback_lines) - len(message_rest) - 1, 0)].number,
            ),
            later_lines,
            is_handled=(
                not is_uncaught and later_lines > 0 and any(map(HANDLED_ERROR.search, around))
            ),
            # a job's script prints its last words also below the exception of its program
            is_before_success=not is_uncaught and any(map(is_success_report, (*later, *below))),
            is_uncaught=is_uncaught,
            heading=above[-1].text if above else "",
            lines_around=around,
            is_mixed=excerpt.is_mixed,
            is_in_thread=is_in_thread,
            time_ns=_find_time(above, lines),
        )


_PROGRAM_FRAMES = ("<module>", "_run_module_as_main")
"""Outermost frames of a program that Python runs as a script or a module."""


def starts_at_program(exception: ExceptionInfo) -> bool:
    """Whether an exception came through all frames of a program, from its outermost one on.

    A program that prints an exception which it caught has only the frames below the handler. A
    teardown may raise after the program has succeeded.
    """
    frames = exception.frames
    if not frames or frames[0].function not in _PROGRAM_FRAMES:
        return False
    return not is_at_exit([frame.function for frame in frames])


def _is_caught(stream: Stream, excerpt: Excerpt, below: Sequence[str]) -> bool:
    """Whether a logger printed a traceback, a line below is about its handling,
    or a training went on.
    """
    above = (record.text for record in excerpt.lines[: excerpt.at])
    is_logged = any(map(LOGGED_ERROR.search, above))
    last = excerpt.lines[-1].number
    has_later_steps = stream.progress is not None and stream.progress.number > last
    return is_logged or has_later_steps or any(map(HANDLED_ERROR.search, below))


def _cut_at_crash(lines: Sequence[LogRecord]) -> Sequence[LogRecord]:
    """Return the lines without what the process printed when it crashed while it ended."""
    ends = (at for at, record in enumerate(lines) if at and _CRASH_REPORT.search(record.text))
    return lines[: next(ends, len(lines))]


def _list_texts(lines: Sequence[LogRecord]) -> Iterator[str]:
    """Yield the texts of a traceback's lines, without a report in the first one,
    which no other line has.
    """
    first, second = (*lines[:2], *lines[:1])[:2]
    is_reported = SPARK_TASK_ERROR.search(first.text) is not None and second.text.startswith(
        '  File "'
    )
    yield first.text[first.text.index(TRACEBACK) :] if is_reported else first.text
    yield from (record.text for record in lines[1:])


def _find_time(above: Sequence[LogRecord], lines: Sequence[LogRecord]) -> int | None:
    """Return the time of a traceback: other lines above it may be much older than the exception."""
    headings = [
        record.time_ns
        for record in above
        if record.number == lines[0].number - 1
        and (ERROR_LEVEL.search(record.text) or _has_glog_error_level(record.text))
    ]
    return next((time for time in (lines[0].time_ns, *headings) if time is not None), None)


def _has_glog_error_level(text: str) -> bool:
    """Whether a line begins with the level of an error or of the end,
    in the form of native code and of absl.
    """
    stamp = GLOG_STAMP.match(text)
    return stamp is not None and text.lstrip("[")[:1] in {"E", "F"}


def find_shared_tracebacks(stream: Stream) -> tuple[list[Traceback], str]:
    """Return the tracebacks in a shared stream, and a note on what can't be read;
    lines of processes may alternate.

    If alternating tracebacks all end with the same exception, it's returned once, without frames.
    """
    tracebacks = list(find_tracebacks(stream))
    mixed = [excerpt for excerpt in stream.excerpts if excerpt.is_mixed]
    if not mixed:
        return tracebacks, ""
    lines = mixed[0].lines[0].number, mixed[-1].lines[-1].number
    named = (EXCEPTION_LINE.match(record.text) for excerpt in mixed for record in excerpt.lines)
    last_lines = [
        last
        for last in named
        if last and last["type"].rpartition(".")[2] not in _LAUNCHER_EXCEPTIONS
    ]
    if len({last[0] for last in last_lines}) != 1:
        place = f"lines {lines[0]} to {lines[1]}"
        return (
            tracebacks,
            f"tracebacks of several processes are mixed in {place}: no prefix distinguishes them",
        )
    exception = ExceptionInfo(last_lines[0]["type"], redact(last_lines[0]["message"] or ""))
    shared_traceback = Traceback(exception, format_exception(exception), stream, lines)
    return [
        *(traceback for traceback in tracebacks if not traceback.is_mixed),
        shared_traceback,
    ], ""


_RESOURCE_CATEGORIES = {"cuda_oom", "host_oom", "disk_full", "gpu_hardware", "gpu_kernel"}
"""Categories of faults that end one thread, while other threads notice only that it's gone."""


def ends_resource(exception: ExceptionInfo) -> bool:
    """Whether an exception is about memory, a disk or a GPU:
    it may explain a later one of the same process.
    """
    return find_specific_category(exception) in _RESOURCE_CATEGORIES


def find_specific_category(exception: ExceptionInfo) -> str:
    """Return the category of a fault that an exception's text identifies, or "" without one."""
    first = find_first_cause(exception)
    judged = classify(first.message, first.type, (*first.bases, "BaseException"))
    is_fault = judged.role is Role.PRIMARY and judged.is_specific
    return judged.category if is_fault else ""
