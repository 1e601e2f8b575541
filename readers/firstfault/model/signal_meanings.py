"""The meaning of a signal or an exit code that ended a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firstfault.model.failure import Resources, WorkerError

SIGNALS: dict[str, str] = {
    "SIGABRT": "the process aborted (a failed check in native code)",
    "SIGBUS": "crashed with a bus error (often /dev/shm is full)",
    "SIGFPE": "crashed in native code (division by zero or integer overflow)",
    "SIGHUP": "terminated because its terminal or session was closed",
    "SIGILL": "crashed in native code (an instruction that this processor does not have)",
    "SIGINT": "interrupted, as by Ctrl-C",
    "SIGKILL": "killed, sender unknown",
    "SIGPIPE": "wrote to a pipe or socket whose reader was gone",
    "SIGQUIT": "terminated by a request to quit with a core dump",
    "SIGSEGV": "crashed in native code (invalid memory access)",
    "SIGSYS": "made a system call that its sandbox forbids",
    "SIGTERM": "terminated from outside, not by its agent",
    "SIGTRAP": "stopped at a trap in native code (a failed check, or a debugger's breakpoint)",
    "SIGUSR1": "ended by a signal that schedulers send before a time limit",
    "SIGUSR2": "ended by a signal whose meaning depends on its sender",
    "SIGXCPU": "used up its CPU time limit",
    "SIGXFSZ": "wrote a file larger than its limit",
}
"""What happened to a process that a signal ended, if its agent did not send the signal."""

CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS"}
"""Signals that the kernel sends for what the process itself did."""
STOPS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}
"""Signals by which a process is asked to end."""
_SHELL = 128
"""A shell's exit code for a signal is this plus the signal's number."""
_OF_SHELLS = {6: "SIGABRT", 7: "SIGBUS", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def explain_signal(signal: str, resources: Resources) -> str:
    """Return what happened, for a SIGKILL with what the cgroup counted; empty for a signal that is not in `SIGNALS`."""
    if signal != "SIGKILL":
        return SIGNALS.get(signal, "")
    if resources.oom_kill:
        return "killed by the kernel's OOM killer"
    counted = "no OOM kill counted" if resources.oom_kill == 0 else "OOM kills could not be counted"
    return f"{SIGNALS[signal]}, {counted}"


def explain_end(failure: WorkerError) -> str:
    """Return what happened to a process that raised no exception and that its agent did not stop.

    Its agent may have killed it for a deadline that it did not keep.
    """
    if failure.expired is not None:
        return failure.expired.text
    if failure.signal:
        return explain_signal(failure.signal, failure.resources) or f"ended by {failure.signal}"
    signal = signal_of_exit_code(failure.exit_code)
    return "exited without an exception" + (f" (a shell's exit code for {signal})" if signal else "")


def ended_by(signal: str) -> str:
    """Return a verb for the end by a signal: "crashed with SIGSEGV", "was terminated by SIGTERM"."""
    if signal in CRASHES:
        return f"crashed with {signal}"
    if signal == "SIGABRT":
        return f"aborted ({signal})"
    return f"was {'terminated' if signal in STOPS else 'killed'} by {signal}"


def signal_of_exit_code(exit_code: int | None) -> str:
    """Return the signal of which a shell made this exit code; empty if it is none of those."""
    return _OF_SHELLS.get(exit_code - _SHELL, "") if exit_code is not None else ""
