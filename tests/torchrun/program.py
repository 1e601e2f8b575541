"""A program that prints what it can tell about how it was started, and ends as it is told:
``program.py END``.
"""

import atexit
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


class Sample:
    """Defined in the program: its pickles name `__main__`."""

    number = 0


def child() -> None:
    """Run in a spawned process, which imports this module again."""
    print("child", __name__, flush=True)


def made(number: int) -> Sample:
    """Return a sample of a spawned process to the program."""
    sample = Sample()
    sample.number = number
    return sample


def told() -> dict[str, object]:
    """Return what a program sees of itself."""
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path[0],
        "name": __name__,
        "file": __file__,
        "spec": str(getattr(getattr(main, "__spec__", None), "name", None)),
        "package": __package__,
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "excepthook": sys.excepthook is sys.__excepthook__,
        "pickle": isinstance(pickle.loads(pickle.dumps(Sample())), Sample),  # noqa: S301 - its own
        "threads": [thread.name for thread in threading.enumerate()],
        "stdin": sys.stdin is None or HOW in STEPPED or sys.stdin.read(),
        "cwd": str(Path.cwd()),
        "pythonpath": os.environ.get("PYTHONPATH"),
        "rank": os.environ["RANK"],
    }


HOW = sys.argv[1]
STEPPED = ("breakpoint", "handled-by-pdb")
"""Ends that read stdin."""
EXITS = {
    "exit-text": "no licence",
    "exit-7": 7,
    "exit-0": 0,
    "exit-none": None,
    "exit-list": [1, 2],
    "exit-true": True,
    "exit-minus": -1,
    "exit-259": 259,
    "exit-large": 2**70,
    "exit-float": 1.5,
    "exit-empty": "",
    "exit-bytes": b"no licence",
}


def replaced(kind: type[BaseException], error: BaseException, _: object) -> None:
    """A hook of the user's, as rich installs one."""
    print(f"my hook: {kind.__name__}: {error}", file=sys.stderr)


def broken(kind: type[BaseException], error: BaseException, _: object) -> None:
    """A hook of the user's that fails itself."""
    sys.exit(f"no room for {kind.__name__}")


def install_rich() -> None:
    """Let rich print tracebacks, as many programs do."""
    from rich.traceback import install  # noqa: PLC0415 - slow

    install(width=80)


HOOKS = {"hook": replaced, "broken-hook": broken}


def end(how: str) -> None:  # noqa: C901, PLR0912 - a list of ends
    """End this process, as rank 1 only."""
    if how in HOOKS:
        sys.excepthook = HOOKS[how]
        raise ValueError("told by the user's hook")
    if how == "rich":
        install_rich()
        raise ValueError("drawn by rich")
    if how == "chdir":
        os.chdir("/")
        raise ValueError("far from its file")
    if how == "atexit":
        atexit.register(int, "seventeen")
        raise ValueError("before the last function")
    if how == "chained":
        try:
            {}["labels"]
        except KeyError as error:
            raise RuntimeError("training failed") from error
    if how == "group":
        # in Python 3.11 and later
        raise ExceptionGroup("two", [ValueError(1), KeyError(2)])  # noqa: F821
    if how in EXITS:
        sys.exit(EXITS[how])
    if how == "thread":
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    if how == "handled":
        try:
            int("seventeen")
        except ValueError:
            traceback.print_exc()
    if how in {"spawn", "forkserver"}:
        context = multiprocessing.get_context(how)
        process = context.Process(target=child)
        process.start()
        process.join()
        with ProcessPoolExecutor(1, context) as pool:
            print([sample.number for sample in pool.map(made, range(3))])
    if how == "breakpoint":
        breakpoint()  # noqa: T100 - what is tested
    if how == "leave":
        atexit.register(os._exit, 5)
    if how == "interrupt":
        # a shell's background jobs ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    atexit.register(lambda: print("at exit", flush=True))
    print(json.dumps(told()), flush=True)
    if os.environ["RANK"] == "1":
        end(HOW)
