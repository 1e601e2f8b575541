"""Endpoints, credentials and timeouts of the storage clients, as fsspec's options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from firstfault.errors import UsageError

CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 20
GOOGLE_CREDENTIALS_ADVICE = (
    "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run 'gcloud auth application-default login'"
)
AZURE_CREDENTIALS_ADVICE = (
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY "
    "(or FLYTE_AZURE_STORAGE_ACCOUNT_NAME and FLYTE_AZURE_STORAGE_ACCOUNT_KEY)"
)
CREDENTIALS_ADVICE = {
    **dict.fromkeys(("gs", "gcs"), GOOGLE_CREDENTIALS_ADVICE),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE_CREDENTIALS_ADVICE),
}
AWS_CREDENTIALS_ADVICE = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or FLYTE_AWS_ACCESS_KEY_ID and FLYTE_AWS_SECRET_ACCESS_KEY)"
)

AZURE_VARIABLES = {
    "account_name": "FLYTE_AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "FLYTE_AZURE_STORAGE_ACCOUNT_KEY",
    "client_id": "FLYTE_AZURE_CLIENT_ID",
    "client_secret": "FLYTE_AZURE_CLIENT_SECRET",
    "tenant_id": "FLYTE_AZURE_TENANT_ID",
}
AWS_VARIABLES = {"key": "FLYTE_AWS_ACCESS_KEY_ID", "secret": "FLYTE_AWS_SECRET_ACCESS_KEY"}
VARIABLES_BY_SCHEME = {
    **dict.fromkeys(("s3", "s3a"), AWS_VARIABLES),
    **dict.fromkeys(("az", "abfs", "abfss"), AZURE_VARIABLES),
}
"""For each scheme: fsspec's option, and flytekit's environment variable for it."""


def describe_missing_credentials(protocol: str) -> str:
    """Return the advice for missing credentials."""
    return f"no credentials; {CREDENTIALS_ADVICE.get(protocol, AWS_CREDENTIALS_ADVICE)}"


def describe_wrong_region(region: str) -> str:
    """Return the advice for a bucket outside the client's region."""
    where = f"the bucket is in the region {region}" if region else "the bucket is in another region"
    return f"{where}; set AWS_DEFAULT_REGION={region or '<its region>'}"


def build_storage_options(protocol: str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fsspec storage options for `protocol`.

    They come from flytekit's variables ``FLYTE_AWS_*`` and ``FLYTE_AZURE_*``; `overrides` win. The client itself finds
    the rest (for S3: ``AWS_*``, profiles, instance roles).

    Raises:
        UsageError: the endpoint isn't a URL.
    """
    names = VARIABLES_BY_SCHEME.get(protocol, {})
    options: dict[str, Any] = {option: os.environ[name] for option, name in names.items() if os.environ.get(name)}
    if protocol in {"s3", "s3a"}:
        options |= _s3_options()
    return {**options, **(overrides or {})}


def _s3_options() -> dict[str, Any]:
    options: dict[str, Any] = {
        # with concurrency s3fs sends a HEAD before every GET, to know the size
        "max_concurrency": 1,
        "config_kwargs": {
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "read_timeout": READ_TIMEOUT_SECONDS,
            "max_pool_connections": 64,
            # `Store.request` retries; nested retries would multiply the timeouts
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
