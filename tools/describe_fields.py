"""Writes what docs say of tables in the code: a restart's keys, the rules of `evidence`,
and parts of the JSON Schema.

``python tools/describe_fields.py`` rewrites the files; tests/proto/test_fields.py and
tests/readers/test_rules.py fail if they differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from firstfault.strategies.rules import RULES
from firstfault.wire.json_schemas import DECISION, RESTART, RESTART_SCHEMA, VERDICT

DOCS = Path(__file__).parents[1] / "docs"
FORMAT = DOCS / "reference" / "format.md"
STRATEGIES = DOCS / "guides" / "strategies.md"
SCHEMA = DOCS / "schemas" / "verdict-v1.schema.json"
_WIDTH = 110


def described(page: str) -> str:
    """Return the text of docs/reference/format.md with today's list of a restart's keys."""
    keys = RESTART.schema["properties"]
    meanings = {
        "schema": f"`{RESTART_SCHEMA}`",
        **{name: key["description"] for name, key in keys.items()},
    }
    rows = (f"| `{name}` | {meaning} |\n" for name, meaning in meanings.items())
    return _with_rows(page, "| Key of a record | Meaning |\n|---|---|\n", rows)


def with_rules(page: str) -> str:
    """Return the text of docs/guides/strategies.md with today's rules."""
    rows = (f"| `{rule.name}` | {rule.root_cause} | {rule.max_confidence} |\n" for rule in RULES)
    return _with_rows(
        page, "| Rule | The root cause is | Confidence at most |\n|---|---|---|\n", rows
    )


def _with_rows(page: str, head: str, rows: Iterable[str]) -> str:
    return re.sub(re.escape(head) + r"(?:\|.*\n)*", lambda _: head + "".join(rows), page)


def with_parts(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema with today's verdict and decision."""
    parts = {"verdict": VERDICT.schema, "decision": DECISION.schema}
    return {**schema, "$defs": {**schema["$defs"], **parts}}


def lines_of(value: Any, indent: int = 0) -> str:
    """Return JSON in which what fits into a line is in one."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(line) + indent <= _WIDTH:
        return line
    margin = " " * (indent + 2)
    parts = (
        [f"{json.dumps(key)}: {lines_of(part, indent + 2)}" for key, part in value.items()]
        if isinstance(value, dict)
        else [lines_of(part, indent + 2) for part in value]
    )
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return (
        begin + "\n" + ",\n".join(f"{margin}{part}" for part in parts) + "\n" + " " * indent + end
    )


def main() -> None:
    """Rewrite the files."""
    STRATEGIES.write_text(with_rules(STRATEGIES.read_text("utf-8")), "utf-8")
    FORMAT.write_text(described(FORMAT.read_text("utf-8")), "utf-8")
    schema = with_parts(json.loads(SCHEMA.read_text("utf-8")))
    SCHEMA.write_text(lines_of(schema) + "\n", "utf-8")


if __name__ == "__main__":
    main()
