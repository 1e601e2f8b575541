"""torch elastic's own ``error.json``, so that torchrun and its tools see what we see."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["ERROR_FILE_VARIABLE", "error_file_data", "read_error_file", "write_error_file"]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def error_file_data(type_name: str, message: str, traceback: str, timestamp_ns: int) -> dict[str, Any]:
    """Return the content in torch's format; whole seconds, as torch has it."""
    short = type_name.rsplit(".", 1)[-1]
    return {
        "message": {
            "message": f"{short}: {message}",
            "extraInfo": {"py_callstack": traceback, "timestamp": str(timestamp_ns // 1_000_000_000)},
        }
    }


def write_error_file(path: str | Path, data: dict[str, Any]) -> None:
    """Write `data` so that a reader sees all of it or nothing."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data), encoding="utf-8", errors="backslashreplace")
    part.replace(target)


def read_error_file(path: str | Path) -> dict[str, Any] | None:
    """Return the message part of an ``error.json``, None if it is missing or not readable."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, dict) else {"message": str(message), "extraInfo": {}}
