"""Where a process runs and records: the node's `Recording`, which the agent passes to its workers; places; sources."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from firstfault.model import NodeSetup, Place
from firstfault.recorder.folder import NodeFolder
from firstfault.utils.text import parse_json
from firstfault_torch.guard import bounded, logger
from firstfault_torch.time_limits import NODE_SETUP_TIMEOUT_SECONDS, UPLOAD_DEADLINE_SECONDS

RECORDING_VARIABLE = "FIRSTFAULT_RECORDING"
"""How a worker gets the `Recording` of its node: as JSON."""
TIME_LIMIT_VARIABLE = "FIRSTFAULT_TIME_LIMIT_FILE"
LOCAL_RANK_VARIABLE = "FIRSTFAULT_LOCAL_RANK"
"""A worker's local rank; with torch's option ``virtual_local_rank`` LOCAL_RANK is 0 in every worker."""
WORKER_VARIABLE = "FIRSTFAULT_WORKER"
"""Set for a worker that is a program; `firstfault_start` takes it away."""
SOURCE_VARIABLE = "FIRSTFAULT_SOURCE"
"""The environment variable with the address of the working folder's source code, of one commit."""
_GPUS = Path("/proc/driver/nvidia/gpus")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ORIGIN = re.compile(r'^\[remote "origin"\][^\[]*', re.MULTILINE)
_URL = re.compile(r"^\s*url\s*=\s*(\S+)", re.MULTILINE)
_FOLDERS = {"github.": "blob", "gitlab.": "-/blob", "bitbucket.": "src"}
"""Where a commit's files are, on the sites whose addresses are known."""
_SSH = re.compile(r"(?:[\w.-]+@)?(?P<host>[\w.-]+):(?!/)(?P<path>.+)")
"""git@github.com:org/repo.git"""
_MACHINE = "NODE_NAME"
"""Set by a pod's template from Kubernetes' downward API."""


class Moment(NamedTuple):
    """A point in time by two clocks, nanoseconds."""

    wall_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> Moment:
        """Return this moment."""
        return cls(time.time_ns(), time.monotonic_ns())


OTHERS_CONTINUE = "others_continue"
"""In a worker's message about its failure: the other ranks continue without it, unless they give up, too."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The node's name, attempt and storage locations, as its engine gives them."""

    output_prefix: str
    """URI below which the attempt's documents lie."""
    engine: str = ""
    """The engine's name, as `Place.engine` has it."""
    attempt: int = 0
    """Counted from 0."""
    node: str = ""
    """The pod's or the machine's name."""
    namespace: str = ""
    """The Kubernetes namespace; empty without one."""
    task: str = ""
    """The task's full name; empty: not known."""
    image: str = ""
    """The container image; empty: not known."""
    handover_uri: str = ""
    """Where this attempt writes its verdict for the next one; empty: nowhere."""
    previous_handover_uri: str = ""
    """Where the attempt before wrote its verdict; empty: there was none, or it is not known."""
    worker_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the engine wants in its workers."""
    is_folder_shared: bool = True
    """False: only this node writes and reads there, and the nodes hand each other what they wrote."""
    owns_process: bool = False
    """Whether the agent's process ends with the run: then signals after the run are ignored."""
    failed_exit_code: int = 1
    """Exit code of a process that published its verdict from another thread than the main one."""


@dataclass(frozen=True, slots=True)
class Recording:
    """Where and how the processes of a node record."""

    strategy: str
    identity: Identity
    upload_deadline_seconds: float = UPLOAD_DEADLINE_SECONDS
    round: int = 0
    incarnation: int = 0
    group_world_size: int = 0
    ip: str = ""
    """The node's address, looked up once: the name service may take seconds, too long for a failing worker."""
    node_folder: str = ""
    """The folder of the node's recorder and spool; empty: there is no recorder."""

    @property
    def output_prefix(self) -> str:
        """URI below which the attempt's documents lie."""
        return self.identity.output_prefix

    @property
    def files(self) -> NodeFolder | None:
        """The files in the node's folder; None without a folder."""
        return NodeFolder(Path(self.node_folder)) if self.node_folder else None

    def environment(self) -> dict[str, str]:
        """Return the variables that pass this recording to a worker process."""
        variables = self.identity.worker_environment
        told = replace(self, identity=replace(self.identity, worker_environment={}))
        # a user's number may be one of numpy
        return {**variables, RECORDING_VARIABLE: json.dumps(asdict(told), ensure_ascii=False, default=float)}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Recording | None:
        """Return the recording that the agent passed to this worker; None if recording is off.

        A worker of an environment with another firstfault cannot read its agent's: it logs that, and records nothing.
        """
        text = environment.get(RECORDING_VARIABLE)
        if not text:
            return None
        try:
            told = parse_json(text)
            return cls(**{**told, "identity": Identity(**told["identity"])})
        except (ValueError, TypeError, KeyError) as error:
            logger.warning(
                "this process records nothing: it cannot read %s (%s: %s). Install the firstfault of its agent",
                RECORDING_VARIABLE,
                type(error).__name__,
                error,
            )
            return None


def node_place(recording: Recording) -> Place:
    """Return the place of this process without ranks: attempt, node, host, address and pid."""
    identity = recording.identity
    return Place(
        attempt=identity.attempt,
        node=identity.node,
        host=socket.gethostname(),
        ip=recording.ip,
        pid=os.getpid(),
        namespace=identity.namespace,
        engine=identity.engine,
        machine=os.environ.get(_MACHINE, ""),
    )


def worker_place(recording: Recording, environment: Mapping[str, str] = os.environ) -> Place:
    """Return the place of this worker process: ranks from torch elastic's variables, the rest from its agent."""
    return replace(
        node_place(recording),
        round=recording.round,
        incarnation=recording.incarnation,
        restart_count=_number(environment, "TORCHELASTIC_RESTART_COUNT") or 0,
        rank=_number(environment, "RANK"),
        local_rank=_number(environment, LOCAL_RANK_VARIABLE if LOCAL_RANK_VARIABLE in environment else "LOCAL_RANK"),
        group_rank=_number(environment, "GROUP_RANK"),
        world_size=_number(environment, "WORLD_SIZE") or 0,
        group_world_size=_number(environment, "GROUP_WORLD_SIZE") or recording.group_world_size,
        role=environment.get("ROLE_NAME", ""),
    )


def boot_id() -> str:
    """Identify the boot whose CLOCK_MONOTONIC this process reads; empty if Linux does not provide it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions of Python, torch and flytekit if this process has loaded them."""
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "flytekit"):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return tuple(sorted(found.items()))


def time_limit() -> str:
    """Return the seconds after which what runs this pod has ended the attempt; empty: it has not.

    Before it sends SIGTERM, it writes them into the file that `TIME_LIMIT_VARIABLE` names.
    """
    try:
        return f"{float(Path(os.environ[TIME_LIMIT_VARIABLE]).read_text(encoding='ascii')):g}"
    except (KeyError, OSError, ValueError):
        return ""


def is_in_foreground() -> bool:
    """Whether this process is in the foreground of its terminal: there Ctrl-C sends SIGINT."""
    with contextlib.suppress(OSError), Path("/dev/tty").open("rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def node_address() -> str:
    """Look up the node's own address; empty if there is none. The name service may take long."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except (OSError, UnicodeError):  # Linux allows 64 characters, a name service 63
        return ""


def _number(environment: Mapping[str, str], name: str) -> int | None:
    try:
        return int(environment[name])
    except (KeyError, ValueError):
        return None


# --- what the node runs ---------------------------------------------------------------------------------------------


def setup_of_node(identity: Identity) -> NodeSetup:
    """Return what this node runs; files that do not answer within 0.25 s are left out."""
    known = NodeSetup(task=identity.task, image=identity.image)
    return bounded(partial(_with_files, known), NODE_SETUP_TIMEOUT_SECONDS, "reading what this node runs") or known


def _with_files(known: NodeSetup) -> NodeSetup:
    models = []  # of each GPU that NVIDIA's driver shows to this container
    for file in sorted(_GPUS.glob("*/information")):
        with contextlib.suppress(OSError):
            models += _MODEL.findall(file.read_text(encoding="utf-8", errors="replace"))[:1]
    url, root = _source()
    return NodeSetup(
        task=known.task,
        image=known.image,
        gpu_model=models[0] if models else "",
        gpus=len(models),
        source_url=url,
        source_root=str(root) if url else "",
    )


# --- source code ----------------------------------------------------------------------------------------------------


def _source() -> tuple[str, Path]:
    """Return the address of the source code and the folder that it stands for; an empty address: not known."""
    with contextlib.suppress(OSError, ValueError):  # also if the working folder was deleted
        folder = Path.cwd()
        if given := os.environ.get(SOURCE_VARIABLE, ""):
            return given.rstrip("/"), folder
        for root in (folder, *folder.parents):
            if (root / ".git").exists():
                return _address(root / ".git"), root
    return "", Path()


def _address(git: Path) -> str:
    """Return where the checked-out commit can be read, from git's own files; empty if no remote is known.

    Raises:
        OSError, ValueError: they cannot be read.
    """
    if git.is_file():  # of a worktree: "gitdir: <folder>"
        git = (git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
    shared = git / "commondir"
    common = (git / shared.read_text(encoding="utf-8").strip()).resolve() if shared.exists() else git
    head = (git / "HEAD").read_text(encoding="ascii").strip()
    commit = _commit_of(head.removeprefix("ref:").strip(), git, common) if head.startswith("ref:") else head
    web = _web_address(common)
    if not web or _COMMIT.fullmatch(commit) is None:
        return ""
    host = urlsplit(web).netloc
    folder = next((folder for name, folder in _FOLDERS.items() if name in host), "")
    return f"{web}/{folder}/{commit}" if folder else ""


def _commit_of(ref: str, git: Path, common: Path) -> str:
    for folder in (git, common):
        if (folder / ref).is_file():
            return (folder / ref).read_text(encoding="ascii").strip()
    for line in (common / "packed-refs").read_text(encoding="utf-8").splitlines():
        if line.endswith(f" {ref}"):
            return line.split(" ", 1)[0]
    return ""


def _web_address(common: Path) -> str:
    """Return the address of the remote "origin" for a browser, without user and password; empty if there is none."""
    section = _ORIGIN.search((common / "config").read_text(encoding="utf-8"))
    found = _URL.search(section[0]) if section else None
    remote = found[1] if found else ""
    if "://" in remote:
        parts = urlsplit(remote)
        host, path = parts.hostname or "", parts.path
        port = f":{parts.port}" if parts.port and parts.scheme.startswith("http") else ""
    else:
        match = _SSH.fullmatch(remote)
        host, path, port = (match["host"], match["path"], "") if match else ("", "", "")
    path = path.strip("/").removesuffix(".git")
    return f"https://{host}{port}/{path}" if host and path else ""
