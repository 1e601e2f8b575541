"""The patterns of exceptions, tracebacks and stacks."""

import pytest

from firstfault import exceptions
from firstfault.exceptions import (
    ending_exception,
    exceptions_in_text,
    fatal_text,
    first_cause,
    printed_tracebacks,
    source_files,
    stack_position,
)
from firstfault.utils.lazy_pattern import LazyPattern
from tests.readers.any_pattern import find_all

_EXAMPLES: list[tuple[LazyPattern, str, dict[str, str]]] = [
    (ending_exception._FATAL_WORD, "fatal: license server", {}),
    (ending_exception._ABORT_WITHOUT_REASON, "terminate called without an active exception", {}),
    (
        ending_exception._PYTHON_ERROR_TEXT,
        "ValueError: bad gradient",
        {"type": "ValueError", "message": "bad gradient"},
    ),
    (
        ending_exception._PYBIND_FRAME,
        "  /usr/lib/python3.11/site-packages/torch/autograd/graph.py(824): _engine_run_backward",
        {
            "file": "/usr/lib/python3.11/site-packages/torch/autograd/graph.py",
            "line": "824",
            "function": "_engine_run_backward",
        },
    ),
    (exceptions_in_text._TORCH_WRAPPER, "Caught TypeError in DataLoader worker process 0.", {}),
    (exceptions_in_text._TRACEBACK_START, "Traceback (most recent call last): (RANK 3)", {}),
    (
        exceptions_in_text._FRAME_LINE,
        '  File "/x/torch/futures.py", line 9, in wait',
        {"file": "/x/torch/futures.py", "line": "9", "function": "wait"},
    ),
    (
        exceptions_in_text.EXCEPTION_LINE,
        "ValueError: the batch of rank 1 has no labels",
        {"type": "ValueError", "message": "the batch of rank 1 has no labels"},
    ),
    (exceptions_in_text._CUT_MARK, "... 4096 characters left out ...", {}),
    (printed_tracebacks.RANK_PREFIX, "[default3]:Traceback (most recent call last):", {}),
    (printed_tracebacks._MESSAGE_PREFIX, "[Rank 1] step 2 loss 0.8582", {}),
    (
        printed_tracebacks._TRACEBACK_HEADER,
        "  + Exception Group Traceback (most recent call last):",
        {"gutter": "  ", "group": "+ Exception Group "},
    ),
    (
        printed_tracebacks._CHAIN_SENTENCE,
        "The above exception was the direct cause of the following exception:",
        {"cause": "The above exception was the direct cause"},
    ),
    (printed_tracebacks._HANDLED_NOTICE, "WARNING:root:ignoring a failed clean-up", {}),
    (printed_tracebacks._WARNING_LEVEL, "WARNING:root:out of memory; trying a smaller batch", {}),
    (printed_tracebacks._PYTHON_WARNING, "/app/train.py:12: UserWarning: the loader is slow", {}),
    (printed_tracebacks._UNRELATED_LINE, "Fatal Python error: Aborted", {}),
    (printed_tracebacks._GROUP_MEMBER_START, "  +-+---------------- 1 ----------------", {}),
    (printed_tracebacks._GROUP_BORDER, "------------------------------------", {}),
    (
        printed_tracebacks._RICH_BOX_START,
        "╭──────── Traceback (most recent call last) ────────╮",
        {},
    ),
    (printed_tracebacks._RICH_BOX_END, "╰──────────────────────────────────────────────────╯", {}),
    (
        printed_tracebacks._RICH_FRAME,
        "/app/tests/cascades/training.py:103 in loader",
        {"file": "/app/tests/cascades/training.py", "line": "103", "function": "loader"},
    ),
    (
        printed_tracebacks._RICH_CODE,
        "❱  83 │   │   │   return func(*args, **kwargs)",
        {"line": "83", "code": "   │   │   return func(*args, **kwargs)"},
    ),
    (fatal_text._SURVIVAL_NOTICE, "Connection closed by peer; connecting again to the metrics", {}),
    (fatal_text._DUMP_LINE, "Thread 0x00007fb559f266c0 (most recent call first):", {}),
    (fatal_text._ADVICE_LINE, "Try 'train.py --help' for help.", {}),
    (fatal_text._NOISE_LINE, "WARNING: the loader is slow", {}),
    (fatal_text._BOX_SIDES, "│ Missing option '--rate'. │", {}),
    (
        fatal_text._CPP_WHAT_LINE,
        "  what():  cannot copy: No space left on device",
        {"text": "cannot copy: No space left on device"},
    ),
    (fatal_text._NATIVE_LINE, "terminate called without an active exception", {}),
    (first_cause._PEER_ERROR, "Connection closed by peer [10.0.0.1]:41", {}),
    (first_cause._ERROR_HANDLING_VERB, "fail_like_a_collective", {}),
    (
        first_cause._EXCEPT_CLAUSE,
        "    except (KeyError, IndexError) as error:",
        {"types": "KeyError, IndexError", "name": "error"},
    ),
    (first_cause._SUBSTITUTE_STATEMENT, "return None", {}),
    (first_cause._RAISE_OR_EXIT_STATEMENT, "        raise TrainingError('step 4') from error", {}),
    (first_cause._HANDLER_OR_DEFINITION_START, "    except ValueError:", {"handler": "except"}),
    (first_cause._GENERIC_WRAPPER, "An error occurred while generating the dataset", {}),
    (ending_exception.ALL_TRIES_FAILED, "gave up after 3 attempts", {}),
    (source_files._LIBRARY_FILE, "/usr/lib/python3.11/multiprocessing/queues.py", {}),
    (source_files._FIRSTFAULT_FILE, "/app/plugin/flytekitplugins/firstfault/agent.py", {}),
    (
        source_files._PACKAGE_FOLDER,
        "/usr/lib/python3/dist-packages/yaml/reader.py",
        {"name": "yaml"},
    ),
    (
        stack_position._DUMP_FRAME,
        '  File "/job/data.py", line 31 in next_batch',
        {"file": "/job/data.py", "line": "31", "function": "next_batch"},
    ),
    (stack_position._PROCESS_GROUP_FILE, "/x/site-packages/torch/distributed/c10d.py", {}),
    (stack_position._LAUNCHER_FILE, "/app/plugin/flytekitplugins/firstfault/task.py", {}),
    (stack_position._THREAD_WAIT_FILE, "/usr/lib/python3.11/concurrent/futures/_base.py", {}),
    (
        stack_position._RAISE_POINT_LINE,
        'An exception raised at "/job/train.py", line 7 in train was on its way out.',
        {"file": "/job/train.py", "line": "7", "function": "train"},
    ),
    (
        stack_position._LOADER_WAIT_FRAME,
        "/x/site-packages/torch/utils/data/dataloader.py _try_get_data",
        {},
    ),
    (
        stack_position._MULTIPROCESSING_WAIT_FILE,
        "/x/lib/python3.11/multiprocessing/synchronize.py",
        {},
    ),
    (
        stack_position._WORKER_ENTRY_FILE,
        "/x/site-packages/torch/distributed/elastic/multiprocessing/api.py",
        {},
    ),
    (
        stack_position._DESTROY_GROUP_FRAME,
        "/x/site-packages/torch/distributed/distributed_c10d.py destroy_process_group",
        {},
    ),
    (stack_position._EXIT_FUNCTION, "_exit_function", {}),
    (stack_position._TORCH_WAIT_FILE, "/x/site-packages/torch/cuda/streams.py", {}),
    (stack_position._AUTOGRAD_FILE, "/x/site-packages/torch/autograd/graph.py", {}),
    (stack_position._THREAD_START_FILE, "/usr/lib/python3.11/concurrent/futures/thread.py", {}),
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
    patterns = find_all(exceptions)
    shown = {id(pattern) for pattern, _, _ in _EXAMPLES}
    assert [name for name, pattern in patterns.items() if id(pattern) not in shown] == []
