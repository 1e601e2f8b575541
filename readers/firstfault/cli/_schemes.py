"""URIs of other systems, which other distributions turn into output prefixes."""

from __future__ import annotations

from firstfault.cli._support import fail, missing_package
from firstfault.errors import UsageError
from firstfault.store import protocol_of

SCHEMES_GROUP = "firstfault.schemes"
"""Entry-point group: the scheme, and a function from a URI to the attempt's output prefix."""
_STORAGES = {"file", "local", "memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https"}


def resolved(uri: str) -> str:
    """Return the output prefix that a URI stands for; `uri` itself if no distribution knows its scheme.

    Raises:
        UsageError: the package that knows the scheme is not complete.
    """
    scheme = protocol_of(uri)
    if scheme in _STORAGES:
        return uri
    import importlib.metadata  # noqa: PLC0415 - slow, and storages do not need it

    for point in importlib.metadata.entry_points(group=SCHEMES_GROUP):
        if point.name == scheme:
            try:
                find = point.load()
            except ImportError as error:
                raise UsageError(missing_package(f"{scheme}://", error)) from error
            prefix = str(find(uri))
            fail(f"{uri} is {prefix}")
            return prefix
    return uri
