"""The wire format is compatible with flyteidl's and with newer versions."""

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
"""A document of schema version 1."""
_FIELDS = Path(__file__).with_name("fields.txt")
"""Each line: the schema version that added it, and a field or an enum's value."""


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


# --- fields ---------------------------------------------------------------------------------------------------------


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
