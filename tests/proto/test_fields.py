"""The one table of fields covers the wire format and the model, and docs name no other fields."""

import dataclasses
import json
import re
from typing import Any

import pytest

from firstfault.wire import fields
from firstfault_proto.v1 import errors_pb2 as pb
from tools.describe_fields import FORMAT, SCHEMA, described, with_parts

# the message, the table, the message's fields and the model's attributes that the encoder treats by
# itself
_TABLES: list[tuple[str, Any, set[str], set[str]]] = [
    ("Place", fields.PLACE, set(), set()),
    ("CausedBy", fields.CAUSED_BY, set(), set()),
    ("SentSignal", fields.SENT_SIGNAL, set(), set()),
    ("ResourceEvidence", fields.RESOURCES, set(), set()),
    ("FileSystem", fields.FILE_SYSTEM, set(), set()),
    ("SystemState", fields.SYSTEM, set(), set()),
    ("Collective", fields.COLLECTIVE, set(), set()),
    ("CollectiveProgress", fields.PROGRESS, set(), set()),
    ("ExpiredDeadline", fields.EXPIRED, set(), set()),
    ("StackDump", fields.STACK_DUMP, set(), set()),
    ("DocumentReceipt", fields.RECEIPT, set(), set()),
    ("LogTail", fields.LOG_TAIL, set(), set()),
    ("NodeSetup", fields.SETUP, set(), set()),
    ("RosterEntry", fields.PRESENCE, {"schema_version", "workers"}, {"ranks", "newer"}),
    ("Frame", fields.FRAME, {"marked_from", "marked_to"}, {"marked"}),
    (
        "WorkerFailure",
        fields.FAILURE,
        {"schema_version"},
        {"code", "message", "kind", "origin", "worker", "documents", "newer"},
    ),
    (
        "SealedVerdict",
        fields.SEAL,
        {"schema_version"},
        {"name", "code", "message", "kind", "origin", "fault_timestamp_ns", "worker", "newer"},
    ),
]


@pytest.mark.parametrize(
    ("name", "table", "on_wire", "in_model"), _TABLES, ids=[name for name, *_ in _TABLES]
)
def test_each_field_has_a_row(name: str, table: Any, on_wire: set[str], in_model: set[str]) -> None:
    """Each field of a message and of its model is in the table once,
    but for those that the encoder treats itself.
    """
    rows = [field.wire or field.name for field in table.fields]
    assert sorted([*rows, *on_wire]) == sorted(
        field.name for field in getattr(pb, name).DESCRIPTOR.fields
    )
    attributes = [field.name for field in table.fields]
    assert sorted([*attributes, *in_model]) == sorted(
        field.name for field in dataclasses.fields(table.model)
    )


def test_no_text_is_written_as_it_is() -> None:
    """Each text of a failure is bounded and redacted when it is written,
    and so is each in its parts.
    """
    texts = {
        "WorkerFailure",
        "Place",
        "CausedBy",
        "SentSignal",
        "ExpiredDeadline",
        "FileSystem",
        "NodeSetup",
    }
    for name, table, _, _ in _TABLES:
        kinds = getattr(pb, name).DESCRIPTOR.fields_by_name
        for field in table.fields if name in texts else ():
            kind = kinds[field.wire or field.name]
            is_safe = field.codec.is_redacted and field.codec.max_size
            assert is_safe or kind.cpp_type != kind.CPPTYPE_STRING, f"{name}.{field.name}"


def test_the_page_and_the_json_schema_match_the_table_of_fields() -> None:
    """The page on the format names fields of a failure;
    it and the JSON Schema are what the tool writes.
    """
    page = FORMAT.read_text("utf-8")
    schema = json.loads(SCHEMA.read_text("utf-8"))
    named = re.findall(
        r"^\| `(\w+)`",
        page.partition("| Evidence in a failure |")[2].partition("\n\n")[0],
        re.MULTILINE,
    )
    assert named
    assert set(named) <= {field.name for field in fields.FAILURE.fields}
    assert described(page) == page
    assert with_parts(schema) == schema
