"""What both clients share: credentials and endpoints, retries, and the order of a listing."""

from __future__ import annotations

import datetime as dt
import os
from typing import TYPE_CHECKING, Any, TypeVar

from firstfault.errors import StoreUnavailableError, UsageError
from firstfault.store._api import ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

T = TypeVar("T")

# --- credentials and endpoints: the caller's, else those of flytekit's variables, else what each client finds ---------

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


# --- retries of requests that the storage did not answer --------------------------------------------------------------

ATTEMPTS = 4
_TIMEOUT_S = 15.0
"""No retry after this time, seconds."""


async def retried(call: Callable[[], Awaitable[T]], typed: Callable[[Exception], Exception], attempts: int) -> T:
    """Return the result of `call`; call it again, after a pause, while the storage is unavailable.

    Args:
        call: sends one request.
        typed: returns our error for one of the client's, any other error as it is.
        attempts: how often to call at most.

    Raises:
        firstfault.errors.StoreError: the last error, converted by `typed`.
    """
    import stamina  # noqa: PLC0415 - slow, and only needed for a request

    async for attempt in stamina.retry_context(
        on=StoreUnavailableError, attempts=attempts, timeout=_TIMEOUT_S, wait_initial=0.1, wait_max=2.0
    ):
        with attempt:
            try:
                return await call()
            except Exception as error:
                raise typed(error) from error
    raise AssertionError  # stamina either returns or raises


# --- listings ---------------------------------------------------------------------------------------------------------

PAGE = 1000
"""The most objects in one LIST answer of S3 and GCS."""
PART = ".part"
"""Suffix of a file that is being written to a local folder; listings leave it out."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_NANO = 1_000_000_000


def by_name(objects: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """Return the objects in the order of their names."""
    return sorted(objects, key=lambda item: item.name)


def only_page(objects: Iterable[ObjectInfo], after: str) -> Page:
    """Return all objects of a complete listing behind the name `after` as one page: another would list them again."""
    return Page(tuple(by_name(item for item in objects if item.name > after)), more=False)


def nanoseconds(moment: dt.datetime) -> int:
    """Return nanoseconds since the Unix epoch; a moment without a time zone is in UTC."""
    since = (moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * _NANO + since.microseconds * 1000
