"""The address of the working folder's source code, read from git's own files."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

SOURCE_VARIABLE = "FIRSTFAULT_SOURCE"
"""The environment variable with the address of the working folder's source code, of one commit."""
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ORIGIN_SECTION = re.compile(r'^\[remote "origin"\][^\[]*', re.MULTILINE)
_URL_LINE = re.compile(r"^\s*url\s*=\s*(\S+)", re.MULTILINE)
_BLOB_PATHS = {"github.": "blob", "gitlab.": "-/blob", "bitbucket.": "src"}
"""The path to a commit's files on known hosting sites."""
_SSH_ADDRESS = re.compile(r"(?:[\w.-]+@)?(?P<host>[\w.-]+):(?!/)(?P<path>.+)")
"""git@github.com:org/repo.git"""


def find_source_code() -> tuple[str, Path]:
    """Return the address of the source code and the folder that it corresponds to;
    an empty address: not known.
    """
    with contextlib.suppress(OSError, ValueError):  # also if the working folder was deleted
        folder = Path.cwd()
        if given := os.environ.get(SOURCE_VARIABLE, ""):
            return given.rstrip("/"), folder
        for root in (folder, *folder.parents):
            if (root / ".git").exists():
                return _build_address(root / ".git"), root
    return "", Path()


def _build_address(git: Path) -> str:
    """Return where the checked-out commit can be read, from git's own files;
    empty if no remote is known.

    Raises:
        OSError, ValueError: they can't be read.
    """
    if git.is_file():  # of a worktree: "gitdir: <folder>"
        git = (
            git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        ).resolve()
    shared = git / "commondir"
    common = (
        (git / shared.read_text(encoding="utf-8").strip()).resolve() if shared.exists() else git
    )
    head = (git / "HEAD").read_text(encoding="ascii").strip()
    commit = (
        _find_commit(head.removeprefix("ref:").strip(), git, common)
        if head.startswith("ref:")
        else head
    )
    web = _web_address(common)
    if not web or _COMMIT.fullmatch(commit) is None:
        return ""
    host = urlsplit(web).netloc
    folder = next((folder for name, folder in _BLOB_PATHS.items() if name in host), "")
    return f"{web}/{folder}/{commit}" if folder else ""


def _find_commit(ref: str, git: Path, common: Path) -> str:
    for folder in (git, common):
        if (folder / ref).is_file():
            return (folder / ref).read_text(encoding="ascii").strip()
    for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
        if line.endswith(f" {ref}"):
            return line.split(" ", 1)[0]
    return ""


def _web_address(common: Path) -> str:
    """Return the address of the remote "origin" for a browser, without user and password;
    empty if there is none.
    """
    section = _ORIGIN_SECTION.search((common / "config").read_text(encoding="utf-8"))
    found = _URL_LINE.search(section[0]) if section else None
    remote = found[1] if found else ""
    if "://" in remote:
        parts = urlsplit(remote)
        host = parts.hostname or ""
        path = parts.path
        port = f":{parts.port}" if parts.port and parts.scheme.startswith("http") else ""
    else:
        match = _SSH_ADDRESS.fullmatch(remote)
        host, path, port = (match["host"], match["path"], "") if match else ("", "", "")
    path = path.strip("/").removesuffix(".git")
    return f"https://{host}{port}/{path}" if host and path else ""
