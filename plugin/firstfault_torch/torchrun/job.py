"""What the environment defines for a job of torchrun: the user's options,
the names of job and node, and the folder.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os
import re
import socket
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from firstfault.decision_mode import DECISION_MODES, DECISIONS_VARIABLE
from firstfault.errors import UsageError
from firstfault.layout import RUN_MARK
from firstfault.run_folder import FOLDERS, began, begin_run, make_attempt, make_fallback_folder
from firstfault.slurm_pointer import find_start
from firstfault.store import is_remote, join
from firstfault.strategies import DEFAULT_STRATEGY, list_strategy_names
from firstfault.utils.safe_paths import ForeignPathError
from firstfault.utils.toml import parse_toml
from firstfault_torch.guard import call_with_timeout, logger, try_call
from firstfault_torch.options import DEFAULT_HANG, PORT_VARIABLE, Options, parse_hang, parse_port
from firstfault_torch.time_limits import RUN_FOLDER_TIMEOUT_SECONDS, RUN_NAME_TIMEOUT_SECONDS
from firstfault_torch.torchrun import exit_codes

# --- the user's options, each with its variable ---------------------------------------------------

FOLDER_VARIABLE, JOB_VARIABLE, ATTEMPT_VARIABLE = (
    "FIRSTFAULT_FOLDER",
    "FIRSTFAULT_JOB",
    "FIRSTFAULT_ATTEMPT",
)
_STRATEGY, _RESTARTS, HANG_VARIABLE = (
    "FIRSTFAULT_STRATEGY",
    "FIRSTFAULT_RESTARTS",
    "FIRSTFAULT_HANG",
)
_AS_TORCH = "torch"
_TORCH_BOX, _YES = "FIRSTFAULT_KEEP_TORCH_BOX", "1"


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


def _parsed_by(parse: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        _, error = try_call(partial(parse, text), UsageError)
        if error is not None:
            raise ArgumentTypeError(str(error))
        return text

    return check


class _Setting(NamedTuple):
    option: str
    variable: str
    check: Callable[[str], str]
    help: str
    is_flag: bool = False
    """Whether the option has no value; its variable is then 1 or 0."""


_SETTINGS = (
    _Setting(
        "--ff-folder",
        FOLDER_VARIABLE,
        str,
        "a path that all nodes see, or s3://...: where the documents about a failure go. Default: a"
        " folder on each node, .firstfault/torchrun",
    ),
    _Setting(
        "--ff-job",
        JOB_VARIABLE,
        str,
        "name of the job. Default: the scheduler's, else --rdzv-id",
    ),
    _Setting(
        "--ff-attempt",
        ATTEMPT_VARIABLE,
        _count,
        "number of this attempt, from 0. Default: the scheduler's",
    ),
    _Setting(
        "--ff-node",
        "FIRSTFAULT_NODE",
        str,
        "name of this node. Default: Slurm's, else the host's",
    ),
    _Setting(
        "--ff-strategy",
        _STRATEGY,
        _one_of(list_strategy_names),
        "finds the root cause. Default: " + DEFAULT_STRATEGY,
    ),
    _Setting(
        "--ff-restarts",
        _RESTARTS,
        _one_of(lambda: ("policy", _AS_TORCH)),
        "what decides on each of --max-restarts: the retry policy, which does not repeat a bug, or"
        " torch, which restarts after any failure: policy (default) or torch",
    ),
    _Setting(
        "--ff-hang",
        HANG_VARIABLE,
        _parsed_by(parse_hang),
        "seconds without progress after which the agents report the straggler, or end the job: "
        "warn:60 (default), warn:60,end:300, or off",
    ),
    _Setting(
        "--ff-exit-codes",
        exit_codes.CODES_VARIABLE,
        lambda text: text if exit_codes.parse_exit_codes(text) else "",  # it raises
        "exit codes by which a scheduler decides after a failure: default"
        f" ({exit_codes.PRESETS['default']}), pytorchjob, or a list like that. Not set: 1 after any"
        " failure",
    ),
    _Setting(
        "--ff-decisions",
        DECISIONS_VARIABLE,
        _one_of(lambda: DECISION_MODES),
        "what happens to decisions: off, observe (print what would have been done) or act"
        " (default)",
    ),
    _Setting(
        "--ff-port",
        PORT_VARIABLE,
        _parsed_by(parse_port),
        "port on which the first node's agent listens for the others, for networks that allow only"
        " listed ports. Default: a free one",
    ),
    _Setting(
        "--ff-keep-torch-box",
        _TORCH_BOX,
        _one_of(lambda: (_YES, "0")),
        "after a failure, also print torch's own box, ChildFailedError, below firstfault's lines",
        is_flag=True,
    ),
)


def add_options(parser: ArgumentParser) -> None:
    """Add firstfault's options to torch's parser; the help lists them first."""
    # torch's usage names each of its options, and would fill the screen before ours
    parser.usage = "%(prog)s [options] training_script [arguments of the script]"
    group = parser.add_argument_group(
        "firstfault's options", "Each can also be set by its variable."
    )
    for setting in _SETTINGS:
        name = setting.option.rpartition("-")[2].upper()
        text = f"{setting.help}. Variable: {setting.variable}"
        if setting.is_flag:
            group.add_argument(
                setting.option,
                action="store_const",
                const=_YES,
                help=f"{text}={_YES}",
            )
        else:
            group.add_argument(setting.option, type=setting.check, metavar=name, help=text)
    # argparse has no public way to order groups
    groups = parser._action_groups  # noqa: SLF001
    groups.insert(0, groups.pop())


def list_options() -> list[tuple[str, bool]]:
    """Return the names of firstfault's options, and whether each is a flag."""
    return [(setting.option, setting.is_flag) for setting in _SETTINGS]


def set_variables(arguments: Namespace) -> None:
    """Set the variables of the options that were given; the agent and its workers read them."""
    # As variables and not as arguments: the agent, its workers and their children read the same
    # ones.
    for setting in _SETTINGS:
        value = getattr(arguments, setting.option.lstrip("-").replace("-", "_"))
        if value is not None:
            os.environ[setting.variable] = value


def list_variables() -> dict[str, Callable[[str], str]]:
    """Return the variables of the options; each with its check, which returns what is wrong with
    a value: "must be a port from 1 to 65535, not 'abc'"; empty: it is valid.
    """
    return {setting.variable: partial(_find_problem, setting) for setting in _SETTINGS}


def _find_problem(setting: _Setting, text: str) -> str:
    try:
        setting.check(text)
    except ArgumentTypeError as error:
        return str(error)
    return ""


def read_options(environment: Any = os.environ, **others: Any) -> Options:
    """Return the options that the environment sets."""
    strategy = environment.get(_STRATEGY) or DEFAULT_STRATEGY
    hang = parse_hang(environment.get(HANG_VARIABLE) or DEFAULT_HANG)
    follows = environment.get(_RESTARTS) != _AS_TORCH
    return Options(
        strategy=strategy,
        restarts_follow_policy=follows,
        hang=hang,
        stops_repeats=True,
        **others,
    )


def keeps_torch_box() -> bool:
    """Whether torch's own box is printed, too."""
    return os.environ.get(_TORCH_BOX) == _YES


# --- the names of the job, its attempt and this node ----------------------------------------------

RENDEZVOUS_ID = "--rdzv-id"
HOST = "the host's name"
_FOREIGN = re.compile(r"[^A-Za-z0-9._-]+")
"""Characters to replace in names of folders and keys of objects,
such as the slashes of ``TORCHX_JOB_ID``.
"""
_RANDOM = re.compile(r"none|[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}|\d{36,39}")
"""torchrun's default, and the ids that launchers draw for a job on one node."""
_LONGEST = 120
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SLURM, _SLURM_JOB = "SLURM_", "SLURM_JOB_ID"


class Source(NamedTuple):
    """Where a name may come from."""

    of: str
    variables: tuple[str, ...]
    """All must be set; their values are joined by "_"."""
    launcher: str
    value: str = ""
    """Instead of the variables' own."""
    is_suffix: bool = False
    """Whether the second variable is the end of the host's name, and is taken off."""


_TABLE = parse_toml(Path(__file__).with_name("sources.toml").read_text("utf-8"))["source"]
SOURCES = tuple(Source(**{**row, "variables": tuple(row["variables"])}) for row in _TABLE)
"""By priority: the first source with all variables set wins."""


class Name(NamedTuple):
    """A name, and where it came from; both empty: there is none."""

    value: str = ""
    source: str = "generated"

    def __str__(self) -> str:
        return f"{self.value} ({self.source})" if self.value else self.source


class Who(NamedTuple):
    """What the environment defines for a node's job."""

    run_id: str
    job: Name = Name()
    attempt: Name = Name()
    node: Name = Name()
    namespace: Name = Name()
    run: str = ""
    """The name of the run's folder; empty: nothing names the job."""
    step: str = ""
    """Slurm's number of the step if Slurm counts the attempts; else empty."""

    @property
    def number(self) -> str:
        """The number of the attempt; 0 if nothing names it."""
        return self.attempt.value or "0"

    def told(self, run: str) -> str:
        """Return job and attempt of the run for a report,
        and where these and its nodes' names came from.
        """
        nodes = f", nodes named by {self.node.source}" if self.node.source != HOST else ""
        return (
            f"{_name_source(run, self.job)}, attempt"
            f" {_name_source(self.number, self.attempt)}{nodes}"
        )


def _name_source(text: str, name: Name) -> str:
    """Return a name with its source; without one, if firstfault made it."""
    return f"{text} ({name.source})" if name.value else text


def _read_namespace() -> Name:
    """Return the namespace that Kubernetes mounts into a pod; empty: this is no pod,
    or it has no service account.
    """
    text, _ = try_call(partial(_NAMESPACE_FILE.read_text, encoding="ascii"), Exception)
    return Name(text.strip(), "its service account") if text else Name()


def who(run_id: str, environment: Mapping[str, str] = os.environ) -> Who:
    """Return the names of this node's job; `run_id` is torchrun's."""
    known = {**environment, HOST: socket.gethostname()}
    if _RANDOM.fullmatch(run_id) is None:
        known[RENDEZVOUS_ID] = run_id
    # torchrun reads PET_RDZV_ID only as the default of --rdzv-id.
    if known.get("PET_RDZV_ID") != known.get(RENDEZVOUS_ID):
        known.pop("PET_RDZV_ID", None)  # an argument of torchrun comes before it
    names: dict[str, Name] = {}
    for source in SOURCES:
        values = [known.get(name, "") for name in source.variables]
        if source.is_suffix:
            host, index = values
            # An indexed Job has the index at the end of each pod's host name: without it, all pods
            # have the same name.
            values = (
                [host.removesuffix(f"-{index}")] if index and host.endswith(f"-{index}") else [""]
            )
        value = _FOREIGN.sub("-", source.value or "_".join(values)).strip("-.")[-_LONGEST:]
        if all(values) and value and (source.of != "attempt" or value.isdecimal()):
            names.setdefault(source.of, Name(value, " and ".join(source.variables)))
    job, attempt, node, namespace = (
        names.get(of, Name()) for of in ("job", "attempt", "node", "namespace")
    )
    found = Who(run_id, job, attempt, node, namespace if namespace.value else _read_namespace())
    if not attempt.source.startswith(_SLURM):
        return found._replace(run=job.value)
    # Slurm counts the attempts of one of its jobs. Another job with the same FIRSTFAULT_JOB is
    # another run, whose attempts have the same numbers. So is one that a task of an array submits:
    # it inherits the array's variables.
    start = find_start(environment)
    run = (
        f"{job.value}-{start.job}" if start is not None and job.source != _SLURM_JOB else job.value
    )
    step = environment.get("SLURM_STEP_ID", "")
    return found._replace(run=run, step=step if step.isdecimal() else "")


# --- the folder of the job's documents: the same on all nodes, of no other run, and one that can be
# written -----------

_NO_COMMON_NAME = (
    "the nodes of this job have no common name, so each writes its documents to a separate folder"
    " below %s; set FIRSTFAULT_JOB to a new name for each run"
)
_ELSEWHERE = (
    "%s %s; this node's documents are in %s. Make it writable, or set FIRSTFAULT_FOLDER to another"
    " one."
)
_TIMED = re.compile(r"-\d{8}-\d{6}-.+-\d+")
"""What `_make_new_name` adds to a name."""
_runs = itertools.count()
"""One process may run several jobs of functions in a second."""


class Chosen(NamedTuple):
    """Where this node records."""

    folder: str
    """Of the attempt."""
    mark: int | None
    """Descriptor of the mark on the run's folder, locked until it is closed;
    a remote folder has none.
    """
    is_shared: bool
    """Whether all nodes record there."""


def given_folder() -> str:
    """Return the folder that the user names for all nodes; empty: none."""
    given = os.environ.get(FOLDER_VARIABLE, "").strip().removeprefix("file://")
    if not given or is_remote(given):
        return given
    # Path's raises without a home
    return str(Path(os.path.expanduser(given)).absolute())  # noqa: PTH111


def root_folder() -> str:
    """Return the folder below which runs lie: the user's, else one in the working folder.

    Raises:
        OSError: there is no working folder, and no folder for temporary files.
    """
    working, _ = try_call(Path.cwd, OSError)  # it may have been removed
    return given_folder() or str(
        working / FOLDERS[0] if working is not None else make_fallback_folder()
    )


def name_run(this: Who) -> str:
    """Return the name of the run of an agent; empty: nothing names the job."""
    # The steps of one job are separate runs. The first one's is named after the job alone.
    return f"{this.run}.{this.step}" if this.run and this.step.strip("0") else this.run


def is_named_by_start(root: str, who: Who) -> bool:
    """Whether the run's name contains the time, host and process of its start.

    Without a number of the attempt, a job of this name may have run before, and a storage isn't
    asked.
    """
    return not who.run or (is_remote(root) and not who.attempt.value)


def chosen_folder(who: Who, meet: Callable[[], Any] | None) -> Chosen:
    """Return the folder of this run's attempt, made and marked; a remote folder is only named.

    `meet` returns the store that all nodes of the job share, or None; it is None if there is one
    node.
    """
    root = root_folder()
    name = None
    claim = partial(_claim_name, root, who)
    store = meet() if meet is not None else None
    # Nodes can't choose the name independently: they start in different seconds, and may see an
    # older run's folder at different times. So one node claims a name, and its peers read it from
    # the store.
    if store is not None:
        agree = partial(_agree_on_name, store, who, claim)
        name = call_with_timeout(agree, RUN_NAME_TIMEOUT_SECONDS, "agreeing on the run's name")
    # No common store: only names that are complete without the clock or a look at the folder are
    # equal on all nodes.
    elif meet is not None:  # the variables alone may be the same on all nodes
        name = f"{name_run(who)}/{who.number}" if who.job.value and who.attempt.value else None
    if name is None and meet is not None and given_folder():
        logger.warning(_NO_COMMON_NAME, root)
    is_common = bool(given_folder()) and (name is not None or meet is None)
    # Remote folders have no locks, so no mark either.
    if is_remote(root):
        return Chosen(join(root, name or claim()), None, is_common)
    why = ""
    # The second is looked for only if the first can't be written: a node may have no folder for
    # temporary files. A folder may hang (NFS) instead of failing, so each has a limit; the thread
    # of a hanging one stays behind.
    for find_parent in (lambda: root, lambda: str(make_fallback_folder())):
        make = partial(try_call, partial(_make_folder, find_parent, who, name), OSError)
        found = call_with_timeout(make, RUN_FOLDER_TIMEOUT_SECONDS, "making the run's folder")
        made, error = found or (None, None)
        if made is not None:
            if why and given_folder():
                logger.warning(_ELSEWHERE, root, why, made[0])
            # In the fallback this node records alone, even if its peers can write to `root`.
            return Chosen(*made, is_common and not why)
        late = f"did not answer within {RUN_FOLDER_TIMEOUT_SECONDS:g} s"
        why = why or (f"cannot be written ({error})" if error else late)
    raise OSError(f"{root} {why}")


def _make_folder(find_parent: Callable[[], str], who: Who, name: str | None) -> tuple[str, int]:
    parent = find_parent()
    folder = Path(parent, name or _claim_name(parent, who))
    # Without the mark, readers and cleanups don't take the folder for a run (`run_folder.runs_in`).
    # The attempt's folder exists if `_claim_name` took the name, or if another node on a shared
    # file system was faster.
    return str(folder), begin_run(folder.parent, folder.name)


def _make_new_name(who: Who) -> str:
    number = next(_runs)
    began = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}{f'-{number}' if number else ''}"
    return f"{name_run(who)}-{began}/{who.number}" if who.run else f"{began}/{who.number}"


def _claim_name(root: str, who: Who) -> str:
    """Return "<run>/<attempt>", by a name that no run before has taken below `root`.

    A storage is too slow to be asked here: a folder on this node decides, and if it may be another
    node's turn, the time of the start makes a new name.
    """
    if is_named_by_start(root, who):
        return _make_new_name(who)
    run = name_run(who)
    try:
        if is_remote(root):
            root = str(make_fallback_folder())
        elif who.number != "0" and not who.attempt.source.startswith(_SLURM):
            run = _find_last_run(Path(root), run)
        # mkdir() is the test and the claim in one step: of two jobs with this name, only one makes
        # the folder.
        make_attempt(Path(root, run), who.number)
    except (FileExistsError, ForeignPathError):
        return _make_new_name(who)
    except OSError:  # not writable here; each node finds out when it makes its own folder
        pass
    return f"{run}/{who.number}"


def _find_last_run(root: Path, name: str) -> str:
    """Return the run of a job that was begun last: "job",
    or "job-<time>-<host>-<process>" if that name was taken.

    A scheduler that names its jobs only by what a user wrote counts each job's attempts from 0. A
    later attempt belongs to the job that was begun last, and not to an older one in whose folder
    its number is free.
    """
    later = (
        mark.parent
        for mark in root.glob(f"*/{RUN_MARK}")
        if _TIMED.fullmatch(mark.parent.name.removeprefix(name))
    )
    return max((root / name, *later), key=began).name


def _agree_on_name(store: Any, who: Who, claim: Callable[[], str]) -> str:
    """Return the name that the first node to ask claims."""
    key = f"firstfault/run/{who.run_id}"
    # The counter elects one node. If that node dies before set(), its peers time out in wait(), and
    # each of them records in a separate folder.
    if store.add(f"{key}/asked", 1) == 1:
        # With a limit: a folder that hangs must not keep the peers waiting for the name.
        store.set(
            key,
            call_with_timeout(claim, RUN_FOLDER_TIMEOUT_SECONDS, "naming the run")
            or _make_new_name(who),
        )
    store.wait([key], dt.timedelta(seconds=RUN_NAME_TIMEOUT_SECONDS))
    return bytes(store.get(key)).decode()
