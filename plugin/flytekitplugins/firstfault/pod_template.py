"""The shared-memory volume that PyTorch's data loaders need."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flytekit.core.pod_template import PodTemplate

_MOUNT_PATH = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives
_VOLUME = "shm"
_PRIMARY = "primary"


def warn_of_older_way() -> None:
    """Warn that ``@task(shared_memory=True)`` is the newer way; Python hides this warning unless it is asked for."""
    warnings.warn(
        "increase_shared_mem=True (the default of Elastic and PyTorch) is the older way to get shared memory; "
        "use @task(shared_memory=True) instead",
        DeprecationWarning,
        stacklevel=2,
    )


def add_shared_mem_volume_to_pod_template(pod_template: PodTemplate) -> None:
    """Add a memory-backed ``emptyDir`` at /dev/shm to the primary container, in place.

    Raises:
        ValueError: the template has several containers, or mounts a volume at /dev/shm already.
    """
    # takes a third of a second, and only registration needs it
    from kubernetes.client import (  # noqa: PLC0415
        V1Container,
        V1EmptyDirVolumeSource,
        V1PodSpec,
        V1Volume,
        V1VolumeMount,
    )

    if pod_template.pod_spec is None:
        pod_template.pod_spec = V1PodSpec(containers=[])
    spec = pod_template.pod_spec
    containers = spec.containers or []
    if len(containers) > 1:
        raise ValueError(
            "the pod template has several containers, so firstfault does not know which one needs shared memory; "
            "set increase_shared_mem=False and mount a volume at /dev/shm where it is needed"
        )
    container = containers[0] if containers else V1Container(name=_PRIMARY)
    mounts = container.volume_mounts or []
    if any(mount.mount_path == _MOUNT_PATH for mount in mounts):
        raise ValueError(
            "the pod template mounts a volume at /dev/shm already; remove it or set increase_shared_mem=False"
        )
    container.volume_mounts = [*mounts, V1VolumeMount(name=_VOLUME, mount_path=_MOUNT_PATH)]
    spec.containers = [container]
    volume = V1Volume(name=_VOLUME, empty_dir=V1EmptyDirVolumeSource(medium="Memory"))
    spec.volumes = [*(spec.volumes or []), volume]
