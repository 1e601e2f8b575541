"""A program that prints what it can tell about how it was started, and ends as it is told: ``program.py END``."""

import atexit
import json
import multiprocessing
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path


class Sample:
    """Defined in the program: its pickles name `__main__`."""


def child() -> None:
    """Run in a spawned process, which imports this module again."""
    print("child", __name__, flush=True)


def told() -> dict[str, object]:
    """Return what a program sees of itself."""
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path[0],
        "name": __name__,
        "file": __file__,
        "spec": str(main.__spec__ and main.__spec__.name),
        "package": __package__,
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "excepthook": sys.excepthook is sys.__excepthook__,
        "pickle": isinstance(pickle.loads(pickle.dumps(Sample())), Sample),  # noqa: S301 - its own
        "threads": [thread.name for thread in threading.enumerate()],
        "stdin": sys.stdin is None or sys.stdin.read(),
        "cwd": str(Path.cwd()),
        "pythonpath": os.environ.get("PYTHONPATH"),
        "rank": os.environ["RANK"],
    }


def replaced(kind: type[BaseException], error: BaseException, _: object) -> None:
    """A hook of the user's, as rich installs one."""
    print(f"my hook: {kind.__name__}: {error}", file=sys.stderr)


def end(how: str) -> None:
    """End this process, as rank 1 only."""
    if how == "hook":
        sys.excepthook = replaced
        raise ValueError("told by the user's hook")
    if how == "chained":
        try:
            {}["labels"]
        except KeyError as error:
            raise RuntimeError("training failed") from error
    if how == "group":
        raise ExceptionGroup("two", [ValueError(1), KeyError(2)])  # noqa: F821 - in Python 3.11 and later
    if how.startswith("exit"):
        sys.exit({"exit-text": "no licence", "exit-7": 7, "exit-none": None, "exit-list": [1, 2]}[how])
    if how == "thread":
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    if how == "handled":
        try:
            int("seventeen")
        except ValueError:
            traceback.print_exc()
    if how == "spawn":
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join()


if __name__ == "__main__":
    atexit.register(lambda: print("at exit", flush=True))
    print(json.dumps(told()), flush=True)
    if os.environ["RANK"] == "1":
        end(sys.argv[1])
