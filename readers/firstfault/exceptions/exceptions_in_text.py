"""Exceptions as text: those of other processes, found as tracebacks in the text of an exception,
and an exception as Python prints it, with its causes.

A DataLoader, a process pool, ``torch.multiprocessing``, joblib, Ray and many programs raise an
exception with the traceback of another process in its message, or in its cause's message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from firstfault.exceptions.source_files import find_library, is_library_file
from firstfault.model import ExceptionInfo, FrameInfo
from firstfault.utils.lazy_pattern import LazyPattern
from firstfault.utils.text import counted

REMOTE_RELATION = "remote"
"""The relation of another process's exception to the exception that reports it in this process."""
_MAX_TRACEBACKS = 16
_MAX_FRAMES = 200
_MAX_DEPTH = 4
"""How deep tracebacks may be nested: a traceback in the text of an exception that was
itself found in a text.
"""
_CHECKPOINT_RANK_MARK = "(RANK "
"""Begins each of several ranks' tracebacks in an error of torch's checkpoints."""
POOL_TRACEBACK_SUFFIX = "RemoteTraceback"
"""Ends the types in which `multiprocessing`,
`concurrent.futures` and joblib wrap the text of a traceback.
"""
CAUSE_SENTENCE = "The above exception was the direct cause of the following exception:"
CONTEXT_SENTENCE = "During handling of the above exception, another exception occurred:"
_MESSAGE_ENDS = {CAUSE_SENTENCE, CONTEXT_SENTENCE, '"""'}
"""Lines that end the message of an exception in a text."""


def unwrap_remote(exception: ExceptionInfo) -> ExceptionInfo:
    """Return the exception of the process that failed;
    `exception` itself if it reports no other process.
    """
    remote = [
        cause for cause in add_remote_cause(exception).causes if cause.relation == REMOTE_RELATION
    ]
    return remote[-1] if remote else exception


def parse_exceptions(text: str, *, whole: bool) -> tuple[ExceptionInfo, ...]:
    """Return the exceptions of a text that ends with a traceback, nearest first.

    `whole` is whether the text is a traceback as a whole, so that all lines after it belong to the
    last exception.
    """
    return _split_at_traceback(text, _MAX_DEPTH, whole=whole)[1]


def get_short_name(exception: ExceptionInfo) -> str:
    """Return the name of an exception's type without its module."""
    return exception.type.rsplit(".", 1)[-1]


def add_remote_cause(exception: ExceptionInfo) -> ExceptionInfo:
    """Return an exception that has the remote exception as a cause, related by `REMOTE_RELATION`.

    The message becomes the text above the traceback. An exception that reports no other process is
    returned unchanged, and so is an exception with the traceback of one of its causes in its text.
    """
    head, remote = _split_at_traceback(exception.message, _MAX_DEPTH)
    remote = _add_recorded_context(remote, exception)
    causes = {(get_short_name(cause), cause.message) for cause in exception.causes}
    if remote and (get_short_name(remote[0]), remote[0].message) not in causes:
        return replace(exception, message=head, causes=(*remote, *exception.causes))
    nearest = exception.causes[0] if exception.causes else None
    if nearest is not None and nearest.type.endswith(POOL_TRACEBACK_SUFFIX):
        remote = _add_recorded_context(parse_exceptions(nearest.message, whole=True), exception)
        if remote:
            return replace(exception, causes=(*remote, *exception.causes[1:]))
    return exception


def _add_recorded_context(
    remote: tuple[ExceptionInfo, ...], exception: ExceptionInfo
) -> tuple[ExceptionInfo, ...]:
    """Return exceptions of a text with the source around their frames,
    which the worker recorded with `exception`.
    """
    recorded = {(frame.file, frame.line): frame for frame in exception.text_frames}

    def add_context(frame: FrameInfo) -> FrameInfo:
        recorded_frame = recorded.get((frame.file, frame.line), frame)
        return replace(
            frame, context=recorded_frame.context, context_line=recorded_frame.context_line
        )

    return (
        tuple(replace(link, frames=tuple(map(add_context, link.frames))) for link in remote)
        if recorded
        else remote
    )


# Lines that torch writes above a traceback. All lines after the traceback belong to the exception
_TORCH_WRAPPER = LazyPattern(r"""(?m)
  ^Caught[ ][\w.]{1,100}[ ]in[ ]
  |^--[ ]Process[ ]\d{1,9}[ ]terminated[ ]with[ ]the[ ]following[ ]error:
  |^CheckpointException[ ]ranks:
""")
_TRACEBACK_START = LazyPattern(r"""(?m)
  ^(?P<indent>[ \t]*)(?:Original[ ])?Traceback[ ]\(most[ ]recent[ ]call[ ]last\):.*$
  |^[^\n]{0,20}ray::[^\n]{0,200}\(pid=\d{1,10}[^\n]{0,200}$
""")


def _split_at_traceback(
    text: str, depth: int, *, whole: bool = False
) -> tuple[str, tuple[ExceptionInfo, ...]]:
    """Return the text above the first traceback in a text, and its exceptions, nearest first.

    Without a traceback, return the text and no exceptions.

    Args:
        text: the text.
        depth: how deep further tracebacks may be nested in the found ones.
        whole: whether the text is a traceback as a whole. If not, lines below a traceback may be
            unrelated, so an exception counts only if it is the last line.
    """
    starts = list(itertools.islice(_TRACEBACK_START.finditer(text), _MAX_TRACEBACKS))
    chain: list[ExceptionInfo] = []
    for index, match in enumerate(starts):
        end = starts[index + 1].start() if index + 1 < len(starts) else len(text)
        between = text[match.end() : end].rstrip()
        relation = "cause" if between.endswith(CAUSE_SENTENCE) else ""
        relation = "context" if between.endswith(CONTEXT_SENTENCE) else relation
        # without Python's sentence between them, the next traceback belongs to the text of this
        # exception
        body = between if relation or _CHECKPOINT_RANK_MARK in match[0] else text[match.end() :]
        exception = parse_traceback(body, len(match["indent"] or ""))
        if exception is None:
            return text, ()
        chain.insert(0, replace(exception, relation=relation or REMOTE_RELATION))
        if not relation:
            break
    if not chain:
        return text, ()
    head, nested = _split_at_traceback(chain[0].message, depth - 1) if depth else ("", ())
    is_whole = whole or match["indent"] is None or _TORCH_WRAPPER.search(text[: match.start()])
    # "worker failed:" above a nested traceback reports it; any other text may be unrelated
    if nested and (head.endswith(":") or _TORCH_WRAPPER.search(head)):
        chain = [replace(chain[0], message=head), *nested, *chain[1:]]
    elif "\n" in chain[0].message and not is_whole:
        return text, ()
    return text[: starts[0].start()].strip(), tuple(chain)


_FRAME_LINE = LazyPattern(r"""
  ^\s{1,20}File[ ]"(?P<file>[^"\n]{1,500})",[ ]line[ ](?P<line>\d{1,9})(?:,[ ]in[ ](?P<function>[^\n]{1,200}))?$
""")
EXCEPTION_LINE = LazyPattern(r"(?s)^(?P<type>[A-Za-z_][\w.]{0,200})(?::(?:[ ](?P<message>.*))?)?$")

# Marks where a stored text was cut
_CUT_MARK = LazyPattern(r"\.\.\.[ ]\d{1,12}[ ]characters[ ]left[ ]out[ ]\.\.\.")


def parse_traceback(body: str, indent: int = 0) -> ExceptionInfo | None:
    """Return the exception of one traceback; None if it has no frame,
    or doesn't end like a traceback.
    """
    frames: list[FrameInfo] = []
    lines = body.split("\n")
    margin = 0
    # the line after a frame is its source line; the line after a cut mark may lack its beginning
    is_after_frame = is_after_cut = False
    for index, full_line in enumerate(lines):
        line = full_line[indent:] if full_line[:indent].isspace() else full_line
        match = _FRAME_LINE.match(line)
        if match is not None:
            frames[
                _MAX_FRAMES - 1 :
            ] = []  # beyond the limit the innermost frame replaces the last one
            frames.append(FrameInfo(match["file"], int(match["line"]), match["function"] or ""))
        elif is_after_frame and line.startswith((" ", "\t")):
            frames[-1] = replace(frames[-1], code=line.strip())
            margin = len(line) - len(line.lstrip())
        # "    ~~^~~~": Python 3.11 marks the part of the source line that failed
        elif (
            frames
            and frames[-1].code
            and line.strip()
            and not line.strip(" ~^")
            and line.startswith(" ")
        ):
            marked = (len(line) - len(line.lstrip()) - margin, len(line.rstrip()) - margin)
            frames[-1] = replace(frames[-1], marked=marked)
        elif (
            line.strip()
            and line[0] not in " \t"
            and not is_after_cut
            and frames
            and not _CUT_MARK.match(line)
        ):
            raised = EXCEPTION_LINE.match(line.rstrip())
            if raised is None:
                return None
            rest = itertools.takewhile(
                lambda other: other.strip() not in _MESSAGE_ENDS, lines[index + 1 :]
            )
            message = "\n".join([raised["message"] or "", *rest]).rstrip()
            return ExceptionInfo(raised["type"], message, frames=tuple(frames))
        is_after_frame = match is not None
        is_after_cut = _CUT_MARK.match(line) is not None
    return None


_SENTENCE_BY_RELATION = {
    REMOTE_RELATION: "The traceback above is in the text of the following exception:",
    "cause": CAUSE_SENTENCE,
    "context": CONTEXT_SENTENCE,
}


def format_place(frame: FrameInfo) -> str:
    """Return a frame as "train.py:41 in step": the file without its folders."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} in {frame.function}"


def group_frames_by_library(exception: ExceptionInfo) -> list[tuple[str, list[FrameInfo]]]:
    """Return the frames in their order, consecutive frames of a library together;
    the user's code has no name.

    Omitted frames are one group without frames; its name is their count.
    """
    # a recorded traceback keeps its outermost and its innermost frames: the gap is in the middle
    half = len(exception.frames) // 2 if exception.frames_omitted else 0
    before, after = (
        [(library, list(group)) for library, group in itertools.groupby(frames, find_library)]
        for frames in (exception.frames[:half], exception.frames[half:])
    )
    if not exception.frames_omitted:
        return after
    return [*before, (f"{exception.frames_omitted} frames left out", []), *after]


def list_causes_first(exception: ExceptionInfo) -> list[tuple[str, ExceptionInfo]]:
    """Return an exception and its causes in Python's order, the deepest cause first.

    Each comes with the sentence that Python prints above it, which is empty for the first. Another
    process's exception is a cause of the exception that has its traceback in the message.
    """
    exception = add_remote_cause(exception)
    # `causes` is nearest first; the relation of each is to the exception before it
    printed = [
        *itertools.takewhile(lambda cause: cause.relation != "suppressed", exception.causes)
    ][::-1]
    sentences = ["", *(_SENTENCE_BY_RELATION.get(cause.relation, "") for cause in printed)]
    return list(zip(sentences, [*printed, exception], strict=True))


def format_exception(exception: ExceptionInfo, *, folded: bool = False) -> str:
    """Return an exception as Python prints it, causes first.

    If `folded`, consecutive frames of a library become one line, unless there are only frames of
    libraries.
    """
    links = list_causes_first(exception)
    folded = folded and not all(
        is_library_file(frame.file) for _, link in links for frame in link.frames
    )
    parts: list[str] = []
    for sentence, link in links:
        parts += ["", sentence, ""] if sentence else []
        parts += _format_traceback(link, folded=folded)
        for index, member in enumerate(link.members, 1):
            text = format_exception(member, folded=folded)
            parts += [f"  ---- member {index} ----", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(parts).rstrip("\n")


def _format_traceback(exception: ExceptionInfo, *, folded: bool) -> Iterator[str]:
    if exception.frames:
        yield "Traceback (most recent call last):"
    groups = group_frames_by_library(exception)
    for number, (library, frames) in enumerate(groups, 1):
        if not frames:
            yield f"  ... {library} ..."
        elif library and folded:
            last = f", the last is {format_place(frames[-1])}" if number == len(groups) else ""
            yield f"  ... {counted(len(frames), 'frame')} of {library}{last}"
        else:
            for frame in frames:
                yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
                if frame.code:
                    yield f"    {frame.code}"
    yield f"{exception.type}: {exception.message}" if exception.message else exception.type
    yield from exception.notes
