"""Looks for bytes that make a reader raise: libFuzzer, by atheris, over files, names,
texts and a whole attempt.

``make fuzz ARGS="--seconds 300"`` installs atheris if it is missing, and runs this; each target
runs so long. Inputs that found new code are kept in build/fuzz; one that raises, or that takes
longer than 20 s, is left there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import atheris

with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["firstfault"]):
    from firstfault.errors import BadDocumentError
    from firstfault.evidence.texts import classify
    from firstfault.layout import ErrorKey, RosterKey, error_key_for, roster_key_for
    from firstfault.model import DocumentRef, Phase, SentSignal
    from firstfault.output_reader import MultiErrorFileOutputReader
    from firstfault.render.flyte_message import flyte_message
    from firstfault.render.html import page
    from firstfault.render.json_report import json_report
    from firstfault.render.markdown import markdown
    from firstfault.render.terminal import terminal_text
    from firstfault.testing import make_error, make_presence
    from firstfault.utils.stored_text import clean
    from firstfault.utils.text import one_line, printable
    from firstfault.wire.documents import (
        decode,
        decode_presence,
        encode,
        encode_presence,
        pack,
        unpack,
    )
    from firstfault.wire.json_schemas import from_json, restart_from_json

_FOLDER = Path("build/fuzz")
_ERROR = make_error(3, node="w-1", group_rank=1, world_size=4, pid=99)
_KILLED = make_error(
    1,
    node="w-0",
    exception=None,
    signal="SIGKILL",
    sent_signals=(SentSignal("SIGKILL", "late"),),
)
_ENTRY = make_presence(Phase.FAILED, node="w-1", group_rank=1, nodes=2, ranks=(2, 3))
_PATHS = (
    f"firstfault/errors/{error_key_for(_ERROR)}",
    f"firstfault/errors/{error_key_for(_KILLED)}",
    "firstfault/errors/other.pb",
    f"firstfault/roster/{roster_key_for(_ENTRY)}",
    "firstfault/roster/decision-round-00000-0000000.json",
    "error.pb",
)
_BETWEEN = b"\x00--\x00"
"""Between two files of an attempt."""


def _reader(data: bytes) -> None:
    files = {
        path.decode("utf-8", "surrogateescape"): content
        for path, _, content in (part.partition(b"\x00") for part in data.split(_BETWEEN))
    }
    reader = MultiErrorFileOutputReader("memory://fuzz", copies=files)
    conclusion = reader.conclude_from(reader.read_copies("only copies"))
    if conclusion is None:
        return
    report = reader.report(conclusion)
    for draw in (flyte_message, terminal_text, markdown, json_report, page):
        draw(report)


def _wire(data: bytes) -> None:
    for read in (
        lambda: decode(data, DocumentRef("e1.pb")),
        lambda: decode_presence(data, "r1.pb"),
        lambda: unpack(data),
    ):
        with contextlib.suppress(BadDocumentError):
            read()
    restart_from_json(data)
    from_json(data.decode("utf-8", "surrogateescape"))


def _keys(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for name in (text, f"e1-{text}.pb", f"r1-{text}.pb"):
        key = ErrorKey.parse(name) or RosterKey.parse(name)
        if key is not None and str(key) != name:
            raise AssertionError(f"{name} is not {key}")


def _signatures(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    found = classify(text, "RuntimeError")
    if not found.why:
        raise AssertionError("a text without a reason")
    if any(
        character < " " for character in one_line(text).replace("\t", " ")
    ) or "\x1b" in printable(text):
        raise AssertionError("a control character was left")
    clean(text, 100).encode()


_CASCADES = [
    {name: archive.read(name) for name in archive.namelist() if name != "truth.json"}
    for archive in map(
        zipfile.ZipFile, sorted(Path("lab/cascades/recorded").glob("*-of4.zip"))[::10]
    )
]
"""Some of the lab's."""
_FILES = dict(
    zip(_PATHS, (encode(_ERROR), encode(_KILLED), b"", encode_presence(_ENTRY)), strict=False)
)
_TARGETS = {
    "wire": (
        _wire,
        (
            *(content for files in (_FILES, *_CASCADES) for content in files.values()),
            pack(_FILES),
            b'{"schema":"firstfault.verdict/v1"}',
        ),
    ),
    "keys": (_keys, tuple(path.rpartition("/")[2].encode() for path in _PATHS)),
    "signatures": (
        _signatures,
        Path("tests/readers/texts_without_credentials.txt").read_bytes().splitlines(),
    ),
    "reader": (
        _reader,
        tuple(
            _BETWEEN.join(path.encode() + b"\x00" + content for path, content in files.items())
            for files in (_FILES, *_CASCADES)
        ),
    ),
}
"""What is called with bytes, and the first ones."""


def _fuzz(name: str, how: list[str]) -> None:
    target, seeds = _TARGETS[name]
    corpus = _FOLDER / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    logging.disable()  # most inputs are worth a warning
    atheris.Setup([sys.argv[0], *how], target)
    atheris.Fuzz()


def _tried(name: str, seconds: int) -> int:
    """Fuzz in a process of its own, which libFuzzer ends; return the number of inputs tried."""
    how = (
        f"-max_total_time={seconds}",
        "-max_len=32768",
        "-timeout=20",
        "-print_final_stats=1",
        f"-artifact_prefix={_FOLDER}/{name}-",
    )
    done = subprocess.run(
        (sys.executable, __file__, "--target", name, *how, str(_FOLDER / name)),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    if done.returncode or executed is None:
        sys.exit(f"{name}:\n{done.stderr[-4000:]}")
    return int(executed[1])


def main() -> None:
    """Fuzz for some seconds, or try files again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=15, help="for each target")
    parser.add_argument(
        "--target",
        choices=_TARGETS,
        help="only this one, with libFuzzer's own options or files to try",
    )
    given, how = parser.parse_known_args()
    if given.target and how:
        _fuzz(given.target, how)
    total = 0
    for name in [given.target] if given.target else _TARGETS:
        tried = _tried(name, given.seconds)
        total += tried
        print(f"{name:<12} {tried:>12,} inputs in {given.seconds} s, none raised", flush=True)
    print(f"{'together':<12} {total:>12,}")


if __name__ == "__main__":
    main()
