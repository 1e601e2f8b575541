"""The user's options for a job of torchrun, each with its variable."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from firstfault.decision_mode import DECISION_MODES, DECISIONS_VARIABLE
from firstfault.errors import UsageError
from firstfault.strategies import DEFAULT_STRATEGY, list_strategy_names
from firstfault_torch.guard import try_call
from firstfault_torch.options import DEFAULT_HANG, PORT_VARIABLE, Options, parse_hang, parse_port
from firstfault_torch.torchrun import exit_codes

FOLDER_VARIABLE = "FIRSTFAULT_FOLDER"
JOB_VARIABLE = "FIRSTFAULT_JOB"
ATTEMPT_VARIABLE = "FIRSTFAULT_ATTEMPT"
HANG_VARIABLE = "FIRSTFAULT_HANG"
_STRATEGY_VARIABLE = "FIRSTFAULT_STRATEGY"
_RESTARTS_VARIABLE = "FIRSTFAULT_RESTARTS"
_TORCH_BOX_VARIABLE = "FIRSTFAULT_KEEP_TORCH_BOX"
_TORCHS_CHOICE = "torch"
_FLAG_VALUE = "1"


def _check_count(text: str) -> str:
    if not text.isdecimal():
        raise ArgumentTypeError(f"must be a number, 0 or more, not {text!r}")
    return text


def _check_choice(names: Callable[[], tuple[str, ...]]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names():
            raise ArgumentTypeError(f"must be one of {', '.join(names())}, not {text!r}")
        return text

    return check


def _check_parsed_by(parse: Callable[[str], object]) -> Callable[[str], str]:
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
        _check_count,
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
        _STRATEGY_VARIABLE,
        _check_choice(list_strategy_names),
        "finds the root cause. Default: " + DEFAULT_STRATEGY,
    ),
    _Setting(
        "--ff-restarts",
        _RESTARTS_VARIABLE,
        _check_choice(lambda: ("policy", _TORCHS_CHOICE)),
        "what decides on each of --max-restarts: the retry policy, which does not repeat a bug, or"
        " torch, which restarts after any failure: policy (default) or torch",
    ),
    _Setting(
        "--ff-hang",
        HANG_VARIABLE,
        _check_parsed_by(parse_hang),
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
        _check_choice(lambda: DECISION_MODES),
        "what happens to decisions: off, observe (print what would have been done) or act"
        " (default)",
    ),
    _Setting(
        "--ff-port",
        PORT_VARIABLE,
        _check_parsed_by(parse_port),
        "port on which the first node's agent listens for its peers, for networks that allow only"
        " listed ports. Default: a free one",
    ),
    _Setting(
        "--ff-keep-torch-box",
        _TORCH_BOX_VARIABLE,
        _check_choice(lambda: (_FLAG_VALUE, "0")),
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
                const=_FLAG_VALUE,
                help=f"{text}={_FLAG_VALUE}",
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
    """Return the variables of the options, each with its check. The check returns what is wrong
    with a value, such as "must be a port from 1 to 65535, not 'abc'", or "" if it is valid.
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
    strategy = environment.get(_STRATEGY_VARIABLE) or DEFAULT_STRATEGY
    hang = parse_hang(environment.get(HANG_VARIABLE) or DEFAULT_HANG)
    follows = environment.get(_RESTARTS_VARIABLE) != _TORCHS_CHOICE
    return Options(
        strategy=strategy,
        restarts_follow_policy=follows,
        hang=hang,
        stops_repeats=True,
        **others,
    )


def keeps_torch_box() -> bool:
    """Whether torch's own box is printed, too."""
    return os.environ.get(_TORCH_BOX_VARIABLE) == _FLAG_VALUE
