"""torchrun's options for output, signals and NUMA are understood in torchrun's forms,
and refused if they are wrong.
"""

import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import Std
from torch.numa.binding import AffinityMode, NumaOptions

from firstfault.errors import UsageError
from firstfault_torch.options import (
    DEFAULT_SIGNALS,
    check_numa,
    numa_options,
    parse_ranks,
    parse_signals,
    parse_streams,
    with_node,
)

WORKERS = 12


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, Std.from_str(value)) for value in ("0", "3", "0:3", "0:1,1:2", "9:0,3:3")),
        *(
            (3, 3),
            (Std.ERR, 2),
            ({0: 1, 11: Std.ALL}, {0: 1, 11: 3}),
            ("10:1,11:2", {10: 1, 11: 2}),
            ({}, {}),
        ),
    ],
)
def test_streams_are_taken_in_torchs_forms(value: Any, expected: Any) -> None:
    """A text means what torch makes of it; numbers, torch's Std,
    dictionaries and ranks above 9 are taken, too.
    """
    assert parse_streams(value, "tee", WORKERS) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("0,1", {0, 1}), (" 3 , 11", {3, 11}), ([0, 2], {0, 2}), ({5}, {5}), (None, None), ("", None)],
)
def test_local_ranks_are_taken_as_text_or_collection(value: Any, expected: set[int] | None) -> None:
    """Local ranks are a text as torchrun takes it, or a collection."""
    assert parse_ranks(value, "local_ranks_filter", WORKERS) == expected


def _bad() -> Iterator[tuple[Callable[[], object], str]]:
    """Yield calls that are refused, each with the message."""
    for value in ("", "4", "out", "0:4", "0:1,", "a:1", 4, -1, True, None, {0: 4}, {"0": 1}, [3]):
        yield (
            partial(parse_streams, value, "tee", WORKERS),
            "tee must be 0 (none), 1 (stdout), 2 (stderr), 3 (both)",
        )
    for value in ("a", "0,,1", "-1", [], [True], {0: 1}, 3, b"0"):
        yield (
            partial(parse_ranks, value, "filter", WORKERS),
            'filter must be local ranks like "0,1" or [0, 1], not',
        )
    for value in ("", "SIGTERM,", "SIGNONE", "TERM", "SIGKILL", "SIGTERM,SIGSTOP", 15, None):
        yield (
            partial(parse_signals, value),
            "signals_to_handle must be names of signals that can be handled",
        )
    for value in ("nodes", 3, ["node"]):
        yield (
            partial(check_numa, value, "numa_options"),
            "numa_options must be None, one of node, socket, exclusive, ",
        )
    message = "redirects names local rank 12, but a node has only 12 workers"
    yield partial(parse_streams, "0:1,12:3", "redirects", WORKERS), message
    yield partial(parse_ranks, [99, 1], "filter", WORKERS), "filter names local rank 99"


def test_other_values_are_refused_with_the_accepted_forms() -> None:
    """Anything else is refused with the forms that are taken."""
    for call, message in _bad():
        with pytest.raises(UsageError, match=re.escape(message)):
            call()


def test_signals_are_named_as_torch_names_them() -> None:
    """Signals are named as torch names them."""
    assert parse_signals(DEFAULT_SIGNALS) == (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    )
    assert parse_signals(" SIGUSR1 ,SIGTERM,SIGUSR1") == (signal.SIGUSR1, signal.SIGTERM)


def test_a_numa_mode_becomes_torchs_options() -> None:
    """A mode's name becomes torch's options; torch's own pass."""
    assert numa_options(None) is None
    assert numa_options("core-complex") == NumaOptions(AffinityMode.CORE_COMPLEX)
    own = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert numa_options(own) is own
    for value in (None, "node", own):
        check_numa(value, "numa_options")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("[${node}/${group_rank} ${rank}]", "[w$$1/3 ${rank}]"),
        ("$node $group_rank $local_rank", "w$$1 3 $local_rank"),
        ("$$node $${group_rank} $nodes ${role_name}", "$$node $${group_rank} $nodes ${role_name}"),
        ("[", "["),
    ],
)
def test_a_log_prefix_gets_node_and_group_rank(template: str, expected: str) -> None:
    """Node and group rank are filled in; the rest, also an escaped dollar sign,
    is left to torch.
    """
    assert with_node(template, {"node": "w$1", "group_rank": 3}) == expected
