"""Stderr without the traceback that the document has as an exception."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from firstfault.exceptions.exceptions_in_text import RAISED, get_short_name, unwrap_remote_exception
from firstfault.exceptions.first_cause import iter_exceptions
from firstfault.exceptions.printed_tracebacks import CHAIN_SENTENCE, GROUP_GUTTER, TRACEBACK_HEADER
from firstfault.exceptions.stderr_lines import RANK_PREFIX
from firstfault.model import ExceptionInfo


def remove_traceback(text: str, exception: ExceptionInfo) -> str:
    """Return what a process printed, without the tracebacks of `exception` and of what it was raised from.

    Lines before and after them stay, and so do the tracebacks of other exceptions. The text may begin in the middle of
    a traceback.
    """
    lines = text.splitlines()
    bare = [RANK_PREFIX.sub("", line) for line in lines]
    chain = [one for link in iter_exceptions(exception) for one in (link, unwrap_remote_exception(link))]
    names = {get_short_name(link) for link in chain}
    first = {line for link in chain for line in link.message.splitlines()[:1]} | {""}
    said = {line.strip() for link in chain for line in (*link.message.splitlines(), *link.notes)} | {""}
    kept: list[str] = []
    at = 0
    while at < len(lines):
        end, raised = _block(bare, at)
        if any(match["type"].rsplit(".", 1)[-1] in names and (match["message"] or "") in first for match in raised):
            end += sum(
                1
                for _ in itertools.takewhile(
                    lambda line: line.strip() in said or CHAIN_SENTENCE.match(line), bare[end:]
                )
            )
        else:
            end = max(end, at + 1)
            kept += lines[at:end]
        at = end
    return "\n".join(kept).strip("\n")


def _block(lines: Sequence[str], begin: int) -> tuple[int, list[re.Match[str]]]:
    """Return where the traceback at a line ends, and the lines that name its exceptions; none if there is none."""
    match = TRACEBACK_HEADER.match(lines[begin])
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
    return end, [raised for line in named if (raised := RAISED.match(GROUP_GUTTER.sub("", line, count=1)))]
