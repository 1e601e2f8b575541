"""The settings of obstore, and those for which fsspec is used."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import obstore
import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from firstfault.errors import AccessDeniedError, StoreUnavailableError
from firstfault.store import CLIENT_VARIABLE, Store, open_store
from firstfault.store.fsspec_store import FsspecStore
from firstfault.store.obstore_settings import make_client
from firstfault.store.obstore_store import ObstoreStore
from tests.s3_server import S3

pytestmark = pytest.mark.slow

_KEYS = {"key": "k", "secret": "s"}


@pytest.mark.parametrize(
    ("uri", "options", "kind"),
    [
        ("s3://a-bucket/run", _KEYS, S3Store),
        (
            "s3a://a-bucket/run",
            {**_KEYS, "token": "t", "endpoint_url": "http://127.0.0.1:1"},
            S3Store,
        ),
        ("s3://a-bucket", {"anon": True, "client_kwargs": {"region_name": "eu-west-1"}}, S3Store),
        ("s3://a-bucket", {**_KEYS, "requester_pays": True}, S3Store),
        ("gs://a_bucket.b/run", {"token": "anon"}, GCSStore),
        ("gcs://a-bucket/run", {"token": "anon", "endpoint_url": "http://127.0.0.1:1"}, GCSStore),
        ("az://container/run", {"account_name": "name", "account_key": "a2V5"}, AzureStore),
    ],
)
def test_settings_that_obstore_supports_give_an_obstore_client(
    uri: str, options: dict[str, Any], kind: type
) -> None:
    """Settings that obstore supports give an obstore client and store."""
    assert isinstance(make_client(uri, options), kind)
    assert isinstance(open_store(uri, options), ObstoreStore)


@pytest.mark.parametrize(
    ("uri", "options"),
    [
        ("/a/folder", {}),
        ("file:///a/folder", {}),
        ("memory://folder", {}),
        ("s3://a-bucket//run", _KEYS),
        ("s3://a-bucket/a/../run", _KEYS),
        ("s3://Not_A_Bucket!/run", _KEYS),
        ("s3://a-bucket/run", {"key": "k"}),
        ("s3://a-bucket/run", {**_KEYS, "profile": "other"}),
        ("s3://a-bucket/run", {**_KEYS, "client_kwargs": {"verify": False}}),
        ("s3://a-bucket/run", {**_KEYS, "config_kwargs": {"s3": {"addressing_style": "virtual"}}}),
        ("gs://a-bucket/run", {"token": "/a/key.json"}),
        ("gs://a-bucket/run", {"token": "anon", "consistency": "none"}),
        ("az://container/run", {"account_name": "name", "connection_string": "x"}),
        ("az://container/run", {}),
        ("abfs://container@name.dfs.core.windows.net/run", {"account_name": "name"}),
    ],
)
def test_unsupported_schemes_and_options_use_fsspec(uri: str, options: dict[str, Any]) -> None:
    """For schemes, paths and options that obstore does not support, fsspec is used."""
    assert make_client(uri, options) is None
    assert isinstance(open_store(uri, options), FsspecStore)


_AZURE = {"FLYTE_AZURE_STORAGE_ACCOUNT_NAME": "name", "FLYTE_AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}
_USER = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "t"}


@pytest.mark.parametrize(
    ("uri", "environment", "is_supported"),
    [
        ("az://container/run", _AZURE, True),
        (
            "az://container/run",
            {**_AZURE, "AZURE_STORAGE_CONNECTION_STRING": "AccountName=name"},
            False,
        ),
        ("gs://a-bucket/run", {"STORAGE_EMULATOR_HOST": "http://127.0.0.1:1"}, True),
        ("gs://a-bucket/run", {"STORAGE_EMULATOR_HOST": "default"}, False),
        ("gs://a-bucket/run", {"GOOGLE_APPLICATION_CREDENTIALS": _USER}, True),
        (
            "gs://a-bucket/run",
            {"GOOGLE_APPLICATION_CREDENTIALS": {"type": "external_account"}},
            False,
        ),
        ("gs://a-bucket/run", {"GOOGLE_APPLICATION_CREDENTIALS": []}, False),
    ],
)
def test_flytekits_variables_suffice_for_obstore(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uri: str,
    environment: dict[str, Any],
    is_supported: bool,
) -> None:
    """Flytekit's variables, an emulator and a key file are enough for obstore; for others,
    fsspec is used.
    """
    for name, value in environment.items():
        file = tmp_path / "content.json"
        file.write_text(json.dumps(value))
        monkeypatch.setenv(name, value if isinstance(value, str) else str(file))
    assert (make_client(uri, None) is not None) is is_supported


def test_credentials_of_an_aws_profile_are_found(
    s3: S3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_store: Callable[..., Any],
) -> None:
    """Credentials of a profile in AWS's files are found."""
    file = tmp_path / "credentials"
    file.write_text(
        f"[lab]\naws_access_key_id={s3.access_key}\naws_secret_access_key={s3.secret_key}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    monkeypatch.setenv(CLIENT_VARIABLE, "obstore")

    async def use(store: Store) -> bytes:
        assert isinstance(store, ObstoreStore)
        await store.put("a.pb", b"data")
        return await store.get("a.pb")

    assert with_store(s3.uri(), use) == b"data"


def test_flytekits_keys_are_used_without_a_foreign_session_token(
    s3_environ: S3, monkeypatch: pytest.MonkeyPatch, with_store: Callable[..., Any]
) -> None:
    """Flytekit's keys are used without a session token of the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "of another account")
    assert with_store(s3_environ.uri(), lambda store: store.list()) == []


def test_a_variable_names_the_client_and_an_unknown_one_is_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A variable names the client; an unknown name is ignored, with one warning."""
    monkeypatch.setenv(CLIENT_VARIABLE, "fsspec")
    assert isinstance(open_store("s3://a-bucket/run", _KEYS), FsspecStore)
    monkeypatch.setenv(CLIENT_VARIABLE, "boto3")
    for _ in range(2):
        assert isinstance(open_store("s3://a-bucket/run", _KEYS), ObstoreStore)
    assert caplog.messages == [
        "firstfault: ignoring FIRSTFAULT_STORAGE_CLIENT: it must be fsspec or obstore, not 'boto3'"
    ]


def test_a_process_that_may_fork_uses_fsspec(
    s3_environ: S3, with_store: Callable[..., Any]
) -> None:
    """A process that may fork uses fsspec, and so does a child whose parent has used obstore."""
    assert isinstance(open_store(s3_environ.uri(), may_fork=True), FsspecStore)
    assert with_store(s3_environ.uri(), lambda store: store.list()) == []
    assert isinstance(open_store(s3_environ.uri()), ObstoreStore)
    child = os.fork()
    if child == 0:
        os._exit(7 if isinstance(open_store(s3_environ.uri()), FsspecStore) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


_NO_ROLE = "Error performing GET http://169.254.169.254/compute"
_SET = "no credentials; set GOOGLE_APPLICATION_CREDENTIALS"


@pytest.mark.parametrize(
    ("said", "kind", "times"),
    [
        (
            "Server returned non-2xx status code: 503 Service Unavailable: busy",
            StoreUnavailableError,
            3,
        ),
        ("operation timed out", StoreUnavailableError, 3),
        ("Server returned non-2xx status code: 403 Forbidden: no role", AccessDeniedError, 1),
        (_NO_ROLE, AccessDeniedError, 1),
    ],
)
def test_transient_credential_errors_are_retried_and_refusals_reported(
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    kind: type[Exception],
    times: int,
) -> None:
    """What may be over soon is asked again, a refusal is told as one; without a cloud,
    a line says what to set.
    """
    text = f"Generic GCS error: Error performing token request: {said}"
    listed = Mock(side_effect=obstore.exceptions.GenericError(text))
    monkeypatch.setattr(obstore, "list_with_delimiter_async", listed)

    async def look() -> None:
        async with open_store("gs://a-bucket/run", {"token": "anon"}, attempts=3) as store:
            await store.list()

    with pytest.raises(kind) as caught:
        asyncio.run(look())
    assert (
        (_SET in str(caught.value)) is ("no credentials" in str(caught.value)) is (said == _NO_ROLE)
    )
    assert listed.call_count == times
