"""torch elastic's error files: reads and writes them, and removes those that torch has made."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import tempfile
from pathlib import Path
from typing import Any

from firstfault.utils.text import parse_json

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_RECOVERABLE = "recoverable_error"
"""The file name that kfpytorch uses for the same mark."""
_MADE_BY_TORCH = re.compile(r"torchelastic_[a-z0-9_]{8}")
"""The name of the folder that torch makes for a run without a name from the user."""


def error_file_data(
    type_name: str,
    message: str,
    traceback: str,
    timestamp_ns: int,
) -> dict[str, Any]:
    """Return the content in torch's format, with the time in whole seconds."""
    short = type_name.rsplit(".", 1)[-1]
    return {
        "message": {
            "message": f"{short}: {message}",
            "extraInfo": {
                "py_callstack": traceback,
                "timestamp": str(timestamp_ns // 1_000_000_000),
            },
        }
    }


def write_error_file(path: str | Path, data: dict[str, Any]) -> None:
    """Write `data` atomically."""
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data), encoding="utf-8", errors="backslashreplace")
    part.replace(target)


class _TextUnpickler(pickle.Unpickler):
    """Loads a pickled text and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse every class."""
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a text")


def read_traceback(path: str | Path) -> str:
    """Return the traceback that torch.multiprocessing keeps of an exception outside of
    torch elastic's wrapper.

    It keeps one if a result can't be pickled or arguments can't be unpickled. Empty if there is
    none.
    """
    try:
        with Path(path).open("rb") as stream:
            text = _TextUnpickler(stream).load()
    except (OSError, pickle.UnpicklingError, EOFError, ValueError):
        return ""
    return text if isinstance(text, str) else ""


def mark_recoverable(error_file: str) -> None:
    """Create a file next to a worker's error.json that marks its exception as recoverable."""
    (Path(error_file).parent / _RECOVERABLE).touch()


def was_recoverable(error_file: str) -> bool:
    """Whether the worker that this error.json belongs to marked its exception as recoverable."""
    return (Path(error_file).parent / _RECOVERABLE).exists()


def remove_error_files(log_folder: str) -> None:
    """Remove a run's error files, and their folders if those are empty then,
    from a folder that torch made itself.

    torch leaves one folder for each run in that for temporary files. A folder that the user named
    stays as it is, and so does every log file.
    """
    root = Path(log_folder)
    if root.parent != Path(tempfile.gettempdir()) or not _MADE_BY_TORCH.fullmatch(root.name):
        return
    for file in [
        *root.glob("*/attempt_*/*/error.json"),
        *root.glob(f"*/attempt_*/*/{_RECOVERABLE}"),
    ]:
        file.unlink(missing_ok=True)
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()


def read_error_file(path: str | Path) -> dict[str, Any] | None:
    """Return the message part of an ``error.json``, or None if the file can't be read."""
    try:
        message = parse_json(Path(path).read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, dict) else {"message": str(message), "extraInfo": {}}


def is_readable(error_file: str) -> bool:
    """Whether torch can read an error.json, and make a ChildFailedError of it."""
    try:
        content = json.loads(Path(error_file).read_text(encoding="utf-8"))
        message = content["message"]
        if isinstance(message, str):
            int(content.get("timestamp", 0))
            return True
        extra = message["extraInfo"]
        int(extra["timestamp"])
        return isinstance(extra.get("py_callstack", message.get("message", "")), str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
