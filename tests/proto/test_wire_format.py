"""The wire format is compatible with flyteidl's, with older documents, and with newer ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor

import firstfault_proto
from firstfault.wire.documents import SCHEMA_VERSION
from firstfault_proto.v1 import errors_pb2 as pb

_PROTO = Path(firstfault_proto.__file__).parent / "v1" / "errors.proto"
_MESSAGES = {name: pb.DESCRIPTOR.message_types_by_name[name] for name in pb.DESCRIPTOR.message_types_by_name}

_DOCUMENT = bytes.fromhex(
    "0a250a0455534552120a6261642073616d706c65180120012a080880e2cfaa0610073203772d31ca3e990208011001180122390801100218"
    "fbd095ffbc312001280330013801400448025207747261696e65725a03772d316206686f73742d376a0831302e302e302e3370635107002a"
    "36fe9c97175905000000000000006201626806a201690a0a56616c75654572726f721209457863657074696f6e1a0a6261642073616d706c"
    "65221b0a08747261696e2e707910071a05747261696e22067374657028292a0a696e2073686172642037321b0a074f534572726f721a0964"
    "69736b2066756c6c3a056361757365a80101ba01180a075349475445524d120d72616e6b2030206661696c6564f2010464617461fa010e31"
    "3a3031323334353637383961628202047461696c9202060800100118029a020c0a05746f7263681203322e37"
)
"""A document of schema version 1. It must stay readable."""
_ENTRY = bytes.fromhex(
    "080110021a390801100218fbd095ffbc312001280330013801400448025207747261696e65725a03772d316206686f73742d376a0831302e"
    "302e302e3370632204080310012204080410022900002a36fe9c9717320d0a0565312e7062100118072803"
)
"""A roster entry of schema version 1."""

_EVIDENCE = bytes.fromhex(
    "c001018a020c086310031a066672616d657392020b2004290600000000000000a2021c0a066c6f616465721105000000000000001a090a074f"
    "534572726f72aa021b0a0a64656661756c745f70671209616c6c72656475636518292028b2020e08001203772d301a0565312e7062"
)
"""Parts of a failure beside the exception."""
_FIELDS = Path(__file__).with_name("fields.txt")
"""Each line: the schema version that added it, and a field or an enum's value."""
_WITHDRAWN = bytes.fromhex("0a0565312e70623001")
"""A receipt that withdraws a document."""


# --- the .proto file and the code made from it ----------------------------------------------------------------------


def _declared() -> dict[str, dict[str, int]]:
    """Return the fields and numbers of every message and enum in the .proto file."""
    text = re.sub(r"//.*", "", _PROTO.read_text())
    blocks = re.findall(r"\b(?:message|enum)\s+(\w+)\s*\{([^}]*)\}", text)
    return {
        name: {field: int(number) for field, number in re.findall(r"(\w+)\s*=\s*(\d+)\s*;", body)}
        for name, body in blocks
    }


def test_the_code_is_that_of_the_proto_file() -> None:
    """Every message and enum of the .proto file is in the generated code with the same fields and numbers."""
    generated = {name: {field.name: field.number for field in kind.fields} for name, kind in _MESSAGES.items()}
    generated |= {
        name: {value.name: value.number for value in kind.values}
        for name, kind in pb.DESCRIPTOR.enum_types_by_name.items()
    }
    assert generated == _declared()


def _wire_format() -> list[str]:
    """Return a line for each field and each value of an enum: its name, number, and how it is written."""
    file = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    kinds, labels = descriptor_pb2.FieldDescriptorProto.Type, descriptor_pb2.FieldDescriptorProto.Label
    lines = [f"{enum.name}.{value.name} = {value.number}" for enum in file.enum_type for value in enum.value]
    messages = [("", message) for message in file.message_type]
    messages += [(f"{outer.name}.", inner) for outer in file.message_type for inner in outer.nested_type]
    for prefix, message in messages:
        for field in message.field:
            label = "optional" if field.proto3_optional else labels.Name(field.label)[6:].lower()
            label = "" if label == "optional" and not field.proto3_optional else f" {label}"
            kind = field.type_name.lstrip(".") or kinds.Name(field.type)[5:].lower()
            lines.append(f"{prefix}{message.name}.{field.name} = {field.number}{label} {kind}")
    return lines


def test_no_field_and_no_value_ever_changes() -> None:
    """The wire format is the list of all versions: a line is never changed or removed.

    A new one is added with the next schema version, and raises `SCHEMA_VERSION`.
    """
    lines = [line.split(" ", 1) for line in _FIELDS.read_text().splitlines()]
    assert sorted(text for _, text in lines) == sorted(_wire_format())
    assert max(int(version) for version, _ in lines) == SCHEMA_VERSION


def test_every_enum_starts_with_unspecified() -> None:
    """An unset field differs from every value of the field."""
    for kind in pb.DESCRIPTOR.enum_types_by_name.values():
        assert kind.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_it_loads_without_the_library() -> None:
    """The wire format can be imported alone, also if warnings are errors."""
    code = "import sys; import firstfault_proto.v1.errors_pb2; print('firstfault' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "False"


# --- flyteidl -------------------------------------------------------------------------------------------------------


def test_a_document_is_a_superset_of_flytes() -> None:
    """Every field of flyteidl's ErrorDocument is in ours with the same number and type; our numbers are far higher."""
    ours = _MESSAGES["WorkerErrorDocument"].fields_by_number
    for field in ErrorDocument.DESCRIPTOR.fields:
        assert ours[field.number].name == field.name
        assert ours[field.number].message_type is ContainerError.DESCRIPTOR
    added = set(ours) - {field.number for field in ErrorDocument.DESCRIPTOR.fields}
    assert added == {1001, 1002}


def test_flyte_reads_the_error_of_a_document() -> None:
    """Flyte's reader finds its own message in our document and keeps the other fields unchanged."""
    read = ErrorDocument.FromString(_DOCUMENT)
    assert (read.error.code, read.error.message, read.error.worker) == ("USER", "bad sample", "w-1")
    assert read.error.kind == ContainerError.RECOVERABLE
    assert read.error.timestamp.ToNanoseconds() == 1_700_000_000_000_000_007
    assert pb.WorkerErrorDocument.FromString(read.SerializeToString()) == pb.WorkerErrorDocument.FromString(_DOCUMENT)


def test_we_read_flytes_document() -> None:
    """A file of Flyte is a document with only an error."""
    data = ErrorDocument(error=ContainerError(code="red", message="hi")).SerializeToString()
    read = pb.WorkerErrorDocument.FromString(data)
    assert (read.error.code, read.error.message) == ("red", "hi")
    assert not read.HasField("failure")
    assert not read.HasField("verdict")


# --- other versions -------------------------------------------------------------------------------------------------


def test_a_document_of_version_1_is_readable() -> None:
    """Every field of a document of version 1 is read."""
    failure = pb.WorkerErrorDocument.FromString(_DOCUMENT).failure
    assert (failure.schema_version, failure.writer, failure.subject) == (1, pb.WRITER_WORKER, pb.SUBJECT_WORKER)
    assert failure.place == pb.Place(
        attempt=1,
        round=2,
        incarnation=1_700_000_000_123,
        restart_count=1,
        global_rank=3,
        local_rank=1,
        group_rank=1,
        world_size=4,
        group_world_size=2,
        role="trainer",
        node="w-1",
        host="host-7",
        ip="10.0.0.3",
        pid=99,
    )
    assert failure.exception == pb.ExceptionRecord(
        type="ValueError",
        bases=["Exception"],
        message="bad sample",
        frames=[pb.Frame(file="train.py", line=7, function="train", code="step()")],
        notes=["in shard 7"],
        causes=[pb.ExceptionRecord(type="OSError", message="disk full", relation="cause")],
    )
    assert (failure.wall_time_ns, failure.monotonic_ns, failure.boot_id) == (1_700_000_000_000_000_007, 5, "b")
    assert (failure.upload_delay_ns, failure.exit_code, failure.log_tail) == (6, 1, "tail")
    assert (failure.category, failure.fingerprint) == ("data", "1:0123456789ab")
    assert list(failure.sent_signals) == [pb.SentSignal(signal="SIGTERM", reason="rank 0 failed")]
    assert failure.resources == pb.ResourceEvidence(oom_kill=0, memory_peak_bytes=1, memory_limit_bytes=2)
    assert dict(failure.versions) == {"torch": "2.7"}


def test_a_roster_entry_of_version_1_is_readable() -> None:
    """Every field of a roster entry of version 1 is read."""
    entry = pb.RosterEntry.FromString(_ENTRY)
    assert (entry.schema_version, entry.phase, entry.place.node) == (1, pb.PHASE_FAILED, "w-1")
    assert [(worker.global_rank, worker.local_rank) for worker in entry.workers] == [(3, 1), (4, 2)]
    assert list(entry.receipts) == [pb.DocumentReceipt(key="e1.pb", durable=True, fault_to_durable_ns=7, global_rank=3)]
    assert entry.wall_time_ns == 1_700_000_000_000_000_000


def test_the_evidence_of_a_failure_is_readable() -> None:
    """Stacks, memory, threads, collectives and the cause of the stop are read from a document of version 1."""
    assert pb.WorkerFailure.FromString(_EVIDENCE) == pb.WorkerFailure(
        in_flight=True,
        stack_dumps=[pb.StackDump(pid=99, global_rank=3, text="frames")],
        resources=pb.ResourceEvidence(memory_used_bytes=4, watermark_wall_ns=6),
        thread_failures=[
            pb.ThreadFailure(thread="loader", wall_time_ns=5, exception=pb.ExceptionRecord(type="OSError"))
        ],
        collectives=[pb.CollectiveProgress(group="default_pg", last_operation="allreduce", enqueued=41, completed=40)],
        caused_by=pb.CausedBy(global_rank=0, node="w-0", document="e1.pb"),
    )


def test_a_withdrawal_is_readable() -> None:
    """The mark of a withdrawn document is read from a receipt of version 1."""
    assert pb.DocumentReceipt.FromString(_WITHDRAWN) == pb.DocumentReceipt(key="e1.pb", withdrawn=True)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("Place", "global_rank"),
        ("Place", "local_rank"),
        ("Place", "group_rank"),
        ("WorkerFailure", "exit_code"),
        ("ResourceEvidence", "oom_kill"),
        ("ResourceEvidence", "memory_used_bytes"),
        ("ResourceEvidence", "watermark_wall_ns"),
        ("DocumentReceipt", "global_rank"),
        ("StackDump", "global_rank"),
        ("CollectiveProgress", "completed"),
        ("CausedBy", "global_rank"),
    ],
)
def test_zero_differs_from_unset(message: str, field: str) -> None:
    """Rank 0, exit code 0 and a count of 0 are not the same as none."""
    descriptor = _MESSAGES[message].fields_by_name[field]
    assert descriptor.has_presence
    kind = getattr(pb, message)
    assert kind.FromString(kind(**{field: 0}).SerializeToString()).HasField(field)
    assert not kind.FromString(kind().SerializeToString()).HasField(field)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("WorkerFailure", "wall_time_ns"),
        ("WorkerFailure", "monotonic_ns"),
        ("ThreadFailure", "wall_time_ns"),
        ("ResourceEvidence", "watermark_wall_ns"),
    ],
)
def test_a_time_has_nanoseconds_and_a_fixed_width(message: str, field: str) -> None:
    """Times are 64-bit integers, not floats."""
    assert _MESSAGES[message].fields_by_name[field].type == FieldDescriptor.TYPE_FIXED64


def test_unknown_fields_survive() -> None:
    """Unknown fields of a newer version survive reading and writing."""
    newer = _DOCUMENT + bytes([0xFA, 0x3F, 4]) + b"news"
    assert b"news" in pb.WorkerErrorDocument.FromString(newer).SerializeToString()


def test_the_namespace_of_a_pod_is_readable() -> None:
    """A field that was added later keeps its number."""
    place = pb.Place(node="w-1", namespace="project-development")
    assert pb.Place.FromString(b"\x5a\x03w-1\x7a\x13project-development") == place
