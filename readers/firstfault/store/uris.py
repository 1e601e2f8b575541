"""URIs of folders and objects."""

from __future__ import annotations


def get_scheme(uri: str) -> str:
    """Return the scheme of `uri`; ``file`` for a plain path."""
    return uri.split("://", 1)[0].lower() if "://" in uri else "file"


def is_remote(uri: str) -> bool:
    """Whether `uri` is outside this machine."""
    return get_scheme(uri) not in {"file", "local", "memory"}


def join(folder: str, *parts: str) -> str:
    """Append `parts` to a folder, with one slash between each."""
    return "/".join([folder.rstrip("/"), *(part.strip("/") for part in parts if part.strip("/"))])


def split_name(uri: str) -> tuple[str, str]:
    """Return (folder, name) of ``folder/name``;
    the folder keeps its scheme and is ``.`` for a bare name.
    """
    folder, slash, name = uri.rstrip("/").rpartition("/")
    return folder or slash or ".", name
