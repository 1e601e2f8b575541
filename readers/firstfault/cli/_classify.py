"""The command ``classify``: what one error text means."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from firstfault.cli._support import EXIT, debug_option
from firstfault.errors import UsageError
from firstfault.utils.text import parse_json


@click.command()
@click.option(
    "--signatures",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="A TOML file of signatures, matched before the built-in ones; may be repeated.",
)
@debug_option
def classify(files: tuple[str, ...]) -> int:
    """Classify error texts: a fault of the process that wrote the text, or a reaction to another
    one.

    Reads JSON lines {"id", "exception_type", "message"} on stdin, writes for each {"id", "role",
    "category", "pointer", "signature"}: role is primary (the process's own fault), secondary (a
    reaction to another failure) or ambiguous; pointer is the peer that the text names, or null.

    \b
    Examples:
      echo '{"id": 1, "message": "Connection closed by peer [10.0.0.7]:4242"}' | firstfault classify
      firstfault classify --signatures ours.toml < errors.jsonl
    """  # noqa: D301 - click's mark of lines to keep
    from firstfault.evidence import (  # noqa: PLC0415 - `--help` needs none of these
        built_in_signatures,
        load_signatures,
    )
    from firstfault.evidence import classify as classified  # noqa: PLC0415

    signatures = built_in_signatures()
    # each file is put in front, so the first FILE of the command line is matched first
    for file in reversed(files):
        signatures = load_signatures(file) + signatures
    for number, row in _iter_rows():
        message = _format_cell(row, "message", number)
        kind = _format_cell(row, "exception_type", number)
        classification = classified(message, kind, signatures=signatures)
        answer = {
            "id": row.get("id"),
            "role": classification.role.value,
            "category": classification.category,
            "pointer": classification.pointer.as_dict()
            if classification.pointer is not None
            else None,
            "signature": classification.signature or None,
        }
        click.echo(json.dumps(answer))
    return EXIT.OK


def _iter_rows() -> Iterator[tuple[int, dict[str, Any]]]:
    if sys.stdin is None:
        raise UsageError("stdin is closed; give it lines of JSON")
    # one line at a time: an answer is printed before the next line is read
    for number, line in enumerate(sys.stdin, start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UsageError(f"line {number} of stdin is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(
                f'line {number} of stdin must be an object such as {{"id": 1, "message": "..."}}'
            )
        yield number, row


def _format_cell(row: dict[str, Any], key: str, number: int) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UsageError(f"{key!r} in line {number} of stdin must be a string")
    return value
