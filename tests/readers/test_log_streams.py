"""``firstfault show -`` on streams: compressed logs, archives, other encodings,
and the outcome in the JSON.
"""

import bz2
import gzip
import io
import json
import lzma
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from firstfault.cli import EXIT
from tests.readers.commands import Ran
from tests.readers.test_log_verdicts import RAISED, STEPS, add_prefix

LOG = "\n".join([*STEPS, *add_prefix("[rank3]: ", RAISED), ""]).encode()
_FORMS = (
    gzip.compress(LOG),
    bz2.compress(LOG),
    lzma.compress(LOG),
    LOG.decode().encode("utf-16"),
    LOG,
)


def _show(data: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "firstfault", "show", "-", *options]
    return subprocess.run(command, input=data, capture_output=True, check=False)


@pytest.mark.parametrize("data", _FORMS, ids=["gz", "bz2", "xz", "utf-16", "plain"])
def test_a_stream_is_decompressed_and_decoded_like_a_file(
    data: bytes, run: Callable[..., Ran], tmp_path: Path
) -> None:
    """A stream is decompressed and decoded as a file is, also for a brief, which reads it twice."""
    ran = _show(data)
    assert (ran.returncode, b"rank 3" in ran.stdout) == (EXIT.ROOT_CAUSE, True)
    assert b"no labels in shard 9" in _show(data, "--brief").stdout
    (tmp_path / "job.log").write_bytes(data)
    assert "rank 3" in run("show", str(tmp_path / "job.log")).out


def test_an_archive_or_binary_on_stdin_is_refused_like_a_file() -> None:
    """An archive and a binary get the messages that files get."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        entry = tarfile.TarInfo("job.log")
        entry.size = len(LOG)
        tar.addfile(entry, io.BytesIO(LOG))
    for data, message in (
        (archive.getvalue(), b"stdin is an archive; unpack it first (tar xf -)"),
        (b"\x7fELF\x02\x01\x01" + bytes(300), b"stdin is neither an error document nor a text"),
        (b"P\x00\x01" * 200, b"stdin is neither an error document nor a text"),
    ):
        ran = _show(data)
        assert (ran.returncode, ran.stdout) == (EXIT.TOOL_FAILED, b"")
        assert message in ran.stderr


def test_json_distinguishes_success_unknown_failure_and_missing_file(
    run: Callable[..., Ran], tmp_path: Path
) -> None:
    """The JSON distinguishes a success, an end that isn't known, a failure and a missing file."""
    (tmp_path / "empty").mkdir()
    for name, lines in (
        ("good", [*STEPS, "Training completed"]),
        ("cut", STEPS),
        ("bad", [*STEPS, *RAISED]),
    ):
        (tmp_path / f"{name}.log").write_text("\n".join(lines), encoding="utf-8")
    wanted = {
        "good.log": "succeeded",
        "cut.log": "unknown",
        "bad.log": "failed",
        "none.log": "not found",
        "empty": "unknown",
    }
    found = {
        name: json.loads(run("show", "--json", str(tmp_path / name)).out)["outcome"]
        for name in wanted
    }
    assert found == wanted
    assert "the folder is empty" in run("show", str(tmp_path / "empty")).err
