"""Fenced blocks of a Markdown page, with the comments that say how `make pages` runs them.

A comment stands alone on the line before a block, or before another such comment:

- ``<!-- not run: REASON -->``: the block's commands need what one machine doesn't have.
- ``<!-- not in CI: REASON -->``: `make pages` runs it; in CI another step does.
- ``<!-- exit code N: REASON -->``: the last command of the block ends with this exit code.
- ``<!-- output of: COMMAND -->``: the block shows what this command of the page prints.
- ``<!-- file: NAME -->``: a reader saves the block under this name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
"""A block: its language and its text. Blocks in lists are indented, and no block here."""
COMMAND_LANGUAGES = ("console", "bash", "sh")
_NOTE = re.compile(r"<!-- (not run|not in CI|exit code|output of|file):? ?(.*?) -->")
_NOTES_BEFORE = re.compile(r"(?:^<!-- [^\n]* -->\n)+\Z", re.MULTILINE)
_EXIT_CODE = re.compile(r"(\d+): .+")


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is the number of its first line of text in the page, from 1."""

    language: str
    text: str
    line: int
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """Whether a reader pastes it into a shell."""
        return self.language in COMMAND_LANGUAGES

    @property
    def exit_code(self) -> int | None:
        """The documented exit code of the last command; None: not stated.

        Raises:
            ValueError: the comment has no number, or no reason.
        """
        if "exit code" not in self.notes:
            return None
        match = _EXIT_CODE.fullmatch(self.notes["exit code"])
        if match is None:
            raise ValueError(f"line {self.line}: expected <!-- exit code N: REASON -->")
        return int(match[1])

    def find_reason_to_skip(self, *, is_ci: bool) -> str | None:
        """Return why the commands aren't run; None: they are."""
        return self.notes.get("not run") or (self.notes.get("not in CI") if is_ci else None)

    def find_commands(self) -> list[str]:
        """Return the commands: one for each line, and one for lines that a backslash continues."""
        joined = re.findall(r"(?:.*\\\n)*.+", self.text)
        return [command for command in joined if not command.lstrip().startswith("#")]


def find_blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page's text, in order.

    Raises:
        ValueError: a comment before a block isn't one of those above, or gives no reason.
    """
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start()) + 2
        before = _NOTES_BEFORE.search(page, 0, match.start())
        notes = {}
        for comment in before[0].splitlines() if before is not None else ():
            note = _NOTE.fullmatch(comment)
            if note is None or not note[2]:
                raise ValueError(f"line {line}: {comment} isn't listed in tools/pages/blocks.py")
            notes[note[1]] = note[2]
        yield Block(match[1], match[2], line, notes)
