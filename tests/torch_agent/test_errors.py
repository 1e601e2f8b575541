"""torch elastic's error.json, compared with what torch itself writes and reads,
and the classes of errors.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from firstfault.model import CATEGORIES, Kind, Origin
from firstfault_torch.agent.deaths import read_torch_exception
from firstfault_torch.failures.failure_records import ErrorClass, classify_error
from firstfault_torch.failures.torch_error_file import (
    error_file_data,
    read_error_file,
    read_traceback,
    write_error_file,
)

NANO = 1_000_000_000


def test_the_error_file_has_the_keys_of_torchs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our file has the keys of torch's own, with values of the same types;
    torch takes message and time from it.
    """

    def shape(value: object) -> object:
        return (
            {key: shape(item) for key, item in value.items()}
            if isinstance(value, dict)
            else type(value)
        )

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "theirs.json"))
    ErrorHandler().record_exception(ValueError("boom"))
    write_error_file(
        tmp_path / "ours.json", error_file_data("ValueError", "boom", "Traceback", 5 * NANO)
    )
    ours, theirs = (
        json.loads((tmp_path / name).read_text()) for name in ("ours.json", "theirs.json")
    )
    assert shape(ours) == shape(theirs)
    assert ours["message"]["message"] == theirs["message"]["message"] == "ValueError: boom"
    path = tmp_path / "error.json"
    write_error_file(
        path,
        error_file_data(
            "my.module.LostError",
            "boom",
            "Traceback of it",
            1_700_000_000_900_000_000,
        ),
    )
    failure = ProcessFailure(local_rank=1, pid=42, exitcode=1, error_file=str(path))
    assert failure.timestamp == 1_700_000_000
    word = {
        "message": "LostError: boom",
        "extraInfo": {"py_callstack": "Traceback of it", "timestamp": "1700000000"},
    }
    assert failure.message == word
    assert read_error_file(path) == word


def test_the_error_file_is_written_whole(tmp_path: Path) -> None:
    """An older file is replaced, and nothing else is left beside it;
    a lone surrogate in a message is escaped.
    """
    path = tmp_path / "error.json"
    path.write_text("{")
    write_error_file(path, error_file_data("ValueError", "\ud800", "", 0))
    assert [item.name for item in tmp_path.iterdir()] == ["error.json"]
    word = read_error_file(path)
    assert word["message"] == "ValueError: \ud800"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, None)
            for text in (None, "", "{", "[" * 5_000, "[]", "7", "null", '{"other": 1}', "\udcff")
        ),
        *(
            (json.dumps({"message": message}), str(message))
            for message in ("a plain text", ["a", "list"], 7)
        ),
    ],
)
def test_a_foreign_error_file_is_ignored(
    tmp_path: Path, text: str | None, message: str | None
) -> None:
    """A missing, truncated or foreign file gives None; a message without parts is a message."""
    if text is not None:
        (tmp_path / "error.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    expected = None if message is None else {"message": message, "extraInfo": {}}
    assert read_error_file(tmp_path / "error.json") == expected


class _Thing:
    """A class that must not be unpickled."""


def test_only_a_text_is_unpickled_from_the_traceback_file(tmp_path: Path) -> None:
    """The traceback is read from torch.multiprocessing's pickle;
    a truncated file gives an empty text.

    Only a text is unpickled, never a class.
    """
    path = tmp_path / "traceback"
    assert read_traceback(path) == ""
    whole = pickle.dumps("Traceback (most recent call last):\nValueError: boom\n")
    others = [
        pickle.dumps(content) for content in (7, ["Traceback"], b"Traceback", _Thing(), print)
    ]
    for data in (*(whole[:length] for length in range(len(whole))), *others):
        path.write_bytes(data)
        assert read_traceback(path) == "", data
    path.write_bytes(whole)
    assert read_traceback(path).endswith("ValueError: boom\n")


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"py_callstack": "Traceback of it", "timestamp": "1"}, "Traceback of it"),
        ({"py_callstack": ""}, "ValueError: boom"),
        ({}, "ValueError: boom"),
        (None, "ValueError: boom"),
        ("odd", "ValueError: boom"),
    ],
)
def test_an_exception_is_read_from_torchs_error_file(
    extra: object, text: str, tmp_path: Path
) -> None:
    """The exception is read from torch's error.json, whatever extraInfo contains."""
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "ValueError: boom", "extraInfo": extra}}))
    kept = read_torch_exception(str(path), "")
    assert (kept.exception.type, kept.exception.message) == ("ValueError", "boom")
    assert kept.traceback == text
    assert read_torch_exception(str(tmp_path / "missing.json"), str(tmp_path / "missing")) is None


def test_every_class_has_its_flyte_class() -> None:
    """Each class has a known category; only a recoverable exception is
    retried on the user's budget.
    """
    for error_class in ErrorClass:
        flyte = error_class.value
        assert flyte.category == "" or flyte.category in CATEGORIES
        assert flyte.code.startswith(f"{flyte.origin.value}:")
        if error_class is ErrorClass.RECOVERABLE_EXCEPTION:
            assert (flyte.kind, flyte.origin) == (Kind.RECOVERABLE, Origin.USER)
        else:
            assert (flyte.kind is Kind.RECOVERABLE) is (flyte.origin is Origin.SYSTEM)


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (RendezvousTimeoutError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (RendezvousConnectionError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (torch.distributed.DistNetworkError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (torch.distributed.DistStoreError("x"), ErrorClass.RENDEZVOUS_ERROR),
        (OSError(28, "No space left on device"), ErrorClass.INFRA_ERROR),
        (MemoryError(), ErrorClass.INFRA_ERROR),
        (ConnectionRefusedError(), ErrorClass.INFRA_ERROR),
        (FileNotFoundError(2, "No such file or directory", "./train"), ErrorClass.INPUT_ERROR),
        (OSError(8, "Exec format error", "./train"), ErrorClass.INPUT_ERROR),
        (ValueError("bad port"), ErrorClass.INPUT_ERROR),
        (TypeError("x"), ErrorClass.INPUT_ERROR),
        (RuntimeError("x"), ErrorClass.PLATFORM_ERROR),
        (torch.distributed.DistError("x"), ErrorClass.PLATFORM_ERROR),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.name,
)
def test_an_agents_error_has_its_class(error: Exception, error_class: ErrorClass) -> None:
    """An error of the agent is a rendezvous, infra, input or platform error."""
    assert classify_error(error) is error_class
