"""A real S3 server that only this machine can reach, for the tests and for the cascade lab."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

_BUCKET = "documents-bucket"
_LOOPBACK = "127.0.0.1"
_STARTS = 3
_START_DEADLINE_S = 25.0
_STOP_DEADLINE_S = 10.0
_POLL_S = 0.05
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_ADMIN_GRPC_OFFSET = 10_000
"""weed's worker expects the admin's gRPC port here and ignores -admin.port.grpc."""
_PORTS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
)
_PORTS += ("filer.port", "filer.port.grpc")


@dataclass(frozen=True)
class S3:
    """A running S3 server, and one of its accounts."""

    endpoint: str
    access_key: str
    secret_key: str
    bucket: str
    pid: int
    """Id of the server's process."""

    def uri(self, name: str = "run") -> str:
        return f"s3://{self.bucket}/{name}-{uuid.uuid4().hex}"

    def environment(self) -> dict[str, str]:
        """Return the variables that make flytekit,
        firstfault and botocore use this server and account.
        """
        return {
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": self.access_key,
            "FLYTE_AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def without_list(self) -> S3:
        """Return an account of the same server that may read and write objects,
        but not list them.
        """
        return replace(self, access_key=_no_list_key(self))

    def client(self) -> Any:
        """Return a botocore client, which shares nothing with firstfault's connection."""
        return botocore.session.get_session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(connect_timeout=5, read_timeout=10, retries={"max_attempts": 0}),
        )


def listening(pid: int) -> list[str]:
    """Return the ``address:port`` of every TCP socket on which a process listens, from /proc."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            inodes.add(descriptor.readlink().name.removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == _LISTEN and inode in inodes:
                found.append(_address(local))
    return found


class ServerError(Exception):
    """The server cannot be started, with the reason."""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[S3]:
    """Start a server with an account that may do everything; stop it afterwards. ServerError:
    it did not start.
    """
    account = S3("", f"test{secrets.token_hex(8)}", secrets.token_hex(16), _BUCKET, 0)
    server = _start(folder, account)
    try:
        yield replace(account, endpoint=server.endpoint, pid=server.process.pid)
    finally:
        server.stop()


def _no_list_key(account: S3) -> str:
    return f"{account.access_key}nolist"


@dataclass(frozen=True)
class _Server:
    process: subprocess.Popen[bytes]
    ports: dict[str, int]
    folder: Path

    @property
    def endpoint(self) -> str:
        return f"http://{_LOOPBACK}:{self.ports['s3.port']}"

    def output(self) -> str:
        return (self.folder / "output.log").read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            # its own process group; asked to end, it would take seconds to save what is deleted
            # below
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_STOP_DEADLINE_S)
        for port in self.ports.values():
            # weed leaves some of its sockets behind, and no option moves them
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # noqa: S108
                # another user's, who had the port before
                with contextlib.suppress(PermissionError):
                    path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def _start(folder: Path, account: S3) -> _Server:
    """Start a server; try again on other ports if another process took a port
    before the server started.
    """
    failures = []
    for attempt in range(_STARTS):
        server = _launch(folder / str(attempt), account)
        try:
            _wait_until_ready(server, account)
        except _NotReadyError as error:
            failures.append(f"{error}\n{server.output()}")
            server.stop()
        except BaseException:
            server.stop()
            raise
        else:
            return server
    raise ServerError("the S3 server did not start:\n" + "\n".join(failures))


class _NotReadyError(Exception):
    pass


def _launch(folder: Path, account: S3) -> _Server:
    for name in ("data", "home", "tmp"):
        (folder / name).mkdir(parents=True)
    accounts = folder / "accounts.json"
    accounts.write_text(json.dumps(_accounts(account)))
    ports = _free_ports()
    command = [
        str(Path(sysconfig.get_path("scripts")) / "weed"),
        "mini",
        f"-dir={folder / 'data'}",
        f"-ip={_LOOPBACK}",
        f"-ip.bind={_LOOPBACK}",
        f"-bucket={account.bucket}",
        f"-s3.config={accounts}",
        "-s3.autoCreateBucket=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder / "home"),  # weed reads settings from there
        "TMPDIR": str(folder / "tmp"),  # and logs to here
        "AWS_ACCESS_KEY_ID": account.access_key,
        "AWS_SECRET_ACCESS_KEY": account.secret_key,
    }
    with (folder / "output.log").open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # one prctl; nothing of Python's is touched
            preexec_fn=_die_with_parent(),  # noqa: PLW1509
        )
    return _Server(process, ports, folder)


def _accounts(account: S3) -> dict[str, Any]:
    """Return weed's account file; the account that may do everything comes from its environment."""
    no_list = {
        "name": "no-list",
        "credentials": [{"accessKey": _no_list_key(account), "secretKey": account.secret_key}],
        "actions": [f"Read:{account.bucket}", f"Write:{account.bucket}"],
    }
    return {"identities": [no_list]}


def _die_with_parent() -> Callable[[], object]:
    """Let the kernel end the server if the tests are killed or exit without clean-up,
    as pytest-timeout does.
    """
    prctl = ctypes.CDLL(None).prctl
    set_parent_death_signal = 1
    return lambda: prctl(set_parent_death_signal, signal.SIGKILL)


def _wait_until_ready(server: _Server, account: S3) -> None:
    """Wait until the bucket takes an object and lists it.

    Raises:
        _NotReadyError: the server ended, did not answer in time, or another server answers.
    """
    running = replace(account, endpoint=server.endpoint, pid=server.process.pid)
    deadline = time.monotonic() + _START_DEADLINE_S
    with contextlib.closing(running.client()) as client:
        while (trouble := _trouble(client, account.bucket)) is not None:
            if server.process.poll() is not None:
                raise _NotReadyError(f"weed ended with {server.process.returncode}")
            if time.monotonic() > deadline:
                raise _NotReadyError(f"no answer in {_START_DEADLINE_S} s: {trouble}")
            time.sleep(_POLL_S)
    open_to_others = [
        address for address in listening(running.pid) if not address.startswith(f"{_LOOPBACK}:")
    ]
    if open_to_others:
        raise _NotReadyError(f"weed listens beyond the loopback: {open_to_others}")


def _trouble(client: Any, bucket: str) -> str | None:
    """Return why the bucket cannot be used yet, None if it can."""
    try:
        client.put_object(Bucket=bucket, Key="ready", Body=b"ready")
        listed = client.list_objects_v2(Bucket=bucket, Prefix="ready")["KeyCount"]
    except (BotoCoreError, ClientError) as error:
        return str(error)
    return None if listed == 1 else "an object that was written is not listed"


def _address(text: str) -> str:
    """Decode ``0100007F:20FB``: the address in the host's byte order (little endian),
    the port in hexadecimal.
    """
    address, port = text.split(":")
    if len(address) == len("0100007F"):
        address = socket.inet_ntoa(bytes.fromhex(address)[::-1])
    return f"{address}:{int(port, 16)}"


def _free_ports() -> dict[str, int]:
    """Return a free port for each of weed's services, where the kernel gives none to clients."""
    with contextlib.ExitStack() as held:
        ports = {name: _take_port(held) for name in _PORTS}
        ports["admin.port"] = _take_port(held, also=_ADMIN_GRPC_OFFSET)
        ports["admin.port.grpc"] = ports["admin.port"] + _ADMIN_GRPC_OFFSET
        return ports


def _take_port(held: contextlib.ExitStack, also: int = 0) -> int:
    """Find a port that can be bound (and the one `also` above it),
    and hold it until `held` closes.
    """
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = random.randrange(10_001, min(first_ephemeral, 32_768) - also)
        with contextlib.ExitStack() as attempt:
            try:
                for number in {port, port + also}:
                    attempt.enter_context(socket.socket()).bind((_LOOPBACK, number))
            except OSError:
                continue
            held.push(attempt.pop_all())
            return port
    raise ServerError("found no free port below the ephemeral range")
