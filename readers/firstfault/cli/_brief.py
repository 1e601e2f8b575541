"""``firstfault show --brief``: what firstfault concludes, and the lines that show why,
for a language model.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from firstfault.attempt import Attempt, digest_logs
from firstfault.brief import Subject, build_brief, find_ranges
from firstfault.cli import _support as cli

if TYPE_CHECKING:
    import io


def copy_stream(stream: io.BufferedReader) -> IO[bytes]:
    """Return a temporary file with the bytes of a stream, which can be read twice."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - read until the process ends
    shutil.copyfileobj(stream, file)
    file.seek(0)
    return file


def print_brief(read: Attempt, subject: Subject) -> None:
    """Print the brief on an attempt."""
    streams = [source for source in read.sources if not isinstance(source, Path)]
    for stream in streams:
        stream.seek(0)
    digest = digest_logs(read.sources, find_ranges(subject))
    for stream in streams:
        stream.close()
    cli.echo(build_brief(subject, digest).rstrip("\n"))
