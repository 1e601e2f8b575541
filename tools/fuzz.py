"""Looks for bytes that make a reader raise: libFuzzer, by atheris, over files, names, texts and a whole attempt.

``make fuzz ARGS="--seconds 300"`` installs atheris if it is missing, and runs this. Inputs that found new code are kept
in build/fuzz; one that raises is left there as crash-*.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["firstfault"]):
    from firstfault.errors import BadDocumentError
    from firstfault.evidence.text_classification import classify
    from firstfault.layout.keys import ErrorKey, RosterKey, error_key_for, roster_key_for
    from firstfault.model import DocumentRef, Phase, SentSignal
    from firstfault.output_reader import MultiErrorFileOutputReader
    from firstfault.render.flyte_message import flyte_message
    from firstfault.render.html import page
    from firstfault.render.json_report import json_report
    from firstfault.render.markdown import markdown
    from firstfault.render.terminal import terminal_text
    from firstfault.testing import make_error, make_presence
    from firstfault.text import clean, one_line, printable
    from firstfault.wire.bundle import pack, unpack
    from firstfault.wire.documents import decode, decode_presence, encode, encode_presence
    from firstfault.wire.restart_json import restart_from_json
    from firstfault.wire.verdict_json import decision_from_json, verdict_from_json

_FOLDER = Path("build/fuzz")
_ERROR = make_error(3, node="w-1", group_rank=1, world_size=4, pid=99)
_KILLED = make_error(1, node="w-0", exception=None, signal="SIGKILL", sent_signals=(SentSignal("SIGKILL", "late"),))
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


def _whole_attempt(data: bytes) -> None:
    files = {path: part for path, part in zip(_PATHS, data.split(_BETWEEN), strict=False) if part}
    reader = MultiErrorFileOutputReader("memory://fuzz", copies=files)
    conclusion = reader.conclude_from(reader.job_of_copies("only copies"))
    if conclusion is None:
        return
    report = reader.report(conclusion)
    for draw in (flyte_message, terminal_text, markdown, json_report, page):
        draw(report)


def _parts(data: bytes) -> None:
    for read in (
        lambda: decode(data, DocumentRef("e1.pb")),
        lambda: decode_presence(data, "r1.pb"),
        lambda: unpack(data),
    ):
        with contextlib.suppress(BadDocumentError):
            read()
    restart_from_json(data)
    text = data.decode("utf-8", "surrogateescape")
    for name in (text, f"e1-{text}.pb", f"r1-{text}.pb"):
        key = ErrorKey.parse(name) or RosterKey.parse(name)
        if key is not None and str(key) != name:
            raise AssertionError(f"{name} is not {key}")
    verdict_from_json(text)
    decision_from_json(text)
    found = classify(text, "RuntimeError")
    if not found.why:
        raise AssertionError("a text without a reason")
    if any(character < " " for character in one_line(text).replace("\t", " ")) or "\x1b" in printable(text):
        raise AssertionError("a control character was left")
    clean(text, 100).encode()


def _target(data: bytes) -> None:
    (_whole_attempt if data[:1] < b"\x80" else _parts)(data[1:])


def _seeds() -> list[bytes]:
    files = [encode(_ERROR), encode(_KILLED), b"", encode_presence(_ENTRY)]
    alone = [*files, pack({"errors/a": b"x"}), b'{"schema":"firstfault.verdict/v1"}', error_key_for(_ERROR).encode()]
    return [b"\x00" + _BETWEEN.join(files), *(b"\xff" + part for part in alone)]


def main() -> None:
    """Fuzz for some seconds."""
    logging.disable()  # most inputs are worth a warning
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("input", nargs="*", help="files to try once, such as build/fuzz/crash-*")
    given = parser.parse_args()
    corpus = _FOLDER / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(_seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    how = given.input or [f"-max_total_time={given.seconds}", "-max_len=8192", "-timeout=20", str(corpus)]
    atheris.Setup([sys.argv[0], f"-artifact_prefix={_FOLDER}/", *how], _target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
