"""Finds an exception's traceback in what its process printed, so that no report quotes it twice."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from firstfault.exceptions.first_cause import all_links
from firstfault.exceptions.remote_traceback import original_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from firstfault.model import ExceptionInfo

_RANK = re.compile(r"^(?:\[rank\d+\]:\s?)+")
"""What torch puts before each line of a traceback."""
_BEGINS = re.compile(r"^\s*(?:\+ Exception Group )?Traceback \(most recent call last\):")
_RAISED = re.compile(r"^(?:\s*\| )?(?P<type>[A-Za-z_][\w.]*)(?::\s(?P<text>.*))?$")
_FRAME = re.compile(r'^\s+File "[^"]+", line \d+')
_BETWEEN = re.compile(r"^(?:The above exception was the direct cause|During handling of the above exception)")


def without_traceback(text: str, exception: ExceptionInfo) -> str:
    """Return what a process printed, without the tracebacks of `exception` and of what it was raised from.

    Lines before and after them stay, and so do the tracebacks of other exceptions. The text may begin in the middle of
    a traceback.
    """
    lines = text.splitlines()
    bare = [_RANK.sub("", line) for line in lines]
    chain = list(_chain(exception))
    names = {_short(link.type) for link in chain}
    first = {line for link in chain for line in link.message.splitlines()[:1]} | {""}
    said = {line.strip() for link in chain for line in (*link.message.splitlines(), *link.notes)} | {""}
    kept: list[str] = []
    at = 0
    while at < len(lines):
        end, raised, texts = _block(bare, at)
        if raised & names and texts & first:
            rest = itertools.takewhile(lambda line: line.strip() in said or _BETWEEN.match(line), bare[end:])
            at = end + sum(1 for _ in rest)
        else:
            kept += lines[at : max(end, at + 1)]
            at = max(end, at + 1)
    return "\n".join(kept).strip("\n")


def _block(lines: Sequence[str], begin: int) -> tuple[int, set[str], set[str]]:
    """Return where the traceback at a line ends, its exceptions' names and their texts; no names if there is none."""
    is_cut = begin == 0 and lines[0][:1].isspace()
    if not is_cut and not _BEGINS.match(lines[begin]):
        return begin, set(), set()
    end = begin + 1
    while end < len(lines) and (lines[end][:1].isspace() or not lines[end].strip()):
        end += 1
    is_group = "Exception Group" in lines[begin]
    end = end if is_group else min(end + 1, len(lines))
    if is_cut and not any(_FRAME.match(line) for line in lines[begin:end]):
        return begin, set(), set()
    found = [_RAISED.match(line) for line in (lines[begin:end] if is_group else lines[end - 1 : end])]
    known = [match for match in found if match is not None]
    return end, {_short(match["type"]) for match in known}, {match["text"] or "" for match in known}


def _short(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _chain(exception: ExceptionInfo) -> Iterator[ExceptionInfo]:
    for link in all_links(exception):
        yield link
        if (original := original_of(link)) is not link:
            yield original
