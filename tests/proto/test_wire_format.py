"""The wire format is compatible with flyteidl's and with newer versions."""

import subprocess
import sys
from pathlib import Path

from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from google.protobuf import descriptor_pb2

from firstfault.wire.documents import SCHEMA_VERSION
from firstfault_proto.v1 import errors_pb2 as pb

_MESSAGES = {
    name: pb.DESCRIPTOR.message_types_by_name[name] for name in pb.DESCRIPTOR.message_types_by_name
}

_FIELDS = Path(__file__).with_name("fields.txt")
"""Each line: the schema version that added it, and a field or an enum's value."""


def _wire_format() -> list[str]:
    """Return a line for each field and each value of an enum: its name, number,
    and how it is written.
    """
    file = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    kinds, labels = (
        descriptor_pb2.FieldDescriptorProto.Type,
        descriptor_pb2.FieldDescriptorProto.Label,
    )
    lines = [
        f"{enum.name}.{value.name} = {value.number}"
        for enum in file.enum_type
        for value in enum.value
    ]
    messages = [("", message) for message in file.message_type]
    messages += [
        (f"{outer.name}.", inner) for outer in file.message_type for inner in outer.nested_type
    ]
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
    """The wire format can be imported without the library and without Flyte,
    also if warnings are errors.
    """
    code = (
        "import sys; import firstfault_proto.v1.errors_pb2\n"
        "print([name for name in ('firstfault', 'flyteidl') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stdout.strip() == "[]"


def test_a_document_is_a_superset_of_flytes() -> None:
    """Every field of flyteidl's ErrorDocument is in ours with the same number and type;
    our numbers are far higher.
    """
    ours = _MESSAGES["WorkerErrorDocument"].fields_by_number
    for field in ErrorDocument.DESCRIPTOR.fields:
        assert ours[field.number].name == field.name
        assert ours[field.number].message_type is pb.ContainerError.DESCRIPTOR
    added = set(ours) - {field.number for field in ErrorDocument.DESCRIPTOR.fields}
    assert added == {1001, 1002}


def test_our_copy_of_flytes_error_is_exact() -> None:
    """Each field of Flyte's ContainerError, and each value of its enums,
    is in ours with the same number and type.
    """
    ours, flytes = (
        pb.ContainerError.DESCRIPTOR.fields_by_number,
        ContainerError.DESCRIPTOR.fields_by_number,
    )
    assert ours.keys() == flytes.keys()
    for number, field in flytes.items():
        own = ours[number]
        assert (own.name, own.json_name, own.type) == (field.name, field.json_name, field.type)
        if field.enum_type is not None:
            values = {value.number: value.name for value in field.enum_type.values}
            assert {value.number: value.name for value in own.enum_type.values} == values
        elif field.message_type is not None:
            assert own.message_type is field.message_type
