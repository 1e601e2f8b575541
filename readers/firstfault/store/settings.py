"""Endpoints, credentials and timeouts of the storage clients, as fsspec's options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstfault.errors import UsageError
from firstfault.utils.toml import parse_toml

CONNECT_TIMEOUT_SECONDS = 5
READ_TIMEOUT_SECONDS = 20


# read when this module is imported, and not when a request fails: the disk may be gone then
STORAGES: dict[str, Any] = parse_toml(
    Path(__file__).with_name("storages.toml").read_text(encoding="utf-8")
)
"""The tables of ``storages.toml``."""


def find_storage(scheme: str) -> dict[str, Any]:
    """Return what is known about the storage with a scheme; empty for an unknown one."""
    return next((row for row in STORAGES["storage"] if scheme in row["schemes"]), {})


def describe_missing_credentials(protocol: str) -> str:
    """Return the advice for missing credentials."""
    return f"no credentials; {find_storage(protocol).get('advice') or find_storage('s3')['advice']}"


def describe_wrong_region(region: str) -> str:
    """Return the advice for a bucket outside the client's region."""
    where = f"the bucket is in the region {region}" if region else "the bucket is in another region"
    return f"{where}; set AWS_DEFAULT_REGION={region or '<its region>'}"


def build_storage_options(
    protocol: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fsspec storage options for `protocol`.

    They come from flytekit's variables ``FLYTE_AWS_*`` and ``FLYTE_AZURE_*``; `overrides` win. The
    client itself finds the rest (for S3: ``AWS_*``, profiles, instance roles).

    Raises:
        UsageError: the endpoint isn't a URL.
    """
    names = find_storage(protocol).get("variables", {})
    options: dict[str, Any] = {
        option: os.environ[name] for option, name in names.items() if os.environ.get(name)
    }
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
            raise UsageError(
                f"the S3 endpoint must be a URL such as https://host:port, not {endpoint!r}"
            )
        options["endpoint_url"] = endpoint
    return options
