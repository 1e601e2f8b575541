"""Stderr without the traceback of the exception that a document has as data."""

from __future__ import annotations

import re
from collections.abc import Sequence

from firstfault.exceptions.exceptions_in_text import EXCEPTION_LINE, get_short_name, unwrap_remote_exception
from firstfault.exceptions.first_cause import iter_exceptions
from firstfault.exceptions.printed_tracebacks import CHAIN_SENTENCE, GROUP_GUTTER, TRACEBACK_HEADER
from firstfault.exceptions.stderr_lines import RANK_PREFIX
from firstfault.model import ExceptionInfo


def remove_traceback(text: str, exception: ExceptionInfo) -> str:
    """Return a stderr tail without the tracebacks of an exception and its causes.

    The lines around them stay, and so do the tracebacks of other exceptions. The text may begin in the middle of a
    traceback.
    """
    lines = text.splitlines()
    bare_lines = [RANK_PREFIX.sub("", line) for line in lines]
    chain = [item for link in iter_exceptions(exception) for item in (link, unwrap_remote_exception(link))]
    names = {get_short_name(link) for link in chain}
    first_lines = {line for link in chain for line in link.message.splitlines()[:1]} | {""}
    texts = {line.strip() for link in chain for line in (*link.message.splitlines(), *link.notes)} | {""}
    kept: list[str] = []
    start = 0
    while start < len(lines):
        end, raised = _find_traceback_end(bare_lines, start)
        types = [match for match in raised if match["type"].rsplit(".", 1)[-1] in names]
        if any((match["message"] or "") in first_lines for match in types):
            # the rest of the message, notes, and the sentence between two tracebacks
            while end < len(lines) and (bare_lines[end].strip() in texts or CHAIN_SENTENCE.match(bare_lines[end])):
                end += 1
        else:
            end = max(end, start + 1)
            kept += lines[start:end]
        start = end
    return "\n".join(kept).strip("\n")


def _find_traceback_end(lines: Sequence[str], start: int) -> tuple[int, list[re.Match[str]]]:
    """Return where the traceback at a line ends, and its lines with exceptions; `start` if there is no traceback."""
    match = TRACEBACK_HEADER.match(lines[start])
    # a stderr tail may begin within a traceback
    is_cut = start == 0 and lines[0][:1].isspace()
    if not is_cut and (match is None or match["above"]):
        return start, []
    end = start + 1
    while end < len(lines) and (lines[end][:1].isspace() or not lines[end].strip()):
        end += 1
    is_group = match is not None and match["group"]
    end = end if is_group else min(end + 1, len(lines))
    if is_cut and not any(line.lstrip().startswith('File "') for line in lines[start:end]):
        return start, []
    raised_lines = lines[start:end] if is_group else lines[end - 1 : end]
    return end, [
        raised for line in raised_lines if (raised := EXCEPTION_LINE.match(GROUP_GUTTER.sub("", line, count=1)))
    ]
