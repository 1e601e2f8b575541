"""Classify one text, and choose the text that is a failed process's message.

Headline, report, category and class of a failure all use the same message. In this order: the first
cause of the exception that the process raised; the first cause of the last exception that it
printed; the line of its output with the reason for its end; its exit code or signal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from firstfault.evidence.signatures import (
    ANY_EXCEPTION,
    Pattern,
    Role,
    Signature,
    Signatures,
    built_in_signatures,
    encoded,
)
from firstfault.exceptions import first_cause
from firstfault.exceptions.ending_exception import find_ending_exception
from firstfault.exceptions.exceptions_in_text import add_remote_cause, format_place, get_short_name
from firstfault.exceptions.fatal_text import (
    extract_fatal_text,
    find_cpp_exception,
    find_telling_line,
)
from firstfault.exceptions.printed_tracebacks import find_printed_exception, strip_line_prefixes
from firstfault.model import ExceptionInfo, FileSystem, Subject, WorkerError, Writer
from firstfault.model.failure import get_shell_signal
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.text import extract_sentence

_MAX_CHARACTERS_READ = 20_000
"""Maximum number of characters of a text that are searched: half at its start, half at its end."""
_MAX_LINES_SEARCHED = 200
_GENERIC_SIGNATURES = {"program", "missing-file", ""}
"""Signatures of exceptions that no specific signature matches."""
_END_SIGNATURES = {
    "aborted",
    "aborted-by-the-shell",
    "crashed",
    "exit-code",
    "killed",
    "terminated",
    "told-by-signal",
}
"""Signatures of texts that only repeat how a process ended: "Killed", "exit code 1"."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """The process or host that a text names: a suspect, never a proof."""

    rank: int | None = None
    ip: str = ""
    host: str = ""
    port: int | None = None
    store: bool = False
    """Whether the text names the job's store, without a host."""

    def as_dict(self) -> dict[str, int | str | bool]:
        """Return the known fields, for JSON."""
        known = asdict(self)
        return {
            name: value
            for name, value in known.items()
            if value not in {None, ""} and value is not False
        }


@dataclass(frozen=True, slots=True)
class Classification:
    """The role and category of a text, by the signature that matches it."""

    role: Role
    category: str
    signature: str = ""
    """Id of the matching signature, or empty if none matches."""
    why: str = ""
    pointer: Pointer | None = None

    @property
    def is_specific(self) -> bool:
        """Whether the matching signature identifies a particular fault, not just any exception."""
        return self.signature not in _GENERIC_SIGNATURES

    @property
    def specific_category(self) -> str:
        """The category, or empty if the category doesn't identify the fault."""
        return self.category if self.category not in {"unknown", "user_code"} else ""


# The C++ runtime's prefix of an uncaught exception
_CPP_TERMINATE_PREFIX = LazyPattern(r"""(?i)
  terminate[ ]called[ ]after[ ]throwing[ ]an[ ]instance[ ]of[ ]'[^']*'\s*(?:what\(\):)?
""")


def classify(
    message: str,
    exception_type: str = "",
    bases: Iterable[str] = (),
    signatures: Signatures | None = None,
) -> Classification:
    """Classify a text as evidence about the process that wrote it.

    Args:
        message: an exception's text, or a line of a log.
        exception_type: the exception's name; for a log line, the log's source, or nothing.
        bases: names of the exception's base classes.
        signatures: the signatures to try, in this order, or None for the built-in ones.
    """
    signatures = signatures or built_in_signatures()
    types = _list_types(exception_type, bases)
    text = f"{exception_type}: {message}" if exception_type else message
    if len(text) > _MAX_CHARACTERS_READ:
        text = f"{text[: _MAX_CHARACTERS_READ // 2]}\n{text[-_MAX_CHARACTERS_READ // 2 :]}"
    remaining_text = encoded(_CPP_TERMINATE_PREFIX.sub("", text))
    noises = []
    for noise in signatures.noise_filter.possible(remaining_text):
        if noise.search(remaining_text) is not None:
            noises.append(noise)
            remaining_text = noise.pattern.cut_from(remaining_text)
    # prefer noise with a definite role over ambiguous noise
    cut = min(noises, key=lambda noise: noise.role is Role.AMBIGUOUS, default=None)
    if cut is not None and ANY_EXCEPTION not in types:
        # the name of the log isn't part of the text
        remaining_text = remaining_text.removeprefix(encoded(f"{exception_type}:"))
    if cut is not None and re.fullmatch(r"[\W_]*", remaining_text.decode("utf-8")):
        return _to_classification(cut)
    ends = _without_notices(remaining_text, exception_type, types)
    for signature in signatures.filter.possible(remaining_text):
        if not signature.fits(types):
            continue
        # a warning or a retry isn't the fault that ended the process, so lines that show it
        # continued don't count as local evidence; but NCCL may report a lost connection only at
        # level INFO, so other roles search all lines
        groups = signature.search(ends if signature.role is Role.PRIMARY else remaining_text)
        if groups is not None:
            judged = _to_classification(signature, _build_pointer(groups))
            return _adjust_by_size(_adjust_by_progress(judged, remaining_text), remaining_text)
    if cut is not None:
        return _to_classification(cut)
    return Classification(Role.AMBIGUOUS, "unknown", "", "no signature fits this text")


def _to_classification(signature: Signature, pointer: Pointer | None = None) -> Classification:
    return Classification(signature.role, signature.category, signature.id, signature.why, pointer)


# How much GPU memory was asked for, and how much there is
_MEMORY_SIZES = Pattern(
    r"Tried to allocate (?P<asked>\d+(?:\.\d+)?) (?P<unit>[KMGTPE])iB"
    r"[^\n]*?total capac\w+ of (?P<total>\d+(?:\.\d+)?) (?P<of>[KMGTPE])iB"
)


def _adjust_by_size(classification: Classification, text: bytes) -> Classification:
    """Classify "CUDA out of memory" as unclear if one allocation exceeds the whole GPU:
    the size may be corrupt.
    """
    sizes = _MEMORY_SIZES.search(text) if classification.signature == "gpu-out-of-memory" else None
    if sizes is not None:
        amounts = ((sizes["asked"], sizes["unit"]), (sizes["total"], sizes["of"]))
        asked, total = (
            float(number) * 1024.0 ** "KMGTPE".index(unit.upper()) for number, unit in amounts
        )
        if asked > total:
            why = (
                "more memory was asked for than the GPU has; the size may have come from another"
                " rank"
            )
            return replace(classification, role=Role.AMBIGUOUS, why=why)
    return classification


# NCCL's counters of a rank's collectives
_LAST_WORK = Pattern(
    r"last enqueued (?:NCCL )?work: (?P<enqueued>\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)


def _adjust_by_progress(classification: Classification, text: bytes) -> Classification:
    """Classify another rank's dump signal as a consequence if a collective was outstanding here."""
    progress = _LAST_WORK.search(text) if classification.signature == "dump-signal" else None
    if progress is None:
        return classification
    enqueued = _parse_number(progress["enqueued"])
    completed = _parse_number(progress["completed"]) or 0
    role = Role.SECONDARY if enqueued is not None and enqueued > completed else Role.AMBIGUOUS
    return replace(classification, role=role)


# The name of an exception of Python or C++
_EXCEPTION_NAME = LazyPattern(r"""
  (?:[A-Za-z_]\w*(?:\.|::))*
  (?:
    [A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Failure|Timeout|Iteration|Killed|Lost)
    |Exception
    |system_error
    |bad_alloc
  )
""")


def _list_types(exception_type: str, bases: Iterable[str]) -> set[str]:
    type_names = [name for name in (exception_type, *bases) if name]
    names = {re.split(r"\.|::", name)[-1] for name in type_names}
    # a class that is defined in a function has "<locals>" in its name
    if any(_EXCEPTION_NAME.fullmatch(name.replace("<locals>.", "")) for name in type_names):
        names.add(ANY_EXCEPTION)
    return names


# Log lines below the level of an error, and lines which show that the program continued: a
# fallback, a retry
_SURVIVAL_LINES = Pattern(
    r"^[^\n]{0,160}?(?:"
    r"\bNCCL (?-i:INFO|TRACE)\b"
    r"|(?:^|[ \t\[(|])(?-i:INFO|DEBUG|TRACE|WARNING)[ \t\])|:]"
    r"|(?:^|[ \[|])(?-i:WARN)[\]:|]"
    r"|(?-i:\bI\d{3,4}) \d\d:\d\d:"
    r"|(?:^|[ :])(?-i:\w*Warning):[ ]"
    r")[^\n]*$"
    r"|^[^\n]*(?:"
    r"\b(?:ignor|skipp)(?:ed|ing)\b"
    r"|\bfall(?:s|ing)? ?back\b"
    r"|\bretrying\b"
    r"|\bretry (?:in|\d+/)"
    r"|\bRetry\("
    r"|\btrying again\b"
    r"|thrown while requesting"
    r"|\bfrom scratch\b"
    r"|\bstart\w* from random\b"
    r"""|\b(?:lr|learning[_ ]rate)\b['\"]?\s*[:=|]\s*[\d.]"""
    r")[^\n]*$"
)


def _without_notices(text: bytes, exception_type: str, types: set[str]) -> bytes:
    """Remove the lines which show that the program continued."""
    # an exception's first line is what was raised, and a log's name isn't part of the text
    first_line_end = text.find(b"\n") + 1 or len(text)
    name = encoded(f"{exception_type}:")
    begin = first_line_end if ANY_EXCEPTION in types else len(name) if text.startswith(name) else 0
    return text[:begin] + _SURVIVAL_LINES.cut_from(text[begin:])


def _build_pointer(groups: Mapping[str, str]) -> Pointer | None:
    """Build the pointer from the named groups of a match; None if all are empty."""
    named: dict[str, str] = {}
    for name, value in groups.items():
        if value:
            named.setdefault(name.rstrip("0123456789"), value)
    pointer = Pointer(
        rank=_parse_number(named.get("rank")),
        ip=named.get("ip", ""),
        host=named.get("host", ""),
        port=_parse_number(named.get("port")),
        store=bool(named.get("store")),
    )
    return pointer if pointer != Pointer() else None


def _parse_number(text: str | None) -> int | None:
    # a 32-bit number
    return int(text) if text is not None and text.isdigit() and len(text) < 10 else None  # noqa: PLR2004


# --- the message of a failed process --------------------------------------------------------------
_CLEAN_EXIT_TEXT = "it exited without an error"
"""The text for an exit with code 0, for example of a program that returns too early."""
_SUCCESS_CODE_TEXT = "exit code 0"
_REACHED_END_TEXT = "its program reached its end"
"""The recorder's text for the end of a program that nobody called `sys.exit` in."""
_EARLY_END_TEXT = "ended early"


@dataclass(frozen=True, slots=True)
class Message:
    """The message of a failed process."""

    what: str
    """One or two words: the exception's short name, the signal or the exit code."""
    text: str = ""
    """A sentence, or empty if the process left no message."""
    about: str = ""
    """This process's own text about an exception that was raised in another process;
    empty if it raised it itself.
    """
    wrapper: str = ""
    """The exception raised because of it, "raised as TrainingError: training failed", or empty if
    there is none.
    """
    exception: ExceptionInfo | None = None
    """The exception that the process raised or printed, with its wrappers, or None without one."""

    @property
    def whole(self) -> str:
        """The text, this process's text about it, and the wrapper."""
        return "; ".join(part for part in (self.text, self.about, self.wrapper) if part)


def find_message(failure: WorkerError) -> Message:
    """Return the message of a failed process;
    the module's docstring has the order of the sources.
    """
    exception = find_ending_exception(failure)
    if exception is None:
        return _build_end_message(failure)
    if exception is failure.exception and has_reached_end(failure):
        return Message(_EARLY_END_TEXT, _REACHED_END_TEXT, exception=exception)
    message = _build_exception_message(exception)
    if is_unsendable_result(failure):
        return replace(message, text=f"the function's result can't be pickled: {message.text}")
    disk = full_disk(failure, exception)
    if (
        disk
        and disk.path not in message.whole
        and _classify_exception(exception).category in {"disk_full", "storage"}
    ):
        message = replace(message, text=f"{disk.text} ({message.text})")
    if failure.exception is None or exception.message != failure.exception.message:
        parts = (message.wrapper, f"printed before {_describe_end(failure) or 'its exit'}")
        return replace(message, wrapper="; ".join(part for part in parts if part))
    is_exit = message.what == "SystemExit" or "SystemExit" in exception.bases
    end = _describe_end(failure)
    is_call = message.what == "SystemExit" and not exception.causes
    if is_call and exception.message.strip("-0123456789") not in {"", "None"}:
        return replace(message, wrapper=end)  # its own text
    if is_exit and failure.exit_code != 0 and (line := _last_line(failure, "")):
        return replace(message, text=line, wrapper=end)
    return replace(message, text=_describe_exit_call(exception, end)) if is_call else message


def _describe_exit_call(exception: ExceptionInfo, end: str) -> str:
    """Return the code and place of an exit without a text."""
    frames = first_cause.find_own_frames(exception)
    position = f"{format_place(frames[-1])}: {frames[-1].code}".rstrip(": ") if frames else ""
    if end in {"", _SUCCESS_CODE_TEXT}:
        return f"it exited at {position}" if position else _CLEAN_EXIT_TEXT
    return f"{end} at {position}" if position else end


def has_reached_end(failure: WorkerError) -> bool:
    """Whether a program ran to its end: it's recorded as a SystemExit,
    but nobody called `sys.exit`.
    """
    raised = failure.exception
    is_end = (
        raised is not None and raised.type == "SystemExit" and raised.message == _REACHED_END_TEXT
    )
    return is_end and not failure.exit_code


# Torch's traceback of a worker that couldn't put its function's result into the queue
_UNSENDABLE_RESULT = LazyPattern(r"""
  elastic/multiprocessing/api\.py",[ ]line[ ]\d+,[ ]in[ ]_wrap\n[^\n]*\.put\([^\n]*\n(?:[^\n]*\n)*?
  [^\n]*multiprocessing/queues\.py",[ ]line[ ]\d+,[ ]in[ ]put\n
""")


def is_unsendable_result(failure: WorkerError) -> bool:
    """Whether the function of a worker had returned a value that torch couldn't send to the agent:
    torch kept the traceback of its queue.
    """
    is_kept = failure.writer is Writer.AGENT and failure.exception is not None
    return is_kept and _UNSENDABLE_RESULT.search(failure.message) is not None


def full_disk(failure: WorkerError, exception: ExceptionInfo) -> FileSystem | None:
    """Return the full file system behind a path in the exception; if no path matches,
    any full file system.
    """
    disks = failure.system.file_systems
    links = list(first_cause.iter_exceptions(exception))
    named = [disk for disk in disks if any(f"'{disk.path}'" in link.message for link in links)]
    return next((disk for disk in named or disks if disk.is_full), None)


def is_unexplained_write(failure: WorkerError) -> bool:
    """Whether a write failed, and the text has no reason for it (such as a full disk)."""
    exception = find_ending_exception(failure)
    return exception is not None and _classify_exception(exception).signature == "failed-write"


def _classify_exception(exception: ExceptionInfo) -> Classification:
    cause = first_cause.find_first_cause(exception)
    return classify(cause.message, cause.type, cause.bases)


def _build_end_message(failure: WorkerError) -> Message:
    """Return the message of a process that neither raised nor printed an exception."""
    is_stopped = failure.sent_signals and not failure.crashed_while_stopped
    has_ended = failure.signal or failure.exit_code is not None
    if (
        is_stopped
        or failure.expired is not None
        or failure.subject is Subject.AGENT
        or not has_ended
    ):
        return Message(failure.what)
    if not failure.signal and failure.exit_code == 0:
        return Message(
            failure.what, _CLEAN_EXIT_TEXT
        )  # its last output isn't a reason for a failure
    return Message(
        failure.what, _last_line(failure, failure.signal or get_shell_signal(failure.exit_code))
    )


def _last_line(failure: WorkerError, signal: str) -> str:
    """Return the line with the reason for a process's end: the line that a signature matches,
    or else the last line.
    """
    text = extract_fatal_text(failure.printed, signal)
    classification = classify(text) if text else None
    if (
        classification is not None
        and classification.category != "unknown"
        and classification.signature not in _END_SIGNATURES
    ):
        lines = (find_cpp_exception(text), *text.splitlines()[:_MAX_LINES_SEARCHED])
        telling = (
            line for line in lines if line and classify(line).signature == classification.signature
        )
        if line := next(telling, ""):
            return strip_line_prefixes(line)
    if signal in {"", "SIGABRT"}:
        # a line that repeats the printed exception adds nothing
        printed = find_printed_exception(failure.printed) if signal else None
        line = find_cpp_exception(text) or find_telling_line(text)
        return (
            strip_line_prefixes(line)
            if printed is None or printed.exception.message not in line
            else ""
        )
    return ""


def _describe_end(failure: WorkerError) -> str:
    """Return how a process ended, "exit code 7", or an empty string if it is unknown."""
    if failure.signal:
        return failure.signal
    code = "" if failure.exit_code is None else str(failure.exit_code)
    if not code and failure.exception is not None:
        code = _find_exit_code(failure.exception.message)
    return f"exit code {code}" if code else ""


def _find_exit_code(argument: str) -> str:
    """Return the exit code that Python makes of the argument of `sys.exit`, or an empty string if
    it is unknown.

    Without an argument the code is 0, but a program that raises SystemExit is recorded without it.
    """
    if _is_exit_code(argument):
        return argument
    return "1" if argument and argument != "None" else ""


def _is_exit_code(argument: str) -> bool:
    return argument.lstrip("-").isdigit()


def _build_exception_message(exception: ExceptionInfo) -> Message:
    causes = first_cause.find_causes(exception)
    original = first_cause.find_first_cause(exception)
    text = extract_sentence(original.message)
    cause_sentence = extract_sentence(add_remote_cause(causes.first).message)
    about = cause_sentence if cause_sentence != text else ""
    wrapper = ""
    # the wrapper nearest to the first cause has the most detail; an exception group has none
    nearest = [outer for outer in causes.wrappers if not outer.members][-1:] or list(
        causes.wrappers[:1]
    )
    if nearest and not (text and text in nearest[0].message):
        inner = (*causes.wrappers[causes.wrappers.index(nearest[0]) + 1 :], causes.first)[0]
        wrapper = (
            f"{'raised as' if first_cause.is_wrapper(nearest[0], inner) else 'then'}"
            f" {get_short_name(nearest[0])}"
        )
        if sentence := extract_sentence(nearest[0].message):
            wrapper += f": {sentence}"
        if nearest[0] is not causes.wrappers[0]:
            wrapper += f", then {get_short_name(causes.wrappers[0])}"
    if causes.wrappers and get_short_name(original) == "SystemExit":
        text = f"the program called sys.exit({text})"
    frames = () if text else first_cause.find_own_frames(exception)
    if frames:  # of an exception without a text, such as a bare `assert`
        text = f"{format_place(frames[-1])}: {frames[-1].code}".rstrip(": ")
    return Message(get_short_name(original), text, about, wrapper, exception)
