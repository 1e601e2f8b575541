"""Runs the cases of the lab and records their documents: ``make cascades``.

Each case becomes one zip file: the documents and the roster as they were in the storage, their
times, and the truth as the injector wrote it. An existing file is not recorded again. A program
under torchrun that does not end as it should, or whose nodes print a wrong verdict, is not
recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

from firstfault_proto.v1.errors_pb2 import RosterEntry, WorkerErrorDocument

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # started as a script

from lab.cascades import programs  # noqa: E402
from lab.cascades.cases import CASES, NCCL, PROGRAMS, Case  # noqa: E402 - only now it is found
from lab.cascades.replay import OF_PROGRAMS, RECORDED, judged  # noqa: E402
from tests.plugin.running import Ended, running  # noqa: E402
from tests.s3_server import S3, serving  # noqa: E402

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from lab.cascades.replay import Files

HERE = Path(__file__).parent


def main(wanted: list[str]) -> int:
    """Record the missing cases whose names begin with one of `wanted`, or all;
    return the number of failed recordings.

    "torchrun" stands for all programs. "--judge": run and judge those cases that are named, and
    keep nothing.
    """
    if wanted[:1] == ["--judge"]:
        with Lab() as lab:
            return sum(not lab.judge(CASES[name]) for name in wanted[1:])
    OF_PROGRAMS.mkdir(exist_ok=True, parents=True)
    failed = 0
    with Lab() as lab:
        for case in [*CASES.values(), *PROGRAMS.values()]:
            file = (RECORDED if case.way is None else OF_PROGRAMS) / f"{case.name}.zip"
            names = (case.name, "torchrun" if case.way is not None else case.name)
            if file.exists() or (
                wanted and not any(name.startswith(tuple(wanted)) for name in names)
            ):
                continue
            began = time.monotonic()
            try:
                lab.record(case, file)
            except (subprocess.TimeoutExpired, ValueError, AssertionError) as error:
                failed += 1
                print(f"{case.name}: NOT RECORDED: {error}", flush=True)
                continue
            print(f"{case.name}: {time.monotonic() - began:.1f} s", flush=True)
    return failed


@dataclass(frozen=True, slots=True)
class Run:
    ended: Ended
    told: list[dict[str, Any]]
    """The injector's truth, by rank."""
    prefix: str
    """The output prefix."""
    files: Files
    """Content and time, nanoseconds, of every file below the output prefix's ``firstfault``."""


class Lab(contextlib.ExitStack):
    """Runs cases; an S3 server is started for the first one that needs it."""

    _server: S3 | None = None

    def record(self, case: Case, file: Path) -> None:
        """Run a case and write its recording.

        Raises:
            ValueError: nothing was injected.
            subprocess.TimeoutExpired: it did not end.
        """
        with tempfile.TemporaryDirectory(prefix="cascade-", ignore_cleanup_errors=True) as folder:
            if case.way is None:
                run = self.run(case, Path(folder))
                _pack(case, file, run.told, run.files, run.ended.attempt["engine"]["job"])
                return
            is_on_s3 = case.store == "s3"
            job = programs.run_program(
                case, Path(folder), self._started().uri("lab") if is_on_s3 else ""
            )
            files = _on_s3(self._started(), job.prefixes[0]) if is_on_s3 else programs.files_of(job)
            complaints = programs.complaints_of(case, job, files)
            if complaints:
                texts = "\n".join(node.err[-3000:] for node in job.nodes)
                raise ValueError("\n  ".join([*complaints, *texts.splitlines()]))
            _pack(case, file, job.truths, files, "torchrun")

    def judge(self, case: Case) -> bool:
        """Run a case with the torch at hand; print and return whether the verdict is right."""
        with tempfile.TemporaryDirectory(prefix="cascade-", ignore_cleanup_errors=True) as folder:
            run = self.run(case, Path(folder))
            outcome, verdict = judged(programs.truth_of(case, run.told), run.files)
        print(
            f"{case.name}: {outcome}: {verdict.headline if verdict is not None else 'no failure'}",
            flush=True,
        )
        return outcome == "right"

    def run(self, case: Case, folder: Path) -> Run:
        """Run a case; its temporary files are in a folder.

        Raises:
            ValueError: nothing was injected.
            subprocess.TimeoutExpired: it did not end.
        """
        task = case.task or {2: "two_by_two", 4: "four_by_two"}[case.nodes]
        options: list[str] = []
        if case.clock is not None:
            pod, seconds = case.clock
            options += ["--env", f"LAB_CLOCK=-worker-{pod} {seconds:+g} {programs.faketime()}"]
        if case.store == "s3":
            server = self._started()
            options += ["--store", server.uri("lab")]
            for name, value in server.environment().items():
                options += ["--env", f"{name}={value}"]
        inputs = {"kind": case.fault.removeprefix(NCCL), "culprit": case.culprit, **case.inputs}
        with running(HERE / "tasks.py", task, folder, inputs, *options) as job:
            ended = job.end()
        told = [json.loads(path.read_text()) for path in sorted(job.marks.glob("truth-*.json"))]
        if not told:
            headline = (ended.attempt.get("verdict") or {}).get("headline")
            raise ValueError(f"nothing was injected: {headline}; {ended.stderr[-500:]}")
        errors: str = ended.attempt["errors"]
        prefix = errors.removesuffix("/firstfault/errors")
        files = (
            _on_s3(self._started(), prefix)
            if case.store == "s3"
            else programs.in_folder(Path(prefix))
        )
        return Run(ended, told, prefix, files)

    def _started(self) -> S3:
        if self._server is None:
            folder = self.enter_context(
                tempfile.TemporaryDirectory(prefix="cascade-s3-", ignore_cleanup_errors=True)
            )
            self._server = self.enter_context(serving(Path(folder)))
            # the runs read the documents of their pods
            os.environ.update(self._server.environment())
        return self._server


def _on_s3(server: S3, uri: str) -> Files:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    found = {}
    with contextlib.closing(server.client()) as client:
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=f"{prefix}/firstfault/"
        )
        listed = [item for page in pages for item in page.get("Contents", [])]
        # not a bundle of copies
        for item in (item for item in listed if item["Key"].endswith(".pb")):
            data = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
            found[item["Key"].removeprefix(f"{prefix}/")] = (
                data,
                int(item["LastModified"].timestamp()) * 10**9,
            )
    return found


def _pack(case: Case, file: Path, told: list[dict[str, Any]], files: Files, engine: str) -> None:
    truth = {
        **programs.truth_of(case, told),
        "job": engine,
        "times": {name: when for name, (_, when) in files.items()},
    }
    part = file.with_suffix(".part")
    with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (data, _) in files.items():
            archive.writestr(
                name, neutral(data, RosterEntry if "/roster/" in name else WorkerErrorDocument)
            )
        archive.writestr("truth.json", json.dumps(truth, indent=1))
    shutil.move(part, file)


def neutral(data: bytes, kind: type[Message]) -> bytes:
    """Return a document without the recording machine's paths and name."""
    message = kind.FromString(data)
    _rewrite(message)
    return message.SerializeToString(deterministic=True)


def _rewrite(message: Message) -> None:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE and not _is_map(field):
            for part in value if field.is_repeated else [value]:
                _rewrite(part)
        elif field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            text = value.replace(str(ROOT), "/app").replace(sys.base_prefix, "/usr")
            setattr(message, field.name, "host" if text == socket.gethostname() else text)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
