"""Signatures: what comes with firstfault is sound, and a file that is not is refused with file, line and reason."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest

from firstfault.errors import SignatureError
from firstfault.evidence import Role, built_in_signatures, classify, load_signatures
from firstfault.evidence.signatures import parse_signatures

if TYPE_CHECKING:
    from pathlib import Path

    from firstfault.evidence.signatures import Signature

PATIENCE_S = 5.0
BUILT_IN = built_in_signatures()
GOOD = """schema = 1

[[noise]]
id = "advice"
pattern = "have you tried"
role = "ambiguous"
category = "unknown"
example = "have you tried to turn it off"
why = "advice"

[[signature]]
id = "store"
pattern = "shard (?P<rank>\\\\d+) is locked"
types = ["ShardError"]
role = "primary"
category = "storage"
example = "ShardError: shard 3 is locked"
why = "the store speaks of itself"
"""


def _parts(example: str) -> tuple[str, str]:
    """An example's exception and its text."""
    match = re.match(r"((?:[a-z_]\w*\.|[a-z]\w*::)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): ?", example)
    return (match[1], example[match.end() :]) if match else ("", example)


@pytest.mark.parametrize("signature", BUILT_IN.signatures, ids=lambda signature: signature.id)
def test_an_example_is_what_it_is_an_example_of(signature: Signature) -> None:
    """Each example is decided by its own signature, and by none that stands before it."""
    kind, message = _parts(signature.example)
    found = classify(message, kind)
    assert (found.signature, found.role, found.category) == (signature.id, signature.role, signature.category)


@pytest.mark.parametrize("noise", BUILT_IN.noise, ids=lambda noise: noise.id)
def test_noise_alone(noise: Signature) -> None:
    """Noise decides if there is nothing else, and nothing if there is."""
    found = classify(noise.example)
    assert (found.signature, found.role) == (noise.id, noise.role)
    assert classify(f"CUDA error: misaligned address\n{noise.example}").signature == "gpu-kernel"


def test_every_reason_is_a_sentence_of_its_own() -> None:
    """Whoever reads the file learns why; nothing is copied from entry to entry without thought."""
    entries = BUILT_IN.noise + BUILT_IN.signatures
    assert all(len(entry.why) > 10 and not entry.why.endswith(".") for entry in entries)
    assert len({entry.id for entry in entries}) == len(entries)


def test_a_file_of_ones_own_comes_first(tmp_path: Path) -> None:
    """Its entries are asked before ours; ours are still there."""
    file = tmp_path / "ours.toml"
    file.write_text(GOOD)
    signatures = load_signatures(file) + BUILT_IN
    found = classify("shard 12 is locked", "data.ShardError", signatures=signatures)
    assert (found.signature, found.role) == ("store", Role.PRIMARY)
    assert found.pointer is not None
    assert found.pointer.rank == 12
    assert classify("shard 12 is locked", "OSError", signatures=signatures).signature == "program"
    based = classify("shard 1 is locked", "LocalError", ("ShardError", "Exception"), signatures=signatures)
    assert based.signature == "store", "a base counts as well"


@pytest.mark.parametrize(
    ("change", "line", "reason"),
    [
        (("schema = 1", "schema = 7"), 1, "must say schema = 1, not 7"),
        (("schema = 1", ""), 1, "must say schema = 1, not None"),
        (("[[signature]]", "[[signatures]]"), 1, "unknown table 'signatures'"),
        (('why = "the store', 'reason = "the store'), 11, "'why' is missing"),
        (('types = ["', 'kinds = ["'), 11, "unknown key 'kinds'"),
        (('types = ["ShardError"]', 'types = "ShardError"'), 11, "'types' must be a list"),
        (('role = "primary"', 'role = "first"'), 11, "role 'first' must be one of primary, secondary, ambiguous"),
        (('category = "storage"', 'category = "stuff"'), 11, "category 'stuff' is none"),
        (("shard (?P", "shard ((?P"), 11, "'pattern' is no regular expression"),
        (("?P<rank>", "?P<shard>"), 11, "group 'shard' must be one of"),
        (("is locked", "is lost"), 11, "the pattern of 'store' is not found in its own example"),
        (('"have you tried"', '".*"'), 3, "'pattern' is found in an empty text"),
        (('id = "store"', 'id = "advice"'), 11, "id 'advice' is taken by line 3"),
        (('id = "store"', "id = 4"), 11, "'id' must be a text that is not empty"),
        (('example = "have', 'example = " '), 3, "is not found in its own example"),
    ],
)
def test_a_file_that_is_not_valid(change: tuple[str, str], line: int, reason: str) -> None:
    """The error names the file, the line at which the entry begins, and what to change."""
    text = GOOD.replace(*change, 1)
    assert text != GOOD
    with pytest.raises(SignatureError) as caught:
        parse_signatures(text, "ours.toml")
    assert str(caught.value).startswith(f"ours.toml:{line}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """No file, no text, no TOML: one line."""
    with pytest.raises(SignatureError, match=r"none\.toml: cannot be read"):
        load_signatures(tmp_path / "none.toml")
    file = tmp_path / "bytes.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SignatureError, match="cannot be read"):
        load_signatures(file)
    with pytest.raises(SignatureError, match=r"ours\.toml: no valid TOML: .*line 2"):
        parse_signatures('schema = 1\n[[signature\nid = "x"', "ours.toml")


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message", "role", "category"),
    [
        (
            "c10::DistBackendError",
            "[Rank 9] watchdog terminated with exception: CUDA error: misaligned address",
            "primary",
            "gpu_kernel",
        ),
        ("torch.distributed.DistBackendError", "NCCL error: Cuda failure 2 'out of memory'", "primary", "cuda_oom"),
        ("RuntimeError", "NCCL error: unhandled cuda error, NCCL version 9.9.9", "ambiguous", "collective"),
        (
            "RuntimeError",
            "[gloo/pair.cc:1] Read error [10.9.8.7]:4711: Connection reset by peer",
            "secondary",
            "collective",
        ),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "secondary", "collective"),
        (
            "requests.exceptions.ConnectionError",
            "('Connection aborted.', ConnectionResetError(104, 'x'))",
            "primary",
            "external_service",
        ),
        (
            "torch.distributed.DistNetworkError",
            "failed to listen on port 7: EADDRINUSE, address already in use",
            "primary",
            "config",
        ),
        ("torch.distributed.DistNetworkError", "recvValue failed: Connection reset by peer", "secondary", "collective"),
        ("OSError", "[Errno 28] No space left on device", "primary", "disk_full"),
        ("ValueError", "the loss is NaN at step 12", "primary", "numerics"),
        ("ValueError", "bad batch", "primary", "user_code"),
        ("mypackage.Broken", "bad batch", "ambiguous", "unknown"),
        ("elastic warning", "Sending process 12 closing signal SIGKILL", "secondary", "stopped"),
        ("elastic error", "failed (exitcode: -9) local_rank: 7 (pid: 12)", "primary", "signal"),
        ("elastic error", "failed (exitcode: 1) local_rank: 7 (pid: 12)", "ambiguous", "exit"),
        ("", "", "ambiguous", "unknown"),
    ],
)
def test_a_text(kind: str, message: str, role: str, category: str) -> None:
    """The carrier does not count, what is carried does."""
    found = classify(message, kind)
    assert (found.role.value, found.category) == (role, category), found


@pytest.mark.parametrize(
    ("message", "pointer"),
    [
        ("[gloo/pair.cc:1] Connection closed by peer [10.9.8.7]:4711", {"ip": "10.9.8.7", "port": 4711}),
        ("NCCL WARN Net : Connection closed by remote peer node-7<4711>", {"host": "node-7", "port": 4711}),
        ("[Rank 0]: Rank 6 failed to pass monitoredBarrier in 9000 ms", {"rank": 6}),
        (
            "[3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key",
            {"rank": 0, "store": True},
        ),
        ("bad batch", None),
    ],
)
def test_whom_a_text_names(message: str, pointer: dict[str, object] | None) -> None:
    """The pointer holds what the text says, and nothing else."""
    found = classify(message, "RuntimeError").pointer
    assert (found.as_dict() if found is not None else None) == pointer


def test_a_huge_text_takes_bounded_time() -> None:
    """Both ends of a text are looked at, however long it is."""
    began = time.monotonic()
    found = classify("CUDA error: misaligned address" + "x [" * 2_000_000, "RuntimeError")
    assert found.category == "gpu_kernel"
    assert time.monotonic() - began < PATIENCE_S
