"""How a store creates an object only once: what clients answer, and storages that can't."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import stamina
from fsspec.asyn import AsyncFileSystem

from firstfault.errors import AccessDeniedError, StoreUnavailableError
from firstfault.store import open_store
from firstfault.utils.run_sync import run_sync


@pytest.fixture(autouse=True)
def _without_waiting() -> Iterator[None]:
    stamina.set_testing(True, attempts=3)
    yield
    stamina.set_testing(False)


class _Conditional(AsyncFileSystem):
    """An asynchronous filesystem, as s3fs is, with prepared answers to conditional writes."""

    protocol = "conditional"
    objects: dict[str, bytes] = {}  # noqa: RUF012 - shared by all instances on purpose
    answers: list[Exception] = []  # noqa: RUF012
    modes: list[str] = []  # noqa: RUF012

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.modes.append(mode)
        if mode == "create" and self.answers:
            raise self.answers.pop(0)
        self.objects[path] = value

    async def _info(self, path: str, **_options: Any) -> dict[str, Any]:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.objects[path]), "type": "file"}


class _Former(_Conditional):
    """A filesystem of a version without conditional writes."""

    async def _pipe_file(self, path: str, value: bytes, **options: Any) -> None:  # type: ignore[override]
        assert "mode" not in options
        self.modes.append("overwrite")
        self.objects[path] = value


@pytest.fixture
def filesystem(monkeypatch: pytest.MonkeyPatch) -> type[_Conditional]:
    for name, value in (("objects", {}), ("answers", []), ("modes", [])):
        monkeypatch.setattr(_Conditional, name, value)
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _protocol: _Conditional)
    return _Conditional


def _s3_error(code: str, number: int = errno.EIO) -> OSError:
    """Return an error as s3fs makes it of one of botocore."""
    cause = type("ClientError", (Exception,), {"response": {"Error": {"Code": code}}})()
    error = OSError(number, code)
    error.__cause__ = cause
    return error


def _create(data: bytes = b"own") -> bool:
    async def create() -> bool:
        async with open_store("conditional://bucket/out") as store:
            return await store.create("error.pb", data)

    return run_sync(create())


_REFUSED = {
    "s3fs, gcsfs, adlfs": FileExistsError("error.pb"),
    "an S3 server that names no condition": _s3_error("PreconditionFailed", errno.EINVAL),
}


@pytest.mark.parametrize("answer", _REFUSED.values(), ids=_REFUSED)
def test_an_existing_object_is_left_alone(
    answer: Exception, filesystem: type[_Conditional]
) -> None:
    filesystem.answers.append(answer)
    assert not _create()
    assert filesystem.modes == ["create"]


def test_a_write_in_progress_is_waited_for(filesystem: type[_Conditional]) -> None:
    """S3 answers 409 while another conditional write of the object may still fail."""
    filesystem.answers.append(_s3_error("ConditionalRequestConflict"))
    assert _create()
    assert filesystem.modes == ["create", "create"]


def test_a_write_that_stays_in_progress_is_an_error(filesystem: type[_Conditional]) -> None:
    filesystem.answers += [_s3_error("ConditionalRequestConflict")] * 3
    with pytest.raises(StoreUnavailableError, match=r"another process writes error\.pb"):
        _create()


def test_another_error_is_raised(filesystem: type[_Conditional]) -> None:
    filesystem.answers.append(PermissionError("Access Denied"))
    with pytest.raises(AccessDeniedError):
        _create()


_CANNOT = {
    "a server": _s3_error("NotImplemented"),
    "a client": type("ParamValidationError", (Exception,), {})("Unknown parameter IfNoneMatch"),
}


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("answer", _CANNOT.values(), ids=_CANNOT)
def test_a_storage_that_knows_no_conditions_is_asked_first(
    answer: Exception, exists: bool, filesystem: type[_Conditional]
) -> None:
    filesystem.answers.append(answer)
    filesystem.objects |= {"bucket/out/error.pb": b"another's"} if exists else {}
    assert _create() is not exists
    assert filesystem.objects["bucket/out/error.pb"] == (b"another's" if exists else b"own")


def test_a_filesystem_that_knows_no_conditions_is_asked_first(
    filesystem: type[_Conditional], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda _protocol: _Former)
    assert [_create(b"own"), _create(b"later")] == [True, False]
    assert filesystem.modes == ["overwrite"]


def test_a_local_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    async def create(data: bytes) -> bool:
        async with open_store(str(tmp_path)) as store:
            return await store.create("error.pb", data)

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    assert [run_sync(create(b"own")), run_sync(create(b"later"))] == [True, False]
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("error.pb", b"own")]
