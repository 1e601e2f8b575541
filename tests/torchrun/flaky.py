"""Fails at rank 1 in the first rounds, in each as an argument asks, and then works:
``flaky.py FAULT...``.
"""

import os
import signal
import sys
import time

NUMBER = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LONG_S = 300


def main() -> None:
    """Fail at rank 1 while there is a fault for the round, and let rank 0 wait for its end."""
    faults = sys.argv[1:]
    if len(faults) <= NUMBER:
        sys.stdout.write(f"worked in round {NUMBER}\n")
        return
    if os.environ["RANK"] == "0":
        time.sleep(LONG_S)
    fault = faults[NUMBER]
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "exit":
        sys.exit(1)
    if fault == "value":
        raise ValueError("no batch yet")
    if fault == "runtime":
        raise RuntimeError("No CUDA GPUs are available")
    if fault == "previous":
        raise ValueError(os.environ["FIRSTFAULT_PREVIOUS"])
    if fault == "bug":
        raise TypeError("'int' object is not subscriptable")


main()
