"""An exception as Python prints it, with its causes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from firstfault.exceptions.exceptions_in_text import CAUSE_SENTENCE, CONTEXT_SENTENCE, REMOTE, add_remote_cause
from firstfault.exceptions.source_files import find_library, is_library_file
from firstfault.model import ExceptionInfo, FrameInfo
from firstfault.utils.text import counted

_BETWEEN = {
    REMOTE: "The traceback above is in the text of the following exception:",
    "cause": CAUSE_SENTENCE,
    "context": CONTEXT_SENTENCE,
}


def format_place(frame: FrameInfo) -> str:
    """Return "train.py:41 in step": the file without its folders."""
    return f"{frame.file.rsplit('/', 1)[-1]}:{frame.line} in {frame.function}"


def group_frames_by_library(exception: ExceptionInfo) -> list[tuple[str, list[FrameInfo]]]:
    """Return the frames in their order, consecutive ones of a library together; the user's code has no name.

    Where frames were left out is a text that counts them, without frames.
    """
    half = len(exception.frames) // 2 if exception.frames_omitted else 0
    before, after = (
        [(library, list(run)) for library, run in itertools.groupby(frames, find_library)]
        for frames in (exception.frames[:half], exception.frames[half:])
    )
    gap: list[tuple[str, list[FrameInfo]]] = []
    if exception.frames_omitted:
        gap.append((f"{exception.frames_omitted} frames left out", []))
    return before + gap + after


def list_causes_first(exception: ExceptionInfo) -> list[tuple[str, ExceptionInfo]]:
    """Return an exception's causes and the exception, in Python's order: the deepest cause first.

    Before each is Python's sentence between the previous one and it; empty for the first. An exception of another
    process is a cause of the one that has its traceback in its text.
    """
    exception = add_remote_cause(exception)
    # `causes` is nearest first; the relation of each is to the exception before it
    shown = [*itertools.takewhile(lambda cause: cause.relation != "suppressed", exception.causes)][::-1]
    sentences = ["", *(_BETWEEN.get(cause.relation, "") for cause in shown)]
    return list(zip(sentences, [*shown, exception], strict=True))


def format_exception(exception: ExceptionInfo, *, folded: bool = False) -> str:
    """Return an exception as Python prints it, causes first.

    If `folded`, consecutive frames of a library are one line, unless there are no other frames.
    """
    links = list_causes_first(exception)
    fold = folded and not all(is_library_file(frame.file) for _, link in links for frame in link.frames)
    parts: list[str] = []
    for sentence, link in links:
        parts += ["", sentence, ""] if sentence else []
        parts += _traceback(link, fold=fold)
        for index, member in enumerate(link.members, 1):
            text = format_exception(member, folded=folded)
            parts += [f"  ---- member {index} ----", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(parts).rstrip("\n")


def _traceback(exception: ExceptionInfo, *, fold: bool) -> Iterator[str]:
    if exception.frames:
        yield "Traceback (most recent call last):"
    found = group_frames_by_library(exception)
    for number, (library, frames) in enumerate(found, 1):
        if not frames:
            yield f"  ... {library} ..."
        elif library and fold:
            where = f", the last is {format_place(frames[-1])}" if number == len(found) else ""
            yield f"  ... {counted(len(frames), 'frame')} of {library}{where}"
        else:
            for frame in frames:
                yield f'  File "{frame.file}", line {frame.line}, in {frame.function}'
                if frame.code:
                    yield f"    {frame.code}"
    yield f"{exception.type}: {exception.message}" if exception.message else exception.type
    yield from exception.notes
