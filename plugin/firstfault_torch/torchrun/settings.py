"""What the environment tells of a job of torchrun: the user's options, each with its variable; names of job, node."""

from __future__ import annotations

import os
import re
import socket
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from firstfault.strategies import DEFAULT_STRATEGY, strategy_names
from firstfault_torch.guard import logger
from firstfault_torch.options import Options

_STRATEGY, _RESTARTS = "FIRSTFAULT_STRATEGY", "FIRSTFAULT_RESTARTS"
_AS_TORCH = "torch"


def _count(text: str) -> str:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a number, 0 or more, not {text!r}")
    return text


def _one_of(names: Callable[[], tuple[str, ...]]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names():
            raise ArgumentTypeError(f"must be one of {', '.join(names())}, not {text!r}")
        return text

    return check


class _Setting(NamedTuple):
    option: str
    variable: str
    check: Callable[[str], str]
    help: str


_SETTINGS = (
    _Setting(
        "--ff-folder",
        "FIRSTFAULT_FOLDER",
        str,
        "a path that all nodes see, or s3://...: where the documents about a failure go. Default: a folder on each "
        "node, .firstfault/torchrun",
    ),
    _Setting("--ff-job", "FIRSTFAULT_JOB", str, "name of the job. Default: the scheduler's, else --rdzv-id"),
    _Setting("--ff-attempt", "FIRSTFAULT_ATTEMPT", _count, "number of this attempt, from 0. Default: the scheduler's"),
    _Setting("--ff-node", "FIRSTFAULT_NODE", str, "name of this node. Default: the host's"),
    _Setting("--ff-strategy", _STRATEGY, _one_of(strategy_names), "finds the root cause. Default: " + DEFAULT_STRATEGY),
    _Setting(
        "--ff-restarts",
        _RESTARTS,
        _one_of(lambda: ("policy", _AS_TORCH)),
        "what decides on each of --max-restarts: the retry policy, which does not repeat a bug, or torch, which "
        "restarts after any failure: policy (default) or torch",
    ),
)


def add_options(parser: ArgumentParser) -> None:
    """Add firstfault's options to torch's parser."""
    group = parser.add_argument_group("firstfault", "Each can also be set by its variable.")
    for setting in _SETTINGS:
        name = setting.option.rpartition("-")[2].upper()
        group.add_argument(
            setting.option, type=setting.check, metavar=name, help=f"{setting.help}. Variable: {setting.variable}"
        )


def set_variables(arguments: Namespace) -> None:
    """Set the variables of the options that were given; the agent and its workers read them."""
    for setting in _SETTINGS:
        value = getattr(arguments, setting.option.lstrip("-").replace("-", "_"))
        if value is not None:
            os.environ[setting.variable] = value


def drop_invalid() -> None:
    """Take away each variable that has no valid value, and say so: a training is not refused for it."""
    for setting in _SETTINGS:
        text = os.environ.get(setting.variable)
        if text:
            try:
                setting.check(text)
            except ArgumentTypeError as error:
                logger.warning("firstfault does without %s: it %s", setting.variable, error)
                del os.environ[setting.variable]


def options_of(environment: Any = os.environ, **others: Any) -> Options:
    """Return the options that the environment sets."""
    strategy = environment.get(_STRATEGY) or DEFAULT_STRATEGY
    return Options(strategy=strategy, restarts_follow_policy=environment.get(_RESTARTS) != _AS_TORCH, **others)


# --- the names of the job, its attempt and this node ------------------------------------------------------------------

RENDEZVOUS_ID = "--rdzv-id"
HOST = "the host's name"
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")
"""What a folder's name and an object's key had better not contain, such as the slashes of ``TORCHX_JOB_ID``."""
_RANDOM = re.compile(r"none|[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}|\d{36,39}")
"""torchrun's default, and the ids that launchers draw for a job on one node."""
_LONGEST = 120


class Source(NamedTuple):
    """Where a name may come from."""

    of: str
    variables: tuple[str, ...]
    """All must be set; their values are joined by "_"."""
    launcher: str
    value: str = ""
    """Instead of the variables' own."""


_INDEXED_JOB = Source("job", ("HOSTNAME", "JOB_COMPLETION_INDEX"), "an indexed Job, as its pods' names tell")
SOURCES = (
    Source("job", ("FIRSTFAULT_JOB",), "all"),
    Source("job", ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), "Slurm, an array"),
    Source("job", ("SLURM_JOB_ID",), "Slurm"),
    Source("job", ("JOBSET_NAME",), "JobSet, if the pod's template sets it"),
    Source("job", ("SKYPILOT_TASK_ID",), "SkyPilot"),
    Source("job", ("TORCHX_JOB_ID",), "torchx"),
    Source("job", ("PET_RDZV_ID",), "Kubeflow's training operator"),
    Source("job", (RENDEZVOUS_ID,), "torchrun"),
    _INDEXED_JOB,
    Source("attempt", ("FIRSTFAULT_ATTEMPT",), "all"),
    Source("attempt", ("SLURM_RESTART_COUNT",), "Slurm, after a requeue"),
    Source("attempt", ("SLURM_JOB_ID",), "Slurm, before a requeue: 0", "0"),
    Source("attempt", ("JOBSET_RESTART_ATTEMPT",), "JobSet, if the pod's template sets it"),
    Source("node", ("FIRSTFAULT_NODE",), "all"),
    Source("node", ("HOSTNAME",), "all: the host's name"),
    Source("namespace", ("FIRSTFAULT_NAMESPACE",), "all"),
    Source("namespace", ("POD_NAMESPACE",), "Kubernetes, if the pod's template sets it"),
)
"""In this order: the first whose variables are set is taken."""


class Name(NamedTuple):
    """A name, and where it came from; both empty: there is none."""

    value: str = ""
    source: str = "nothing names it"

    def __str__(self) -> str:
        return f"{self.value} ({self.source})" if self.value else self.source


class Who(NamedTuple):
    """What the environment tells about a node's job."""

    run_id: str
    job: Name = Name()
    attempt: Name = Name()
    node: Name = Name()
    namespace: Name = Name()

    @property
    def number(self) -> str:
        """The number of the attempt; 0 if nothing names it."""
        return self.attempt.value or "0"

    def told(self, run: str) -> str:
        """Return job and attempt of the run for a report, and where they came from."""
        return f"job {Name(run, self.job.source)}, attempt {Name(self.number, self.attempt.source)}"


def who(run_id: str, environment: Mapping[str, str] = os.environ) -> Who:
    """Return the names of this node's job; `run_id` is torchrun's."""
    known = {**environment, "HOSTNAME": socket.gethostname()}
    if _RANDOM.fullmatch(run_id) is None:
        known[RENDEZVOUS_ID] = run_id
    if known.get("PET_RDZV_ID") != known.get(RENDEZVOUS_ID):
        known.pop("PET_RDZV_ID", None)  # an argument of torchrun comes before it
    names: dict[str, Name] = {}
    for source in SOURCES:
        values = [known.get(name, "") for name in source.variables]
        if source is _INDEXED_JOB:
            host, index = values
            values = [host.removesuffix(f"-{index}")] if index and host.endswith(f"-{index}") else [""]
        value = _FOREIGN.sub("-", source.value or "_".join(values)).strip("-.")[-_LONGEST:]
        if all(values) and value and (source.of != "attempt" or value.isdecimal()):
            text = HOST if source.variables == ("HOSTNAME",) else " and ".join(source.variables)
            names.setdefault(source.of, Name(value, text))
    return Who(run_id, **names)
