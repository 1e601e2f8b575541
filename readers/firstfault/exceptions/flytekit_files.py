"""Exceptions in the error files of Flyte's entrypoint, which has only text."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

from firstfault.exceptions.printed_tracebacks import find_printed_exception
from firstfault.model import ExceptionInfo

OUTPUT_CONVERSION = "_output_to_literal_map"
"""flytekit's function that converts what a task returned; it calls no code of the task."""
_TRACE = re.compile(r"\ATrace:\n\n(?P<trace>.*?)\n+Message:\n", re.DOTALL)
_CONVERSION_ERROR = re.compile(
    r"\AFailed to convert outputs of task '[^'\n]*' at position [^\n]*\.\n"
    r"(?:[^\n]*\n)?Error Message: (?P<text>.*?)\.?\Z",
    re.DOTALL,
)
"""flytekit puts the exception's own text behind its advice."""


def find_output_error(message: str) -> ExceptionInfo | None:
    """Return the exception that flytekit raised when it converted the values that a task returned,
    or None if the file is about something else.
    """
    if OUTPUT_CONVERSION not in message or (match := _TRACE.match(message)) is None:
        return None
    printed = find_printed_exception(textwrap.dedent(match["trace"]))
    if printed is None or not _converts_outputs(printed.exception):
        return None
    exception = printed.exception
    reason = _CONVERSION_ERROR.match(exception.message)
    return replace(exception, message=reason["text"]) if reason is not None else exception


def is_output_error(exception: ExceptionInfo | None) -> bool:
    """Whether an exception is one that `find_output_error` returns."""
    return exception is not None and _converts_outputs(exception)


def _converts_outputs(exception: ExceptionInfo) -> bool:
    return any(
        frame.function == OUTPUT_CONVERSION and "flytekit" in frame.file
        for frame in exception.frames
    )
