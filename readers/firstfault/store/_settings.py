"""Credentials and endpoints: the caller's, else those of flytekit's variables, else what each client finds itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from firstfault.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CONNECT_TIMEOUT_S", "READ_TIMEOUT_S", "no_credentials", "other_region", "storage_options"]

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
_GOOGLE = "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run 'gcloud auth application-default login'"
_MICROSOFT = (
    "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY "
    "(or FLYTE_AZURE_STORAGE_ACCOUNT_NAME and FLYTE_AZURE_STORAGE_ACCOUNT_KEY)"
)
_WHAT_TO_SET = {
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "az": _MICROSOFT,
    "abfs": _MICROSOFT,
    "abfss": _MICROSOFT,
}
_AMAZON = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or FLYTE_AWS_ACCESS_KEY_ID and FLYTE_AWS_SECRET_ACCESS_KEY)"

_AZURE = {
    "account_name": "FLYTE_AZURE_STORAGE_ACCOUNT_NAME",
    "account_key": "FLYTE_AZURE_STORAGE_ACCOUNT_KEY",
    "client_id": "FLYTE_AZURE_CLIENT_ID",
    "client_secret": "FLYTE_AZURE_CLIENT_SECRET",
    "tenant_id": "FLYTE_AZURE_TENANT_ID",
}


def no_credentials(protocol: str) -> str:
    """Return what to say where a client finds no credentials."""
    return f"no credentials; {_WHAT_TO_SET.get(protocol, _AMAZON)}"


def other_region(region: str) -> str:
    """Return what to say where a bucket is in another region than the client's."""
    where = f"the bucket is in the region {region}" if region else "the bucket is in another region"
    return f"{where}; set AWS_DEFAULT_REGION={region or '<its region>'}"


def storage_options(protocol: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fsspec storage options for `protocol`.

    They are flytekit's variables ``FLYTE_AWS_*`` and ``FLYTE_AZURE_*``; `given` overrides them. The client itself
    finds what is not set there (for S3: ``AWS_*``, profiles, instance roles).

    Raises:
        UsageError: the endpoint is not a URL.
    """
    options: dict[str, Any] = {}
    if protocol in {"s3", "s3a"}:
        options = _s3(os.environ)
    if protocol in {"az", "abfs", "abfss"}:
        options = {option: os.environ[name] for option, name in _AZURE.items() if os.environ.get(name)}
    options.update(given or {})
    return options


def _s3(environment: Mapping[str, str]) -> dict[str, Any]:
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
    names = {"key": "FLYTE_AWS_ACCESS_KEY_ID", "secret": "FLYTE_AWS_SECRET_ACCESS_KEY"}
    for option, name in names.items():
        if environment.get(name):
            options[option] = environment[name]
    endpoint = environment.get("FLYTE_AWS_ENDPOINT") or environment.get("AWS_ENDPOINT_URL_S3")
    endpoint = endpoint or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        if "://" not in endpoint:
            raise UsageError(f"the S3 endpoint must be a URL such as https://host:port, not {endpoint!r}")
        options["endpoint_url"] = endpoint
    return options
