"""Makes obstore's client of a bucket, with settings from the same sources as fsspec's."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from firstfault.store import settings
from firstfault.store.settings import build_storage_options, find_storage
from firstfault.store.uris import get_scheme

CREDENTIALS_LIFETIME = dt.timedelta(minutes=10)
"""How long obstore caches botocore's credentials; botocore renews expiring ones."""
BUCKET_NAME = re.compile(r"[A-Za-z0-9._-]{3,255}")
DEFAULT_REGION = "us-east-1"
SUPPORTED: dict[str, list[Any]] = settings.STORAGES["obstore"]
"""What obstore supports itself."""


class NoCredentialsError(Exception):
    """botocore found no credentials; its name survives in obstore's error text."""


def make_client(uri: str, overrides: Mapping[str, Any] | None) -> Any:
    """Return obstore's client for the bucket of `uri`;
    None if obstore lacks its scheme or settings.

    Raises:
        firstfault.errors.UsageError: a setting is invalid.
    """
    place = uri.rstrip("/").split("://", 1)[-1]
    bucket, _, path = place.partition("/")
    segments = path.split("/") if path else []
    if not BUCKET_NAME.fullmatch(bucket) or any(segment in {"", ".", ".."} for segment in segments):
        return None  # obstore rejects such names, fsspec accepts them
    protocol = get_scheme(uri)
    if protocol in {"s3", "s3a"}:
        return _make_s3_client(bucket, overrides)
    if protocol in {"gs", "gcs"}:
        return _make_gcs_client(bucket, overrides)
    return _make_azure_client(bucket, overrides) if protocol == "az" else None


def _make_bucket_client(kind: str, bucket: str, endpoint: str, config: Mapping[str, Any]) -> Any:
    import obstore.store  # noqa: PLC0415 - fsspec's settings don't need it

    options = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": dt.timedelta(seconds=settings.CONNECT_TIMEOUT_SECONDS),
        "timeout": dt.timedelta(seconds=settings.READ_TIMEOUT_SECONDS),
    }
    # `Store.request` retries; nested retries would multiply the timeouts
    retries = {"max_retries": 0}
    return getattr(obstore.store, kind)(
        bucket,
        client_options=options,
        retry_config=retries,
        **config,
    )


# --- S3 -------------------------------------------------------------------------------------------


def _make_s3_client(bucket: str, overrides: Mapping[str, Any] | None) -> Any:
    overrides = dict(overrides or {})
    client = dict(overrides.get("client_kwargs") or {})
    if not set(overrides) <= set(SUPPORTED["s3_options"]) or not set(client) <= set(
        SUPPORTED["s3_client_options"]
    ):
        return None
    options = build_storage_options("s3", overrides)
    endpoint = client.get("endpoint_url") or options.get("endpoint_url") or ""
    config: dict[str, Any] = {"region": client.get("region_name") or _find_region(endpoint)}
    if endpoint:
        config["endpoint"] = endpoint
    if overrides.get("requester_pays"):
        config["request_payer"] = True
    key = options.get("key")
    secret = options.get("secret")
    token = options.get("token")
    if options.get("anon"):
        config["skip_signature"] = True
    elif bool(key) != bool(secret):
        return None  # only botocore combines a key and a secret from two sources
    else:
        provider = (
            _build_static_provider(key, secret, token) if key else _find_credentials_provider()
        )
        if provider is not None:
            config["credential_provider"] = provider
    return _make_bucket_client("S3Store", bucket, endpoint, config)


def _find_region(endpoint: str) -> str:
    named = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION")
    if named or endpoint:
        return named or DEFAULT_REGION
    files = (os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"), "~/.aws/credentials")
    session = (
        _open_botocore_session()
        if any(Path(name).expanduser().is_file() for name in files)
        else None
    )
    return (
        str(session.get_config_variable("region") or DEFAULT_REGION)
        if session is not None
        else DEFAULT_REGION
    )


def _build_static_provider(key: Any, secret: Any, token: Any) -> Callable[[], dict[str, Any]]:
    """Return a provider of exactly these credentials; by default obstore adds AWS_SESSION_TOKEN."""
    return lambda: {
        "access_key_id": key,
        "secret_access_key": secret,
        "token": token or None,
        "expires_at": None,
    }


def _find_credentials_provider() -> Callable[[], dict[str, Any]] | None:
    """Return a provider of the credentials that botocore would use;
    None if obstore finds the same ones.
    """
    environment = os.environ
    key = environment.get("AWS_ACCESS_KEY_ID")
    secret = environment.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        return _build_static_provider(key, secret, environment.get("AWS_SESSION_TOKEN"))
    has_native = any(all(map(environment.get, names)) for names in SUPPORTED["s3_roles"])
    if has_native and not environment.get("AWS_PROFILE"):
        return None
    session = _open_botocore_session()
    return _build_botocore_provider(session) if session is not None else None


def _build_botocore_provider(session: Any) -> Callable[[], dict[str, Any]]:
    """Return a provider for profiles, single sign-on and instance roles, resolved on first use."""

    def provide() -> dict[str, Any]:
        credentials = session.get_credentials()  # cached by the session
        if credentials is None:
            raise NoCredentialsError(NoCredentialsError.__name__)
        # botocore may renew the credentials in another thread: a frozen copy has key, secret and
        # token of one renewal.
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.timezone.utc) + CREDENTIALS_LIFETIME,
        }

    return provide


def _open_botocore_session() -> Any:
    try:
        import botocore.session  # noqa: PLC0415 - slow, and rarely needed
    except ImportError:
        return None
    return botocore.session.get_session()


# --- Google Cloud Storage -------------------------------------------------------------------------


def _make_gcs_client(bucket: str, overrides: Mapping[str, Any] | None) -> Any:
    options = dict(overrides or {})
    if not set(options) <= set(SUPPORTED["gcs_options"]):
        return None
    config: dict[str, Any] = {}
    endpoint = str(options.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or "")
    if endpoint and "://" not in endpoint:
        return None  # gcsfs accepts special values
    token = options.get("token") or ("anon" if endpoint else None)
    if token == "anon":  # noqa: S105 - gcsfs's word for no credentials
        config["skip_signature"] = True
    elif token not in {None, "google_default"} or not _is_google_key_supported():
        return None
    if endpoint:
        config["base_url"] = endpoint
    return _make_bucket_client("GCSStore", bucket, endpoint, config)


def _is_google_key_supported() -> bool:
    file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if not file:
        return True
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("type") in SUPPORTED["gcs_credentials"]


# --- Azure ----------------------------------------------------------------------------------------


def _make_azure_client(container: str, overrides: Mapping[str, Any] | None) -> Any:
    names = find_storage("az")["variables"]
    if not set(overrides or {}) <= set(names):
        return None
    options = build_storage_options("az", overrides)
    if os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
        return None  # adlfs reads it, obstore doesn't
    config = {option: options[option] for option in names if options.get(option)}
    if not (config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
        return None
    return _make_bucket_client("AzureStore", container, "", config)
