"""The S3 server that the session starts."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.s3_server import S3, listening

pytestmark = pytest.mark.slow


def test_only_this_machine_can_reach_it(s3: S3) -> None:
    """All of the server's sockets listen on the loopback address,
    that of its endpoint among them.
    """
    sockets = listening(s3.pid)
    assert urlsplit(s3.endpoint).netloc in sockets
    assert {address.rpartition(":")[0] for address in sockets} == {"127.0.0.1"}


def test_the_servers_ports_are_outside_of_the_range_of_client_ports(s3: S3) -> None:
    """The server's ports are outside of the range of client ports."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(int(address.rpartition(":")[2]) < first for address in listening(s3.pid))


def test_tests_without_the_server_see_none_of_its_settings() -> None:
    """A test without the server's fixture sees only the settings that keep botocore
    from looking for others.
    """
    names = {name for name in os.environ if name.startswith(("AWS_", "FLYTE_", "_F_"))}
    assert names == {"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_EC2_METADATA_DISABLED"}
