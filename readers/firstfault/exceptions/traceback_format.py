"""An exception as Python prints it, with its causes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from firstfault.exceptions.exceptions_in_text import (
    CAUSE_SENTENCE,
    CONTEXT_SENTENCE,
    REMOTE_RELATION,
    add_remote_cause,
)
from firstfault.exceptions.source_files import find_library, is_library_file
from firstfault.model import ExceptionInfo, FrameInfo
from firstfault.utils.text import counted

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
