"""The promise between versions: the files of a newer version do not confuse."""

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from firstfault.conclude import Conclusion
from firstfault.output_reader import MultiErrorFileOutputReader
from firstfault.wire.documents import SCHEMA_VERSION
from firstfault_proto.v1 import errors_pb2 as pb

FORMATS = Path(__file__).parents[1] / "formats"
"""Attempts of real jobs."""
NOTE = "a newer version of firstfault wrote"


@pytest.fixture(params=["killed/0", "raised/0"])
def attempt(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of a recorded attempt."""
    folder = tmp_path / request.param
    shutil.copytree(FORMATS / request.param, folder)
    return folder


def concluded(folder: Path, **options: Any) -> Conclusion:
    conclusion = MultiErrorFileOutputReader(str(folder), **options).conclude()
    assert conclusion is not None
    return conclusion


def gist(conclusion: Conclusion) -> dict[str, Any]:
    """Return what must not differ between versions."""
    verdict, decision = conclusion.verdict, conclusion.decision
    names = ("scope", "ranks", "node", "code", "category", "fingerprint", "timestamp_ns")
    return {
        **{name: getattr(verdict, name) for name in names},
        "documents": verdict.document_count,
        "victims": verdict.victims.count,
        "coverage": (
            verdict.coverage.expected,
            verdict.coverage.reported,
            verdict.coverage.unreadable,
        ),
        "retry": (decision.retry, decision.kind, decision.origin),
    }


def test_an_attempt_reads_as_its_pods_sealed_it(attempt: Path) -> None:
    """The verdict and the decision from the documents are those of the pods;
    the seal alone is enough.
    """
    document = pb.WorkerErrorDocument.FromString((attempt / "error.pb").read_bytes())
    told = json.loads(document.verdict.json)
    conclusion = concluded(attempt)
    verdict, decision = conclusion.verdict, conclusion.decision
    assert (verdict.scope.value, list(verdict.ranks)) == (
        told["verdict"]["scope"],
        told["verdict"]["ranks"],
    )
    for name in ("node", "code", "category", "fingerprint", "strategy"):
        assert getattr(verdict, name) == told["verdict"][name]
    assert verdict.digest == told["verdict"]["documents"]["digest"]
    assert verdict.victims.count == told["verdict"]["victims"]["count"]
    assert verdict.coverage.complete
    assert (decision.retry, decision.kind.value) == (
        told["decision"]["retry"],
        told["decision"]["kind"],
    )
    rank, what = {"raised": (3, "RuntimeError"), "killed": (1, "SIGKILL")}[attempt.parent.name]
    assert (verdict.root.rank, verdict.root.what) == (rank, what)
    assert NOTE not in str(verdict.coverage.notes)
    shutil.rmtree(attempt / "firstfault")
    alone = concluded(attempt)
    assert gist(alone) == gist(conclusion)
    assert not alone.verdict.coverage.complete


def test_a_bundle_stands_in_for_the_documents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bundle stands in for the documents: it is opened, and no document of its own is needed."""
    folder = tmp_path / "0"
    shutil.copytree(FORMATS / "raised/0", folder)
    before = gist(concluded(folder))
    for path in folder.rglob("firstfault/*/*.pb"):
        path.write_bytes(b"\0" * path.stat().st_size)
    assert gist(concluded(folder)) == before
    assert not caplog.records


@pytest.fixture(scope="module")
def newer() -> Callable[[str], type[Message]]:
    """Return the messages of a later version: each has more fields, each enum more values."""
    file = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    kinds = descriptor_pb2.FieldDescriptorProto
    one = kinds.LABEL_OPTIONAL
    for message in file.message_type:
        message.field.add(name="news", number=2001, type=kinds.TYPE_STRING, label=one)
        message.field.add(
            name="counts",
            number=2002,
            type=kinds.TYPE_FIXED64,
            label=kinds.LABEL_REPEATED,
        )
        place = {"type": kinds.TYPE_MESSAGE, "type_name": ".firstfault.v1.Place"}
        message.field.add(name="part", number=2003, label=one, **place)
    for enum in file.enum_type:
        enum.value.add(name=f"{enum.name.upper()}_OF_THE_FUTURE", number=99)
    pool = descriptor_pool.DescriptorPool()
    for dependency in pb.DESCRIPTOR.dependencies:
        _add(pool, dependency)
    pool.Add(file)
    return lambda name: message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"firstfault.v1.{name}")
    )


def _add(pool: descriptor_pool.DescriptorPool, file: Any) -> None:
    for dependency in file.dependencies:
        _add(pool, dependency)
    pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb))


def rewrite(
    folder: Path,
    newer: Callable[[str], type[Message]],
    change: Callable[[Any], None] = lambda _: None,
) -> tuple[Conclusion, Conclusion]:
    """Return what is concluded before and after a later version wrote an attempt's files,
    without copies.
    """
    before = concluded(folder)
    files = [(path, "RosterEntry") for path in folder.glob("firstfault/roster/*.pb")]
    files += [(path, "WorkerErrorDocument") for path in folder.glob("firstfault/errors/*.pb")]
    files.append((folder / "error.pb", "WorkerErrorDocument"))
    for path, name in files:
        message: Any = newer(name)()
        message.ParseFromString(path.read_bytes())
        _add_news(message)
        for part in ("failure", "verdict"):
            if name == "WorkerErrorDocument" and message.HasField(part):
                getattr(message, part).schema_version = SCHEMA_VERSION + 1
        if name == "RosterEntry":
            message.schema_version = SCHEMA_VERSION + 1
        change(message)
        path.write_bytes(message.SerializeToString())
    for bundle in folder.glob("firstfault/roster/*.bundle"):
        bundle.unlink()
    after = concluded(folder)
    (note,) = [note for note in after.verdict.coverage.notes if note.startswith(NOTE)]
    assert "of the files" in note
    return before, after


def _add_news(message: Any) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.file.package == "firstfault.v1":
            for part in (
                value if field.is_repeated and not field.message_type.GetOptions().map_entry else ()
            ):
                _add_news(part)
            if not field.is_repeated:
                _add_news(value)
    if "news" in message.DESCRIPTOR.fields_by_name:
        message.news, message.part.node = "of the future", "elsewhere"
        message.counts.extend([1, 2])


@pytest.mark.parametrize("field", ["", "writer", "subject"])
def test_a_newer_attempt_reads_the_same(
    attempt: Path, newer: Callable[[str], type[Message]], field: str
) -> None:
    """Fields, and kinds of writers and subjects,
    that this version does not know change nothing but one note.
    """

    def change(message: Any) -> None:
        if field and "failure" in message.DESCRIPTOR.fields_by_name and message.HasField("failure"):
            setattr(message.failure, field, 99)

    before, after = rewrite(attempt, newer, change)
    assert (gist(after), after.verdict.digest, after.decision) == (
        gist(before),
        before.verdict.digest,
        before.decision,
    )
    assert after.verdict.coverage.complete == before.verdict.coverage.complete


def test_a_roster_entry_of_an_unknown_phase_is_left_out(
    attempt: Path, newer: Callable[[str], type[Message]]
) -> None:
    """A roster entry of an unknown phase is left out: the root cause stays,
    and the coverage says what is missing.
    """

    def change(message: Any) -> None:
        if "phase" in message.DESCRIPTOR.fields_by_name and message.phase == pb.PHASE_FAILED:
            message.phase = 99

    before, _ = rewrite(attempt, newer, change)
    for path in attempt.glob("firstfault/roster/*-failed-*"):
        path.rename(path.with_name(path.name.replace("-failed-", "-draining-")))
    after = concluded(attempt)
    for part in ("scope", "ranks", "node", "category", "fingerprint", "documents", "victims"):
        assert gist(after)[part] == gist(before)[part]
    assert not after.verdict.coverage.complete
    assert "its phase is unknown to this version" in str(after.verdict.coverage.notes)


@pytest.mark.parametrize("name", ["copies-{digest}.bundle", "copies2-{digest}.bundle"])
def test_a_bundle_of_an_unknown_version_is_left_out(attempt: Path, name: str) -> None:
    """A bundle that this version cannot unpack is left out, and the documents are read."""
    before = gist(concluded(attempt, fresh=True))
    roster = attempt / "firstfault/roster"
    for bundle in roster.glob("*.bundle"):
        bundle.unlink()
    data = zlib.compress(b'{"version": 2, "files": []}\n' + b"x" * 5000)
    (roster / name.format(digest=hashlib.sha256(data).hexdigest())).write_bytes(data)
    assert gist(concluded(attempt)) == before


@pytest.mark.parametrize("gone", [False, True], ids=["with documents", "without"])
@pytest.mark.parametrize("schema", ["firstfault.verdict/v1", "firstfault.verdict/v2"])
def test_a_seal_of_a_newer_version_is_read_as_far_as_flyte_does(
    attempt: Path,
    newer: Callable[[str], type[Message]],
    schema: str,
    gone: bool,
) -> None:
    """More fields in the sealed JSON change nothing; of another schema,
    the part that Flyte reads is left.
    """

    def change(message: Any) -> None:
        if "verdict" in message.DESCRIPTOR.fields_by_name and message.HasField("verdict"):
            told = json.loads(message.verdict.json)
            told["schema"] = schema
            told["verdict"] |= {"news": [1], "coverage": told["verdict"]["coverage"] | {"news": 2}}
            told["decision"]["news"] = {}
            message.verdict.json = json.dumps(told)

    before, after = rewrite(attempt, newer, change)
    if gone:
        shutil.rmtree(attempt / "firstfault")
        after = concluded(attempt)
    if not gone or schema.endswith("v1"):
        assert gist(after) == gist(before)
    else:
        assert (after.verdict.node, after.verdict.code) == (
            before.verdict.node,
            before.verdict.root.code,
        )
    assert after.decision.retry == before.decision.retry
