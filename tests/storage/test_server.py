"""The S3 server that the session starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from tests.s3_server import S3


def test_only_this_machine_can_reach_it(s3: S3) -> None:
    """All of the server's sockets listen on the loopback address, that of its endpoint among them."""
    sockets = s3.listening()
    assert urlsplit(s3.endpoint).netloc in sockets
    assert {address.rpartition(":")[0] for address in sockets} == {"127.0.0.1"}


def test_its_ports_are_not_the_kernels_to_give(s3: S3) -> None:
    """The server's ports are outside of the range of client ports."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(int(address.rpartition(":")[2]) < first for address in s3.listening())


def test_no_settings_are_seen() -> None:
    """A test without the server's fixture sees only the settings that keep botocore from looking for others."""
    names = {name for name in os.environ if name.startswith(("AWS_", "FLYTE_", "_F_"))}
    assert names == {"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_EC2_METADATA_DISABLED"}


def test_settings_of_the_outer_environment_are_hidden() -> None:
    """The test above also passes with settings in the caller's environment."""
    outer = {"AWS_PROFILE": "mine", "FLYTE_AWS_ENDPOINT": "http://elsewhere", "_F_DES": "Earliest"}
    inner = f"{__file__}::{test_no_settings_are_seen.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inner]
    done = subprocess.run(command, env=os.environ | outer, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


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
