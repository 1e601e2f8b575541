"""Where credentials and endpoints come from: the caller, then flytekit's variables, then each library's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from firstfault.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["storage_options"]

_CONNECT_TIMEOUT_S = 5
_READ_TIMEOUT_S = 20


def storage_options(protocol: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fsspec storage options for `protocol`.

    For s3: ``FLYTE_AWS_ENDPOINT``, ``FLYTE_AWS_ACCESS_KEY_ID``, ``FLYTE_AWS_SECRET_ACCESS_KEY`` as flytekit reads
    them; whatever is not set there is left to botocore (``AWS_*``, profiles, instance roles). `given` wins.

    Raises:
        UsageError: the endpoint is not a URL.
    """
    options: dict[str, Any] = {}
    if protocol in {"s3", "s3a"}:
        options = _s3(os.environ)
    options.update(given or {})
    return options


def _s3(environment: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {
        # s3fs asks HEAD before every GET unless told not to split it
        "max_concurrency": 1,
        "config_kwargs": {
            "connect_timeout": _CONNECT_TIMEOUT_S,
            "read_timeout": _READ_TIMEOUT_S,
            "max_pool_connections": 64,
            # the store retries; what is retried beneath it as well would multiply the timeouts
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
