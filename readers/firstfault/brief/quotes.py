"""Lines of logs as they are quoted: without credentials, numbered, cut to a width,
similar ones folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from firstfault.brief.digest import QuotedLine
from firstfault.brief.folding import drop_library_frames, make_template
from firstfault.credentials import redact
from firstfault.render.markdown import HOME_FOLDER
from firstfault.utils.text import counted, printable
from firstfault.wire.json_schemas import format_timestamp

MAX_LINE_CHARS = 240
_MAX_SIMILAR_LINES = 2
"""Similar lines that a block quotes: the first and the last one."""


def cut(text: str, limit: int = MAX_LINE_CHARS) -> str:
    """Return a line without control characters, at most `limit` characters: its beginning,
    and a little of its end.
    """
    line = printable(text).replace("\t", "  ").rstrip()
    if len(line) <= limit:
        return line
    end = limit // 4
    return f"{line[: limit - end - 5]} ... {line[-end:]}"


def hide_secrets(lines: Sequence[QuotedLine]) -> list[QuotedLine]:
    """Return lines without credentials and home folders;
    a credential may be longer than one line.
    """
    texts = redact("\n".join(line.text for line in lines)).split("\n")
    if len(texts) != len(lines):  # a key of several lines became one
        return [
            line._replace(text=HOME_FOLDER.sub("~", text))
            for line, text in zip(lines, _one_by_one(lines), strict=True)
        ]
    return [
        line._replace(text=HOME_FOLDER.sub("~", text))
        for line, text in zip(lines, texts, strict=True)
    ]


def _one_by_one(lines: Sequence[QuotedLine]) -> Iterator[str]:
    """Yield each line without credentials; nothing of a block that begins and ends with dashes,
    such as a key.
    """
    within = False
    for line in lines:
        begins = "-----BEGIN " in line.text
        ends = "-----END " in line.text
        yield "***" if within or begins else redact(line.text)
        within = (within or begins) and not ends


def number_lines(lines: Iterable[QuotedLine], *, with_files: bool) -> Iterator[str]:
    """Yield lines with their numbers, `with_files` also with a line for each change of the file."""
    file = ""
    for line in lines:
        if with_files and line.file != file:
            file = line.file
            yield f"{file}:"
        yield format_numbered(line)


def format_numbered(line: QuotedLine, limit: int = MAX_LINE_CHARS) -> str:
    """Return a line with its number and who printed it: "412 [rank 3]: loss nan";
    without a number as it is.

    Args:
        line: the line.
        limit: characters of its text.
    """
    who = f" [{line.process}]" if line.process else ""
    return f"{line.number}{who}: {cut(line.text, limit)}" if line.number else cut(line.text, limit)


def fold_similar(lines: Sequence[QuotedLine]) -> list[QuotedLine]:
    """Return the lines. Of many lines that differ only in numbers, return only the first and the
    last, and append their count to the last.
    """
    templates = [make_template(line.text) for line in lines]
    counts = Counter(templates)
    seen = Counter[str]()
    kept = []
    for line, template in zip(lines, templates, strict=True):
        seen[template] += 1
        count = counts[template]
        if seen[template] == 1 or count <= _MAX_SIMILAR_LINES:
            kept.append(line)
        elif seen[template] == count:
            kept.append(
                line._replace(
                    text=(
                        f"{cut(line.text, MAX_LINE_CHARS - 40)} "
                        f" (+{counted(count - 2, 'similar line')})"
                    )
                )
            )
    return kept


def shorten_traceback(lines: Sequence[QuotedLine], max_lines: int) -> list[QuotedLine]:
    """Return a traceback without marks and, if it's long, without libraries' frames."""
    return [lines[at] for at in drop_library_frames([line.text for line in lines], max_lines)]


def format_clock(time_ns: int | None) -> str:
    """Return the time of day, "21:28:50.537"; empty if unknown."""
    text = format_timestamp(time_ns) or ""
    return text[11:23].removesuffix(".000")


def format_date(time_ns: int | None) -> str:
    """Return the date; empty if unknown."""
    return (format_timestamp(time_ns) or "")[:10]
