"""Exceptions of other processes, found as tracebacks in the text of an exception."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from firstfault.model import ExceptionInfo, FrameInfo

REMOTE = "remote"
"""The relation of an exception to the one that was raised for it in this process."""
_MAX_BLOCKS = 16
_MAX_FRAMES = 200
_NESTED = 4
"""How often a traceback may be in the text of an exception that was itself found in a text."""
_WRAPPERS = re.compile(
    r"^Caught [\w.]{1,100} in |^-- Process \d{1,9} terminated with the following error:|^CheckpointException ranks:",
    re.MULTILINE,
)
"""Texts above a traceback that torch writes: all that follows the traceback belongs to the exception."""
_OF_A_RANK = "(RANK "
"""torch's checkpoints list the tracebacks of several ranks one after the other."""
_BEGIN = re.compile(
    r"^(?P<indent>[ \t]*)(?:Original )?Traceback \(most recent call last\):.*$"
    r"|^[^\n]{0,20}ray::[^\n]{0,200}\(pid=\d{1,10}[^\n]{0,200}$",
    re.MULTILINE,
)
_FRAME = re.compile(
    r'^\s{1,20}File "(?P<file>[^"\n]{1,500})", line (?P<line>\d{1,9})(?:, in (?P<function>[^\n]{1,200}))?$'
)
RAISED = re.compile(r"^(?P<type>[A-Za-z_][\w.]{0,200})(?::(?: (?P<message>.*))?)?$", re.DOTALL)
_LEFT_OUT = re.compile(r"\.\.\. \d{1,12} characters left out \.\.\.")
"""Where a stored text was cut."""
POOL_TRACEBACK_SUFFIX = "RemoteTraceback"
"""How the types end that `multiprocessing`, `concurrent.futures` and joblib give to the text of a traceback."""
CAUSE_SENTENCE = "The above exception was the direct cause of the following exception:"
CONTEXT_SENTENCE = "During handling of the above exception, another exception occurred:"
_ENDS = {CAUSE_SENTENCE, CONTEXT_SENTENCE, '"""'}
"""Lines after the message of an exception in a text."""


def unwrap_remote_exception(exception: ExceptionInfo) -> ExceptionInfo:
    """Return the exception of the other process; `exception` itself if it tells of none."""
    remote = [cause for cause in add_remote_cause(exception).causes if cause.relation == REMOTE]
    return remote[-1] if remote else exception


def parse_exceptions(text: str, *, whole: bool) -> tuple[ExceptionInfo, ...]:
    """Return the exceptions of a text that ends with a traceback, nearest first; `whole`: as for `_parsed`."""
    return _parsed(text, _NESTED, whole=whole)[1]


def get_short_name(exception: ExceptionInfo) -> str:
    """Return the name of an exception's type without its module."""
    return exception.type.rsplit(".", 1)[-1]


def add_remote_cause(exception: ExceptionInfo) -> ExceptionInfo:
    """Return an exception with that of the other process among its causes, related by `REMOTE`.

    Its text is what stood above the traceback. An exception that tells of no other process is returned as it is; so is
    one with the traceback of its own cause in its text.
    """
    head, found = _parsed(exception.message, _NESTED)
    found = _with_lines(found, exception)
    if found and not any(
        (get_short_name(found[0]), found[0].message) == (get_short_name(cause), cause.message)
        for cause in exception.causes
    ):
        return replace(exception, message=head, causes=(*found, *exception.causes))
    nearest = exception.causes[0] if exception.causes else None
    if nearest is not None and nearest.type.endswith(POOL_TRACEBACK_SUFFIX):
        found = _with_lines(_parsed(nearest.message, _NESTED, whole=True)[1], exception)
        if found:
            return replace(exception, causes=(*found, *exception.causes[1:]))
    return exception


def _with_lines(found: tuple[ExceptionInfo, ...], exception: ExceptionInfo) -> tuple[ExceptionInfo, ...]:
    """Return exceptions of a text with the lines around their frames, as far as they were recorded."""
    known = {(frame.file, frame.line): frame for frame in exception.text_frames}

    def with_lines(frame: FrameInfo) -> FrameInfo:
        recorded = known.get((frame.file, frame.line), frame)
        return replace(frame, context=recorded.context, context_line=recorded.context_line)

    return tuple(replace(one, frames=tuple(map(with_lines, one.frames))) for one in found) if known else found


def _parsed(text: str, depth: int, *, whole: bool = False) -> tuple[str, tuple[ExceptionInfo, ...]]:
    """Return the text above a traceback, and the exceptions in it, nearest first; none if there is no traceback.

    At most `depth` tracebacks may be in each other. If the text isn't a traceback as a `whole`, what stands below one
    may be something else, so the exception counts only if it is the last line.
    """
    begins = [match for _, match in zip(range(_MAX_BLOCKS), _BEGIN.finditer(text), strict=False)]
    found: list[ExceptionInfo] = []
    for index, match in enumerate(begins):
        end = begins[index + 1].start() if index + 1 < len(begins) else len(text)
        between = text[match.end() : end].rstrip()
        follows = (
            "cause" if between.endswith(CAUSE_SENTENCE) else "context" if between.endswith(CONTEXT_SENTENCE) else ""
        )
        # without Python's sentence between them, the next traceback belongs to the text of this exception
        body = between if follows or _OF_A_RANK in match[0] else text[match.end() :]
        block = parse_traceback(body, len(match["indent"] or ""))
        if block is None:
            return text, ()
        found.insert(0, replace(block, relation=follows or REMOTE))
        if not follows:
            break
    if not found:
        return text, ()
    head, deeper = _parsed(found[0].message, depth - 1) if depth else ("", ())
    if deeper and (head.endswith(":") or _WRAPPERS.search(head)):  # else it only stands below
        found = [replace(found[0], message=head), *deeper, *found[1:]]
    elif "\n" in found[0].message and not (whole or match["indent"] is None or _WRAPPERS.search(text[: match.start()])):
        return text, ()
    return text[: begins[0].start()].strip(), tuple(found)


def parse_traceback(body: str, indent: int = 0) -> ExceptionInfo | None:
    """Return the exception of one traceback; None if it has no frame, or doesn't end as tracebacks do."""
    frames: list[FrameInfo] = []
    lines = body.split("\n")
    margin = 0
    is_code = is_cut = False  # whether a line is the code of the frame before it, or may lack its beginning
    for index, whole in enumerate(lines):
        line = whole[indent:] if whole[:indent].isspace() else whole
        match = _FRAME.match(line)
        if match is not None:
            frames[_MAX_FRAMES - 1 :] = []  # the innermost one counts
            frames.append(FrameInfo(match["file"], int(match["line"]), match["function"] or ""))
        elif is_code and line.startswith((" ", "\t")):
            frames[-1], margin = replace(frames[-1], code=line.strip()), len(line) - len(line.lstrip())
        elif frames and frames[-1].code and line.strip() and not line.strip(" ~^") and line.startswith(" "):
            marked = (len(line) - len(line.lstrip()) - margin, len(line.rstrip()) - margin)
            frames[-1] = replace(frames[-1], marked=marked)
        elif line.strip() and not line.startswith((" ", "\t")) and not is_cut and frames and not _LEFT_OUT.match(line):
            raised = RAISED.match(line.rstrip())
            if raised is None:
                return None
            more = itertools.takewhile(lambda other: other.strip() not in _ENDS, lines[index + 1 :])
            message = "\n".join([raised["message"] or "", *more]).rstrip()
            return ExceptionInfo(raised["type"], message, frames=tuple(frames))
        is_code, is_cut = match is not None, _LEFT_OUT.match(line) is not None
    return None
