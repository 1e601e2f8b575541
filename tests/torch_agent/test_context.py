"""What a node reads from its environment, and what an agent passes to its workers."""

from __future__ import annotations

import os
import socket

import pytest

from firstfault_torch.context import (
    Identity,
    Recording,
    boot_id,
    node_address,
    node_place,
    versions,
    worker_place,
)

IDENTITY = Identity("s3://bucket/out", engine="flyte", attempt=2, node="worker-1", namespace="team-development")
RECORDING = Recording("earliest", IDENTITY, 2.5, round=3, incarnation=7, group_world_size=2, ip="10.0.0.7")


def test_a_recording_goes_through_the_environment() -> None:
    """What the agent knows arrives in the worker unchanged."""
    assert Recording.from_environment(RECORDING.environment()) == RECORDING
    assert all(isinstance(value, str) for value in RECORDING.environment().values())


@pytest.mark.parametrize("name", ["FIRSTFAULT_STRATEGY", "FIRSTFAULT_OUTPUT_PREFIX"])
@pytest.mark.parametrize("value", ["", None])
def test_recording_is_off(name: str, value: str | None) -> None:
    """Recording is off without a strategy or an output prefix; an empty value counts as none."""
    environment = {**RECORDING.environment(), name: value}
    present = {name: value for name, value in environment.items() if value is not None}
    assert Recording.from_environment(present) is None


def test_node_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's place has attempt, node, host, address, pid, and the machine if the pod's template names it."""
    monkeypatch.setenv("NODE_NAME", "gpu-node-7")
    assert node_place(RECORDING).machine == worker_place(RECORDING, {}).machine == "gpu-node-7"
    monkeypatch.delenv("NODE_NAME")
    place = node_place(RECORDING)
    assert (place.attempt, place.node, place.host) == (2, "worker-1", socket.gethostname())
    assert (place.ip, place.pid, place.rank, place.machine) == ("10.0.0.7", os.getpid(), None, "")


def test_worker_place() -> None:
    """A worker's ranks are torch elastic's, its round and incarnation are the agent's."""
    environment = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "1",
    }
    place = worker_place(RECORDING, environment)
    assert (place.rank, place.local_rank, place.group_rank) == (3, 1, 1)
    assert (place.world_size, place.group_world_size, place.role) == (4, 2, "default")
    assert (place.round, place.incarnation, place.restart_count) == (3, 7, 1)


def test_worker_place_without_torch_elastic() -> None:
    """A process that torch elastic did not start has no ranks, and the number of nodes that its task knows."""
    place = worker_place(RECORDING, {"RANK": "no number"})
    assert (place.rank, place.local_rank, place.group_rank, place.world_size) == (None, None, None, 0)
    assert place.group_world_size == 2


def test_boot_and_versions() -> None:
    """All processes of a boot share an id; the versions of loaded packages are listed, and Python's always."""
    import torch  # noqa: PLC0415 - loaded by now, as in a worker

    assert boot_id() == boot_id() != ""
    found = dict(versions())
    assert found["torch"] == torch.__version__
    assert found["python"].count(".") == 2


def test_an_address_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a name service has no address, and that is not an error."""

    def refuse(host: str) -> str:
        raise socket.gaierror(-2, f"{host}: name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", refuse)
    assert node_address() == ""
