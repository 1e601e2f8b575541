"""Read the lines of a log of any size in bounded memory and linear time.

Blocks in which no line reports a failure are skipped, except the blocks next to those that do.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import itertools
import lzma
import math
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

from firstfault.errors import BadDocumentError
from firstfault.evidence.signatures import Pattern
from firstfault.layout import RUN_MARK
from firstfault.utils.lazy_pattern import LazyPattern

_BLOCK_BYTES = 256 * 1024
_MAX_LINE_BYTES = 64 * 1024
_MAX_FILES = 20_000
_MAX_FOLDER_DEPTH = 6
_PEEKED_BYTES = 64 * 1024
_HEAD_BYTES = 8 * 1024
"""Bytes by which to decide whether a file is text."""
_MAX_CONTROLS_SHARE = 0.1
"""Share of control characters in a text's first bytes."""
_COMPRESSED: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_ZIP, _TAR = b"PK\x03\x04", b"ustar"
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""With one of them, a text in UTF-16 begins."""
_TAR_MAGIC_OFFSET = 257
"""Where a tar archive has its mark."""
_USUAL_SHARE = 1 / 8
"""Share of a block's lines from which on a word, as in "error=0.01",
doesn't distinguish those about a failure.
"""
_MIN_LINES_FOR_USUAL_WORDS = 100
_BACKSPACES = re.compile("\x08+")
TRACEBACK = "Traceback (most recent call last)"

NumberedLine = tuple[int, str]
"""The number of a line, from 1, and its text without colors and progress bars."""

# The bar of a whole training, or whatever a program calls its outer loop, at its end.
FINISHED_BAR = LazyPattern(r"""(?i)
^\W{0,3}
(?P<name>(?![^|]{0,60}\b(?:eval|valid|test|load|sav|map|data|download|generat|infer|predict))
  [^|\d\n]{0,40}?\b(?:train\w*|fit\w*|total|overall|progress|epochs|steps|iterations)\b[^|\d\n]{0,20}?)
\s*100%\|[^|\n]*\|\s*(?P<step>\d{1,9})/(?P<total>\d{1,9})\s\[[^\]\n]{0,80}\]?
""")

# A bar without a name at its end that took at least a minute.
UNNAMED_BAR = LazyPattern(r"""
^\W{0,3}100%\|[^|\n]*\|\s*(?P<step>\d{2,9})/(?P<total>\d{2,9})\s
\[(?:\d+:\d\d:\d\d|0[1-9]:\d\d|[1-5]\d:\d\d)<[^\]\n]{0,80}\]?
""")

# The last line of a traceback; the lines above may be missing.
EXCEPTION_LINE = LazyPattern(r"""
^\s{0,2}(?P<type>(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Timeout|Exit|Killed))
(?::[ ](?P<message>\S.*))?$
""")

# A frame of a traceback.
FRAME_LINE = LazyPattern(
    r'\s+File[ ]"(?P<file>[^"]+)",[ ]line[ ](?P<line>\d+),[ ]in[ ](?P<function>\S+)'
)

_FAILURE_WORDS = (
    "error",
    "exception",
    "fatal",
    "fail",
    "signal",
    "exit",
    "kill",
    "abort",
    "terminat",
    "cancel",
    "watchdog",
    "timeout",
    "ccl",
    "assert",
    "panic",
    "interrupt",
    "memory",
    "oom",
    "evict",
    "preempt",
    "lost",
    "dead",
    "died",
    "restart",
    "nranks",
    "unhealthy",
    "refused",
    "quota",
    "stalled",
    "crashloop",
)
"""Words in lines that report a failure or the job's size."""
_FAILURE_TEXTS = (
    "traceback",
    r'  file "',
    r"\bsig[a-z]{3,4}\b",
    "timed? out",
    "xid",
    "segfault",
    "core dumped",
    "reset by",
    "no space",
)
"""Expressions of RE2, found, in any case, in such lines, too."""


def open_log(path: Path) -> IO[bytes]:
    """Open a log, compressed or not.

    Raises:
        BadDocumentError: it is compressed with Zstandard, and the package `zstandard` is not
            installed.
        OSError: it cannot be opened.
    """
    with path.open("rb") as stream:
        unpack = _find_unpacking(stream.read(8), str(path))
    return path.open("rb") if unpack is None else unpack(path)


def decompress(stream: io.BufferedReader[Any], name: str) -> IO[bytes]:
    """Return the uncompressed bytes of a stream, or the stream itself; `name` is for the error.

    Raises:
        BadDocumentError: for the same reasons as `open_log`.
    """
    unpack = _find_unpacking(stream.peek(8), name)
    return stream if unpack is None else unpack(stream)


def _find_unpacking(begin: bytes, name: str) -> Callable[[Any], IO[bytes]] | None:
    """Return the function that opens a compressed file with these first bytes, or None if these
    aren't the bytes of a compressed file.
    """
    if begin.startswith(_ZSTANDARD):
        try:
            zstandard = importlib.import_module("zstandard")  # an optional package
        except ImportError as error:
            how = f"pip install zstandard, or give what this prints: zstd -dc {name}"
            raise BadDocumentError(f"{name} is compressed with Zstandard; {how}") from error
        return cast("Callable[[Any], IO[bytes]]", zstandard.open)
    return next((opened for magic, opened in _COMPRESSED.items() if begin.startswith(magic)), None)


def find_unpack_command(begin: bytes, path: str) -> str:
    """Return the command that unpacks an archive, or an empty string if the file isn't one.

    Args:
        begin: the first bytes of the archive, decompressed.
        path: of the file, or "-" for a stream.
    """
    if begin.startswith(_ZIP):
        return f"unzip {shlex.quote(path)}"
    return f"tar xf {shlex.quote(path)}" if begin[_TAR_MAGIC_OFFSET:].startswith(_TAR) else ""


class _Utf8Stream(io.RawIOBase):
    """The bytes of a UTF-16 text as UTF-8."""

    def __init__(self, stream: io.BufferedReader[Any]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._rest = b""

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at most as many bytes as fit. Return their number, which is 0 at the end."""
        while not self._rest:
            data = self._stream.read1(_BLOCK_BYTES)
            self._rest = self._decoder.decode(data, final=not data).encode("utf-8", "replace")
            if not data:
                break
        part = self._rest[: len(buffer)]
        buffer[: len(part)] = part
        self._rest = self._rest[len(part) :]
        return len(part)


def files_below(folder: Path) -> list[Path]:
    """Return the files in a folder, some levels deep, sorted;
    hidden ones and folders without end are left out.
    """
    paths: list[Path] = []
    for parent_name, folders, names in os.walk(folder):
        parent = Path(parent_name)
        is_deep = len(parent.relative_to(folder).parts) >= _MAX_FOLDER_DEPTH
        folders[:] = (
            [] if is_deep else sorted(name for name in folders if not _is_left_out(parent / name))
        )
        paths += [parent / name for name in names if not name.startswith(".")]
        if len(paths) > _MAX_FILES:
            break
    return sorted(path for path in paths[:_MAX_FILES] if path.is_file())


def _is_left_out(folder: Path) -> bool:
    """Whether a folder is hidden, or has what firstfault recorded of a job: documents,
    which are no logs.
    """
    is_record = folder.name == "firstfault" and (
        (folder / "roster").is_dir() or (folder / "verdict.pb").is_file()
    )
    return folder.name.startswith(".") or is_record or (folder / RUN_MARK).is_file()


class NoTextError(Exception):
    """A file isn't a text."""

    def __init__(self, begin: bytes) -> None:
        super().__init__()
        self.begin = begin
        """Its first bytes, decompressed."""


def _is_text(begin: bytes) -> bool:
    """Whether a file that begins so is a text."""
    controls = sum(
        byte < 8 or 13 < byte < 27 or byte in {28, 29, 30, 31, 127}  # noqa: PLR2004
        for byte in begin[:_HEAD_BYTES]
    )
    return b"\0" not in begin[:_HEAD_BYTES] and controls <= _MAX_CONTROLS_SHARE * max(
        len(begin[:_HEAD_BYTES]), 1
    )


@cache
def _failure_pattern(usual: frozenset[str]) -> Pattern:
    words = (word for word in _FAILURE_WORDS if word not in usual)
    return Pattern("|".join((*words, *_FAILURE_TEXTS)))


def has_failure_word(text: str) -> bool:
    """Whether a text has a word that reports of failures have."""
    return _failure_pattern(frozenset()).search(text) is not None


class _FailureFilter:
    """Decides which blocks report a failure. A word that many lines of a block have
    doesn't count in that block.
    """

    def __init__(self) -> None:
        self._usual: frozenset[str] = frozenset()
        """Words that many lines of the last block had."""

    def reports_failure(self, block: bytes) -> bool:
        is_found = _failure_pattern(self._usual).search(block) is not None
        if not is_found and not self._usual:
            return False
        text = block.lower()
        lines = block.count(b"\n")
        enough = max(lines * _USUAL_SHARE, 1) if lines >= _MIN_LINES_FOR_USUAL_WORDS else math.inf
        if not is_found:
            # a usual word that is rare in this block may report a failure again
            counts = {word: text.count(word.encode()) for word in self._usual}
            if all(count == 0 or count >= enough for count in counts.values()):
                return False
        self._usual = frozenset(
            word for word in _FAILURE_WORDS if text.count(word.encode()) >= enough
        )
        return _failure_pattern(self._usual).search(block) is not None


def lines_of(stream: IO[bytes], *, reads_all: bool = False) -> Iterator[NumberedLine]:
    """Yield the lines of a log, without blocks in which no line reports a failure. What
    is cut off ends the log.

    Args:
        stream: of the log; it stays open.
        reads_all: yield the lines of all blocks.

    Raises:
        NoTextError: its first bytes aren't those of a text.
    """
    buffered = io.BufferedReader(cast("io.RawIOBase", stream), _PEEKED_BYTES)
    try:
        text = buffered
        if buffered.peek().startswith(_UTF16_MARKS):
            text = io.BufferedReader(_Utf8Stream(buffered), _PEEKED_BYTES)
        begin = text.peek()
        if not _is_text(begin):
            raise NoTextError(begin)
        yield from _lines_of_text(text, reads_all=reads_all)
    finally:
        buffered.detach()


def _lines_of_text(stream: IO[bytes], *, reads_all: bool) -> Iterator[NumberedLine]:
    number = 1
    skipped: tuple[int, bytes] | None = (
        None  # the block before and its first line, if it reports no failure
    )
    follows_report = True
    block_filter = _FailureFilter()
    for block in _blocks(stream):
        reports_failure = reads_all or block_filter.reports_failure(block)
        if reports_failure and skipped is not None:
            yield from _numbered(skipped[1], skipped[0])
        skipped = None if reports_failure or follows_report else (number, block)
        if skipped is None:
            yield from _numbered(block, number)
        number, follows_report = number + block.count(b"\n"), reports_failure
    if skipped is not None:
        yield from _numbered(skipped[1], skipped[0])


def _blocks(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield blocks of whole lines; of a line that is too long the middle is left out."""
    unfinished_line = b""
    read = getattr(stream, "read1", stream.read)
    with suppress(EOFError, OSError, zlib.error, lzma.LZMAError):  # half of a compressed file
        while chunk := read(_BLOCK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if end:
                yield unfinished_line + chunk[:end]
                unfinished_line = chunk[end:]
            else:
                unfinished_line += chunk
            if len(unfinished_line) > _MAX_LINE_BYTES:
                unfinished_line = (
                    unfinished_line[: _MAX_LINE_BYTES // 2]
                    + unfinished_line[-_MAX_LINE_BYTES // 2 :]
                )
    if unfinished_line:
        yield unfinished_line + b"\n"


def _numbered(block: bytes, number: int) -> Iterator[NumberedLine]:
    text = block.decode("utf-8", "replace")
    if "\b" in text:  # some progress bars go back to the begin of the line by backspaces
        text = _BACKSPACES.sub("\r", text)
    has_colors = "\x1b" in text
    has_bars = "%|" in text
    has_returns = "\r" in text
    for line_number, full_line in enumerate(text[:-1].split("\n"), number):
        line = without_colors(full_line) if has_colors else full_line
        if len(line) > _MAX_LINE_BYTES:
            line = line[: _MAX_LINE_BYTES // 2] + line[-_MAX_LINE_BYTES // 2 :]
        if (has_bars or has_returns) and '{"' not in line[:_HEAD_BYTES]:
            yield from ((line_number, part) for part in without_bars(line))
        else:
            yield line_number, line


# A terminal's escape sequences.
_ESCAPE_SEQUENCE = LazyPattern(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\n]*\x07|\x1b[()][A-B0-2]")


def without_colors(line: str) -> str:
    """Return a line without a terminal's escape sequences."""
    return _ESCAPE_SEQUENCE.sub("", line)


# A progress bar of tqdm, which another process may have written on after.
_PROGRESS_BAR = LazyPattern(r"^[^|\n]{0,80}?\d{1,3}%\|[^|\n]*\|\s*\S{1,40}\s\[[^\]\n]{0,80}\]\s?")


def without_bars(line: str) -> Iterator[str]:
    """Yield what a terminal would show of a line, without progress bars,
    on which another process may have written.

    The bar of an outer loop at its end is kept: it shows that the work is done. So is a long one
    without a name, which may be of the outer loop.
    """
    if "\r" in line or "%|" in line:
        for part in line.split("\r"):
            if "100%|" in part:
                bar = FINISHED_BAR.match(part) or UNNAMED_BAR.match(part)
                if bar is not None:
                    yield bar[0]
            if (rest := _PROGRESS_BAR.sub("", part)).strip():
                yield rest
    else:
        yield line


def read_ahead(
    lines: Iterable[NumberedLine], count: int
) -> tuple[list[NumberedLine], Iterator[NumberedLine]]:
    """Return the first lines, and an iterator over all, these included."""
    remaining_lines = iter(lines)
    first = list(itertools.islice(remaining_lines, count))
    return first, itertools.chain(first, remaining_lines)
