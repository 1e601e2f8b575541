"""Runs the cases of the lab and keeps what their pods have written: ``make cascades``.

Each case becomes one zip file: the documents and the roster as they lay in the storage, their times, and the truth as
the injector wrote it. What is there already is not recorded again.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

from firstfault_proto.v1.errors_pb2 import RosterEntry, WorkerErrorDocument

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

from tests.cascades.cases import CASES, Case  # noqa: E402 - only now it is found
from tests.plugin.running import Ended, running  # noqa: E402

if TYPE_CHECKING:
    from google.protobuf.message import Message

RECORDED = Path(__file__).parent / "recorded"
TRAINING = Path(__file__).parent / "training.py"


def main(wanted: list[str]) -> int:
    """Record the cases whose names begin with one of `wanted`, all without; return the number of failures."""
    RECORDED.mkdir(exist_ok=True)
    failed = 0
    for case in CASES.values():
        file = RECORDED / f"{case.name}.zip"
        if file.exists() or (wanted and not any(case.name.startswith(name) for name in wanted)):
            continue
        began = time.monotonic()
        try:
            record(case, file)
        except (subprocess.TimeoutExpired, ValueError, AssertionError) as error:
            failed += 1
            print(f"{case.name}: NOT RECORDED: {error}", flush=True)
            continue
        print(f"{case.name}: {time.monotonic() - began:.1f} s", flush=True)
    return failed


def record(case: Case, file: Path) -> None:
    """Run a case and keep what it left.

    Raises:
        ValueError: nothing was injected.
        subprocess.TimeoutExpired: it did not end.
    """
    with tempfile.TemporaryDirectory(prefix="cascade-", ignore_cleanup_errors=True) as folder:
        ended, told = run(case, Path(folder))
        _pack(case, file, ended, told)


def run(case: Case, folder: Path) -> tuple[Ended, list[dict[str, Any]]]:
    """Run a case; return how it ended, and what the injector wrote."""
    task = case.task or {2: "two_by_two", 4: "four_by_two"}[case.nodes]
    options = list(case.options)
    if case.clock is not None:
        pod, seconds = case.clock
        options += ["--env", f"LAB_CLOCK=-worker-{pod} {seconds:+g} {_faketime()}"]
    with running(TRAINING, task, folder, {"kind": case.fault, "culprit": case.culprit, **case.inputs}, *options) as job:
        ended = job.end()
    told = [json.loads(path.read_text()) for path in sorted(job.marks.glob("truth-*.json"))]
    if not told:
        raise ValueError(f"nothing was injected: {ended.stderr[-500:]}")
    return ended, told


def _faketime() -> Path:
    """Return the library of Debian's `faketime`, which makes one process's clock wrong.

    Raises:
        ValueError: it is not installed.
    """
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not found:
        raise ValueError("needs libfaketime; apt-get install faketime")
    return found[0]


def _pack(case: Case, file: Path, ended: Ended, told: list[dict[str, Any]]) -> None:
    attempt, prefix = ended.attempt, ended.prefix
    truth = {
        "fault": case.fault,
        "scope": case.scope,
        "ranks": [item["rank"] for item in told],
        "nodes": sorted({item["node"] for item in told}),
        "nodes_of_job": case.nodes,
        "job": attempt["engine"]["job"],
        "seconds": attempt["seconds"],
    }
    part = file.with_suffix(".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        times = {}
        for path in sorted((prefix / "firstfault").glob("*/*.pb")):
            name = str(path.relative_to(prefix))
            kind = RosterEntry if "/roster/" in f"/{name}" else WorkerErrorDocument
            archive.writestr(name, neutral(path.read_bytes(), kind))
            times[name] = path.stat().st_mtime_ns
        archive.writestr("truth.json", json.dumps({**truth, "times": times}, indent=1))
    shutil.move(part, file)


def neutral(data: bytes, kind: type[Message]) -> bytes:
    """Return a document without the paths and the name of the machine on which it was recorded."""
    message = kind.FromString(data)
    _rewrite(message)
    return message.SerializeToString(deterministic=True)


def _rewrite(message: Message) -> None:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else [value]:
                _rewrite(part)
        elif field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            text = value.replace(str(ROOT), "/app").replace(sys.base_prefix, "/usr")
            setattr(message, field.name, "host" if text == socket.gethostname() else text)


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
