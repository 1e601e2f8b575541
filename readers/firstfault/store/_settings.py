"""Credentials and endpoints of both clients: the caller's, else flytekit's variables, else what each client finds."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstfault.errors import UsageError
from firstfault.store._base import protocol_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run 'gcloud auth application-default login'"
_MICROSOFT = (
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY "
    "(or FLYTE_AZURE_STORAGE_ACCOUNT_NAME and FLYTE_AZURE_STORAGE_ACCOUNT_KEY)"
)
_WHAT_TO_SET = {"gs": _GOOGLE, "gcs": _GOOGLE, "az": _MICROSOFT, "abfs": _MICROSOFT, "abfss": _MICROSOFT}
_AMAZON = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or FLYTE_AWS_ACCESS_KEY_ID and FLYTE_AWS_SECRET_ACCESS_KEY)"

_AZURE = {
    "account_name": "FLYTE_AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "FLYTE_AZURE_STORAGE_ACCOUNT_KEY",
    "client_id": "FLYTE_AZURE_CLIENT_ID",
    "client_secret": "FLYTE_AZURE_CLIENT_SECRET",
    "tenant_id": "FLYTE_AZURE_TENANT_ID",
}
_AWS = {"key": "FLYTE_AWS_ACCESS_KEY_ID", "secret": "FLYTE_AWS_SECRET_ACCESS_KEY"}
_OPTIONS = {"s3": _AWS, "s3a": _AWS, "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE}
"""Options of fsspec, and flytekit's variables, by scheme."""


def no_credentials(protocol: str) -> str:
    """Return the advice for a client that finds no credentials."""
    return f"no credentials; {_WHAT_TO_SET.get(protocol, _AMAZON)}"


def other_region(region: str) -> str:
    """Return the advice for a bucket in another region than the client's."""
    where = f"the bucket is in the region {region}" if region else "the bucket is in another region"
    return f"{where}; set AWS_DEFAULT_REGION={region or '<its region>'}"


def storage_options(protocol: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fsspec storage options for `protocol`.

    They are flytekit's variables ``FLYTE_AWS_*`` and ``FLYTE_AZURE_*``; `given` overrides them. The client itself
    finds what is not set there (for S3: ``AWS_*``, profiles, instance roles).

    Raises:
        UsageError: the endpoint is not a URL.
    """
    names = _OPTIONS.get(protocol, {})
    options: dict[str, Any] = {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
    if protocol in {"s3", "s3a"}:
        options |= _s3_options()
    return {**options, **(given or {})}


def _s3_options() -> dict[str, Any]:
    options: dict[str, Any] = {
        # else s3fs sends a HEAD before every GET
        "max_concurrency": 1,
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "max_pool_connections": 64,
            # the store retries; botocore's retries would multiply the timeouts
            "retries": {"total_max_attempts": 1},
        },
    }
    endpoints = ("FLYTE_AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = next(filter(None, map(os.environ.get, endpoints)), None)
    if endpoint:
        if "://" not in endpoint:
            raise UsageError(f"the S3 endpoint must be a URL such as https://host:port, not {endpoint!r}")
        options["endpoint_url"] = endpoint
    return options


# --- obstore's settings, from the same sources as fsspec's ------------------------------------------------------------

_CREDENTIALS_LAST = dt.timedelta(minutes=10)
"""How long obstore uses credentials of botocore, which renews those that expire, before it asks again."""
_BUCKET = re.compile(r"[A-Za-z0-9._-]{3,255}")
_REGION = "us-east-1"
_S3_OPTIONS = {"key", "secret", "token", "anon", "endpoint_url", "client_kwargs", "requester_pays"}
_S3_CLIENT_OPTIONS = {"endpoint_url", "region_name"}
_GCS_OPTIONS = {"token", "project", "endpoint_url"}
_GCS_CREDENTIALS = {"service_account", "authorized_user"}
_NATIVE_VARIABLES = (
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
)
"""Variables of a service account's and a container's role: obstore finds those credentials itself."""


class NoCredentialsError(Exception):
    """botocore found no credentials."""


def client_for(uri: str, given: Mapping[str, Any] | None) -> Any:
    """Return an obstore store for the bucket of `uri`; None if obstore does not support its scheme or settings.

    Raises:
        firstfault.errors.UsageError: a setting is invalid.
    """
    place = uri.rstrip("/").split("://", 1)[-1]
    bucket, _, path = place.partition("/")
    segments = path.split("/") if path else []
    if not _BUCKET.fullmatch(bucket) or any(segment in {"", ".", ".."} for segment in segments):
        return None  # obstore refuses such names, fsspec does not
    protocol = protocol_of(uri)
    if protocol in {"s3", "s3a"}:
        return _s3(bucket, given)
    if protocol in {"gs", "gcs"}:
        return _gcs(bucket, given)
    return _azure(bucket, given) if protocol == "az" else None


def _client(kind: str, bucket: str, endpoint: str, config: Mapping[str, Any]) -> Any:
    import obstore.store  # noqa: PLC0415 - fsspec's settings do not need it

    options = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": dt.timedelta(seconds=CONNECT_TIMEOUT_S),
        "timeout": dt.timedelta(seconds=READ_TIMEOUT_S),
    }
    # the store retries; retries inside obstore would multiply the timeouts
    retries = {"max_retries": 0}
    return getattr(obstore.store, kind)(bucket, client_options=options, retry_config=retries, **config)


# --- S3 -------------------------------------------------------------------------------------------------------------


def _s3(bucket: str, given: Mapping[str, Any] | None) -> Any:
    given = dict(given or {})
    client = dict(given.get("client_kwargs") or {})
    if not set(given) <= _S3_OPTIONS or not set(client) <= _S3_CLIENT_OPTIONS:
        return None
    options = storage_options("s3", given)
    endpoint = client.get("endpoint_url") or options.get("endpoint_url") or ""
    config: dict[str, Any] = {"region": client.get("region_name") or _region(endpoint)}
    if endpoint:
        config["endpoint"] = endpoint
    if given.get("requester_pays"):
        config["request_payer"] = True
    key, secret, token = options.get("key"), options.get("secret"), options.get("token")
    if options.get("anon"):
        config["skip_signature"] = True
    elif bool(key) != bool(secret):
        return None  # only botocore combines a key and a secret of two sources
    else:
        provider = _fixed(key, secret, token) if key else _credentials()
        if provider is not None:
            config["credential_provider"] = provider
    return _client("S3Store", bucket, endpoint, config)


def _region(endpoint: str) -> str:
    named = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")
    if named or endpoint:
        return named or _REGION
    files = (os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"), "~/.aws/credentials")
    session = _botocore_session() if any(Path(name).expanduser().is_file() for name in files) else None
    return str(session.get_config_variable("region") or _REGION) if session is not None else _REGION


def _fixed(key: Any, secret: Any, token: Any) -> Callable[[], dict[str, Any]]:
    """Return a provider of these credentials alone; obstore by itself would add AWS_SESSION_TOKEN."""
    return lambda: {"access_key_id": key, "secret_access_key": secret, "token": token or None, "expires_at": None}


def _credentials() -> Callable[[], dict[str, Any]] | None:
    """Return a provider of the credentials that botocore finds; None if obstore finds the same ones itself."""
    environment = os.environ
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        return _fixed(key, secret, environment.get("AWS_SESSION_TOKEN"))
    if not environment.get("AWS_PROFILE") and any(all(map(environment.get, names)) for names in _NATIVE_VARIABLES):
        return None
    session = _botocore_session()
    return _of_botocore(session) if session is not None else None


def _of_botocore(session: Any) -> Callable[[], dict[str, Any]]:
    """Return a provider of a profile's, single sign-on's or an instance's credentials, looked up on first use."""

    def provide() -> dict[str, Any]:
        found = session.get_credentials()  # which botocore keeps
        if found is None:
            raise NoCredentialsError(NoCredentialsError.__name__)
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.timezone.utc) + _CREDENTIALS_LAST,
        }

    return provide


def _botocore_session() -> Any:
    try:
        import botocore.session  # noqa: PLC0415 - slow, and rarely needed
    except ImportError:
        return None
    return botocore.session.get_session()


# --- Google Cloud Storage -------------------------------------------------------------------------------------------


def _gcs(bucket: str, given: Mapping[str, Any] | None) -> Any:
    options = dict(given or {})
    if not set(options) <= _GCS_OPTIONS:
        return None
    config: dict[str, Any] = {}
    endpoint = str(options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or "")
    if endpoint and "://" not in endpoint:
        return None  # gcsfs accepts special values
    token = options.get("token") or ("anon" if endpoint else None)
    if token == "anon":  # noqa: S105 - gcsfs's word for no credentials
        config["skip_signature"] = True
    elif token not in {None, "google_default"} or not _google_key_is_known():
        return None
    if endpoint:
        config["base_url"] = endpoint
    return _client("GCSStore", bucket, endpoint, config)


def _google_key_is_known() -> bool:
    file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if not file:
        return True
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("type") in _GCS_CREDENTIALS


# --- Azure ----------------------------------------------------------------------------------------------------------


def _azure(container: str, given: Mapping[str, Any] | None) -> Any:
    if not set(given or {}) <= set(_AZURE):
        return None
    options = storage_options("az", given)
    if os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return None  # adlfs reads it, obstore does not
    config = {option: options[option] for option in _AZURE if options.get(option)}
    if not (config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
        return None
    return _client("AzureStore", container, "", config)
