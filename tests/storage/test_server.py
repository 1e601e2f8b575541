"""The S3 server that the session starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from tests.conftest import S3


def listening_sockets(pid: int) -> set[str]:
    """Return the address and port, in hexadecimal as /proc has them, of each TCP socket that a process listens on."""
    descriptors = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in descriptors}


def test_only_this_machine_can_reach_it(s3: S3) -> None:
    """All of the server's sockets listen on the loopback address, and there are some."""
    sockets = listening_sockets(s3.pid)
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert f"{loopback}:{urlsplit(s3.endpoint).port:04X}" in sockets
    assert {address.split(":")[0] for address in sockets} == {loopback}


def test_its_ports_are_not_the_kernels_to_give(s3: S3) -> None:
    """No client's own port can collide with one of the server's, as long as it runs."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(int(address.split(":")[1], 16) < first for address in listening_sockets(s3.pid))


@pytest.mark.parametrize("name", ["AWS_PROFILE", "AWS_SESSION_TOKEN", "FLYTE_AWS_ENDPOINT", "FLYTE_AWS_ACCESS_KEY_ID"])
def test_nothing_of_the_outer_environment_is_seen(name: str) -> None:
    """A test without the server's fixture sees no storage settings."""
    assert name not in os.environ


class TestEnvironment:
    """Two tests, in this order."""

    def test_a_test_may_change_it(self) -> None:
        """A test sets and removes variables as it likes."""
        os.environ["FIRSTFAULT_LEFT_BEHIND"] = "1"
        del os.environ["AWS_EC2_METADATA_DISABLED"]

    def test_the_next_does_not_notice(self) -> None:
        """The next test finds everything as it was."""
        assert "FIRSTFAULT_LEFT_BEHIND" not in os.environ
        assert os.environ["AWS_EC2_METADATA_DISABLED"] == "true"
