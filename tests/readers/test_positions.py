"""Where a stopped process stood, by its stack."""

from __future__ import annotations

import pytest

from firstfault.exceptions.stack_position import Stood, readable_stack, where_it_stood, with_source
from firstfault.strategies.rules import evidence
from tests.readers.scenes import (
    IN_COLLECTIVE,
    IN_SLEEP,
    STACK,
    count,
    done,
    stopped,
    waiting,
)


def test_the_same_hang_has_the_same_fingerprint() -> None:
    """By where it stood, without the line: the next attempt's verdict can be compared."""

    def hang(stack: str) -> str:
        return evidence(done(*waiting(0, 1, 2), stopped(3, stack, **count(5)))).fingerprint

    assert hang(IN_SLEEP) == hang(IN_SLEEP.replace("line 12", "line 14")) != ""
    assert hang(IN_SLEEP) != hang(STACK.format("/app/train.py", "save"))


@pytest.mark.parametrize("fill", ["\n", " ", " \n", "  File \n"])
def test_a_stack_of_nothing_but_lines(fill: str) -> None:
    """64 KB of newlines and blanks in a stack take no minutes, and the frame before them is found."""
    where = where_it_stood(stopped(3, IN_SLEEP + fill * (65_000 // len(fill))))
    assert where.frame == "train.py:12 in load"


@pytest.mark.parametrize(
    "main",
    [
        "  Garbage-collecting\n  <no Python frame>\n",
        '  File "/usr/lib/python3.11/threading.py", line 1590 in _shutdown\n',
        '  File "/usr/lib/python3.11/multiprocessing/util.py", line 360 in _exit_function\n',
        (
            '  File "/x/site-packages/torch/library.py", line 665 in _del_library\n'
            '  File "/usr/lib/python3.11/weakref.py", line 666 in _exitfunc\n'
        ),
        (
            '  File "/x/site-packages/urllib3/connection.py", line 9 in request\n'
            '  File "/x/site-packages/tracker/run.py", line 80 in _atexit_finish\n'
        ),
    ],
    ids=["no frame", "waits for threads", "waits for processes", "finalisers", "exit handlers"],
)
def test_a_program_that_had_ended(main: str) -> None:
    """Python was about to end the process: nothing of the program is on the main thread's stack."""
    where = where_it_stood(stopped(3, f"Current thread 0x1 (most recent call first):\n{main}"))
    assert where.returned == "its program had ended"


def test_a_rank_that_leaves_its_group() -> None:
    """Its peers lose it before the call has come back."""
    leaving = '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 9 in destroy_process_group\n'
    leaving += '  File "/app/train.py", line 30 in main\n  File "/app/train.py", line 40 in <module>\n'
    where = where_it_stood(stopped(3, f"Current thread 0x1 (most recent call first):\n{leaving}"))
    assert where.returned == "it was leaving the process group"


IN_SELECT = 'Thread 0x2 (most recent call first):\n  File "/usr/lib/python3.11/selectors.py", line 468 in select\n'
POOL = '  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run\n'
POOL += '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n'
IN_FETCH = '  File "/app/data.py", line 5 in fetch\n'
IN_C10D = '  File "/x/site-packages/torch/distributed/c10d.py", line 9 in all_reduce\n'
IN_DCP = '  File "/x/site-packages/torch/distributed/checkpoint/utils.py", line 9 in reduce_scatter\n'
IN_QUEUE = '  File "/usr/lib/python3.11/queue.py", line 171 in get\n'


@pytest.mark.parametrize(
    ("thread", "stood", "frame"),
    [
        (IN_FETCH, Stood.ELSEWHERE, "data.py:5 in fetch"),
        (IN_C10D + IN_FETCH, Stood.COLLECTIVE, "data.py:5 in fetch"),
        (IN_DCP, Stood.COLLECTIVE, "train.py:40 in main"),
        (IN_QUEUE + IN_FETCH, Stood.ELSEWHERE, "train.py:40 in main"),
    ],
    ids=["works", "in a collective", "a library's, in a collective", "waits for work"],
)
def test_a_main_thread_that_waits_for_another(thread: str, stood: Stood, frame: str) -> None:
    """The position is that of the one thread that runs the program's own code for it."""
    main = IN_SELECT + '  File "/usr/lib/python3.11/asyncio/runners.py", line 190 in run\n'
    main += '  File "/app/train.py", line 40 in main\n'
    where = where_it_stood(stopped(1, f"Thread 0x1 (most recent call first):\n{thread}{POOL}\n{main}"))
    assert (where.stood, where.frame) == (stood, frame)


def test_a_hook_in_a_backward_pass() -> None:
    """A hook of the program waits there if a collective is outstanding; else it may hang."""
    text = 'Thread 0x1 (most recent call first):\n  File "/app/train.py", line 95 in hook\n'
    text += '  File "/x/site-packages/torch/autograd/graph.py", line 979 in _engine_run_backward\n'
    text += '  File "/app/train.py", line 40 in main\n'
    assert where_it_stood(stopped(1, text)).stood is Stood.ELSEWHERE
    assert where_it_stood(stopped(1, text, **count(5, completed=4))).stood is Stood.TORCH


def test_source_lines_of_a_stack() -> None:
    """The program's own frames get their source line, which a person sees and the position does not change."""
    text = with_source(IN_COLLECTIVE, lambda file, line: f"    {file}:{line}()\n")
    assert '  File "/app/train.py", line 40 in main\n    /app/train.py:40()' in readable_stack(text)
    assert text.count("()") == 1
    assert with_source(text, lambda *_: "again") == text
    assert where_it_stood(stopped(1, text)) == where_it_stood(stopped(1, IN_COLLECTIVE))


def test_a_folder_named_like_this_package() -> None:
    """A stack in a collective is one also if everything is installed below a folder with this package's name."""
    file = "/home/a/firstfault/.venv/lib/python3.11/site-packages/torch/distributed/c10d.py"
    assert where_it_stood(stopped(1, STACK.format(file, "all_reduce"))).stood is Stood.COLLECTIVE
