"""A job of Slurm, as ``scontrol`` shows and changes it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

from firstfault.errors import FirstFaultError

_TIMEOUT_SECONDS = 30.0
"""For one command: a busy controller answers late."""
_REQUEUE_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.5
_FIELD = re.compile(r"(?:^|\s)(\w+)=(.*?)(?=\s+\w+(?::\w+)?=|$)")
_OUR_COMMENT = "firstfault: "
_WAITING = {"PENDING", "REQUEUED", "COMPLETING", "CONFIGURING", "RUNNING"}


class SlurmError(FirstFaultError):
    """Slurm refused a command."""


def find_job_id(environment: Mapping[str, str] = os.environ) -> str:
    """Return the id of the job around this process, of one task in an array; empty: there is none."""
    # SLURM_JOB_ID of an array's last task is the id of the whole array
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")


class SlurmJob(NamedTuple):
    """A job, or one task of an array: "42", "42_7"."""

    id: str

    def read_fields(self) -> dict[str, str]:
        """Return what ``scontrol show job`` prints.

        Raises:
            SlurmError: it doesn't know the job, or doesn't answer.
        """
        return dict(_FIELD.findall(_scontrol("show", "job", "--oneliner", self.id).strip()))

    def requeue(self, *, exclude: str, headline: str) -> list[str]:
        """Run the job again; return what Slurm refused.

        It can run inside the job that it requeues. Slurm refuses to change the nodes of a running job, so to exclude
        one the job is held before it is changed, and released afterwards.

        Args:
            exclude: a node that the job must not use again; empty: none.
            headline: for the job's comment, unless the comment is another program's: it may be a setting.

        Raises:
            SlurmError: Slurm doesn't requeue it.
        """
        before = self.read_fields()
        # Slurm ends the processes of a job that it requeues. Ignored signals, unlike handled ones, are also ignored by
        # the children: scontrol itself would get the signal.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        refused, comment = [], before.get("Comment", "").replace("(null)", "")
        if not comment or comment.startswith(_OUR_COMMENT):
            refused += self._update("Comment", f"{_OUR_COMMENT}{headline.replace('=', ':')}")
        if not exclude:
            _scontrol("requeue", self.id)
            return [*refused, *self._find_missing(before, exclude)]
        known = before.get("ExcNodeList", "").replace("(null)", "")
        _scontrol("requeuehold", self.id)
        try:
            refused += self._update("ExcNodeList", f"{known},{exclude}" if known else exclude)
        finally:
            _scontrol("release", self.id)
        return [*refused, *self._find_missing(before, exclude)]

    def _update(self, name: str, value: str) -> list[str]:
        try:
            _scontrol("update", f"JobId={self.id}", f"{name}={value}")
        except SlurmError as error:
            return [f"{name}: {error}"]
        return []

    def _find_missing(self, before: Mapping[str, str], exclude: str) -> list[str]:
        """Check that Slurm did what it was asked to do; a site's plugin may have changed it."""
        restarts, deadline = int(before.get("Restarts", "0")), time.monotonic() + _REQUEUE_TIMEOUT_SECONDS
        while True:
            now = self.read_fields()
            is_requeued = int(now.get("Restarts", "0")) > restarts and now.get("JobState", "") in _WAITING
            if is_requeued or time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        missing = [] if is_requeued else [f"the job is {now.get('JobState', 'unknown')}, not waiting to start again"]
        if exclude and exclude not in _list_nodes(now.get("ExcNodeList", "")):
            missing.append(f"{exclude} is not excluded; the job's list is {now.get('ExcNodeList', '')}")
        return missing


def _list_nodes(names: str) -> list[str]:
    """Return the nodes of a list such as ``gpu-[1-3],login``."""
    return _scontrol("show", "hostnames", names).split() if names.replace("(null)", "") else []


def _scontrol(*arguments: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - no shell
            ["scontrol", *arguments],  # noqa: S607 - wherever the site has it
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_SECONDS,
        )
    except FileNotFoundError as error:
        raise SlurmError("scontrol isn't installed here; run this in a job of Slurm or on a login node") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"scontrol {arguments[0]} didn't answer within {_TIMEOUT_SECONDS:g} s") from error
    if done.returncode:
        raise SlurmError(f"scontrol {arguments[0]}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout
