"""What a user may set for a job of torchrun: options of ``firstfault torchrun``, each with its variable."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
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


def _strategy(text: str) -> str:
    return _one_of(strategy_names(), text)


def _restarts(text: str) -> str:
    return _one_of(("policy", _AS_TORCH), text)


def _one_of(names: tuple[str, ...], text: str) -> str:
    if text not in names:
        raise ArgumentTypeError(f"must be one of {', '.join(names)}, not {text!r}")
    return text


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
    _Setting("--ff-strategy", _STRATEGY, _strategy, "finds the root cause. Default: " + DEFAULT_STRATEGY),
    _Setting(
        "--ff-restarts",
        _RESTARTS,
        _restarts,
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
