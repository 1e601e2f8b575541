"""The patterns of evidence."""

import pytest

from firstfault import evidence, exceptions, retry
from firstfault.evidence import (
    classification,
    hangs,
    library_calls,
    progress,
    texts,
    unreported,
    watchdogs,
)
from firstfault.evidence.signatures import Pattern
from firstfault.utils.lazy_pattern import LazyPattern
from tests.readers.any_pattern import find_all

_EXAMPLES: list[tuple[LazyPattern, str, dict[str, str]]] = [
    (
        texts._UNSENDABLE_RESULT,
        (
            '  File "/x/torch/distributed/elastic/multiprocessing/api.py", line 700, in _wrap\n'
            "    ret_vals[local_rank].put(ret)\n"
            '  File "/usr/lib/python3.11/multiprocessing/queues.py", line 371, in put\n'
        ),
        {},
    ),
    (
        classification._CONTAINER_ENDED,
        "train-worker-0   0/1     CrashLoopBackOff   5 (10s ago)   10m",
        {},
    ),
    (classification._CHECKPOINT_RANKS, "CheckpointException ranks:dict_keys([3])", {"ranks": "3"}),
    (
        classification._NAMED_EXCEPTION,
        "OSError: [Errno 28] No space left on device",
        {"type": "OSError"},
    ),
    (classification._LOG_NOTICE, "06-May-31 07:08:09 [Worker:1] [INFO] step 1", {}),
    (unreported._WAIT_EXCEPTION, "TimeoutError", {}),
    (hangs._COLLECTIVES_FILE, "/x/site-packages/torch/distributed/distributed_c10d.py", {}),
    (hangs._SUBGROUP_CALL, "dist.barrier(group=PAIR) barrier", {}),
    (hangs._EQUAL_SIZES_OPERATION, "nccl:all_reduce", {}),
    (library_calls._CHECKPOINT_LOADER, "/x/site-packages/torch/serialization.py load", {}),
    (library_calls._CONFIG_PARSER, "/x/site-packages/jsonargparse/core.py _check", {}),
    (library_calls._PARSER_INTERNALS, "/usr/lib/python3.11/pathlib.py read_bytes", {}),
    (progress._WATCHDOG_STAMP, "[E506 07:08:09.", {}),
    (progress._MISSING_RANKS, "2: [grad.layer1.weight, grad.layer2.weight]", {"horovod": "2"}),
    (
        progress._ARRIVED_RANKS,
        "# of tasks that reached the barrier: 2/4.",
        {"arrived": "2", "size": "4"},
    ),
    (progress._PLACE_OF_WAIT, "Barrier timed out. Id: step_7:0", {"barrier": "step_7"}),
    (progress._JOINED_WORKERS, "world_size=8, num_workers_joined=16", {"size": "8", "count": "16"}),
    (progress._COLLECTIVE_OF_ALL_RANKS, "nccl:all_to_all", {}),
    (
        texts._CPP_TERMINATE_PREFIX,
        "terminate called after throwing an instance of 'c10::Error'",
        {},
    ),
    (texts._EXCEPTION_NAME, "botocore.exceptions.EndpointConnectionError", {}),
    (watchdogs._NO_PROGRESS, "exit code 1: no progress for 66 s, exiting", {}),
    (watchdogs._JOB_WIDE_WORD, "TimeoutError: 2 of 4 ranks came", {}),
    (
        watchdogs._NO_REASON_GIVEN,
        "exit code 42: Seit 66 s kein Fortschritt, beende den Prozess",
        {},
    ),
    (watchdogs._UNFINISHED_WAIT, "TimeoutError: the step took longer than 60 s", {}),
    (watchdogs._UNRELATED_ERROR, "exit code 2: error: unknown argument --timeout", {}),
]
"""Each pattern, a text that it matches, and the groups that it finds there."""


@pytest.mark.parametrize(("pattern", "example", "groups"), _EXAMPLES)
def test_each_pattern_finds_its_example(
    pattern: LazyPattern, example: str, groups: dict[str, str]
) -> None:
    """Each pattern finds its example, with these groups."""
    found = pattern.search(example)
    assert found is not None
    assert {name: text for name, text in found.groupdict().items() if text} == groups


def test_each_pattern_has_an_example() -> None:
    """A pattern without an example may be wrong, or not needed."""
    # modules import patterns of exceptions, too
    others = set(map(id, find_all(exceptions).values()))
    found = find_all(evidence)
    patterns = {name: found[name] for name in found if id(found[name]) not in others}
    shown = {id(pattern) for pattern, _, _ in _EXAMPLES}
    assert [name for name, pattern in patterns.items() if id(pattern) not in shown] == []


_RE2_EXAMPLES: list[tuple[Pattern, str, dict[str, str]]] = [
    (retry._GPU_GONE, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", {}),
    (
        texts._MEMORY_SIZES,
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.06 GiB is free",
        {"asked": "2.00", "unit": "G", "total": "79.15", "of": "G"},
    ),
    (texts._SURVIVAL_LINES, "WARNING: the store is slow, retrying in 3 s", {}),
    (
        texts._LAST_WORK,
        "last enqueued NCCL work: 5, last completed NCCL work: 4.",
        {"enqueued": "5", "completed": "4"},
    ),
    (
        progress._PRINTED_COUNTERS,
        "[PG ID 0 PG GUID 1(dp) Rank 1] failed. last enqueued work: 5, last completed work: 4",
        {"guid": "1", "description": "dp", "enqueued": "5", "completed": "4"},
    ),
    (
        progress._TIMED_OUT_WORK,
        "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, Timeout(ms)=1000)",
        {"number": "5", "operation": "ALLREDUCE", "input": "9", "output": "9"},
    ),
    (progress._RUN_TIME, "ran for 1001 milliseconds before timing out.", {"ms": "1001"}),
]
"""The same for expressions of RE2."""


@pytest.mark.parametrize(("pattern", "example", "groups"), _RE2_EXAMPLES)
def test_each_re2_pattern_finds_its_example(
    pattern: Pattern, example: str, groups: dict[str, str]
) -> None:
    """Each expression of RE2 finds its example, with these groups."""
    assert pattern.search(example) == groups
