"""One line about a verdict or a failure."""

from __future__ import annotations

import re

from firstfault.evidence.texts import find_message, has_reached_end
from firstfault.model import Resources, Scope, Subject, Verdict, WorkerError
from firstfault.model.failure import OF_LOGS, TEARDOWN
from firstfault.strategies.headlines import describe_failure, strip_log_prefixes
from firstfault.utils.text import one_line, size

_MAX_LINE_CHARACTERS = 200
_MAX_LONG_LINE_CHARACTERS = 400
_NEAR_LIMIT_SHARE = 0.9
# "Name (a, b), more": only a comma outside of parentheses ends the name
_COMMA_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")
_LOST_AGENT_PREFIX = "the agent died and "
"""The beginning of the text about an agent that left no report:
the name of the fault has the same meaning.
"""


def headline_parts(verdict: Verdict) -> tuple[str, str]:
    """Return a verdict's headline in two parts: the fault in one or two words,
    and a sentence about it.
    """
    root, headline = verdict.root, verdict.headline
    if verdict.category == TEARDOWN:
        return headline, ""  # the process's end alone would be about the training
    begin, cut, _ = headline.rpartition("...")
    whole = one_line(verdict.message, _MAX_LONG_LINE_CHARACTERS)
    # a headline that ends in "..." was cut; the message begins with the same words and has the rest
    if cut and headline.endswith("...") and whole.startswith(begin):
        headline = whole  # before it was cut
    what = find_message(root).what if root is not None else ""
    if what and headline.startswith(f"{what},"):
        return what, headline[len(what) :].partition(": ")[2]
    name, _, text = headline.partition(": ")
    return _COMMA_OUTSIDE_PARENTHESES.split(name, maxsplit=1)[0], text


def split_fault(verdict: Verdict) -> tuple[str, str]:
    """Return the fault in one or two words, and all that is known about it: the whole message,
    not only its line.
    """
    root = verdict.root
    name, text = headline_parts(verdict)
    if root is None or verdict.scope is Scope.UNDETERMINED:
        return name, text
    if verdict.category == "host_oom" and root.signal == "SIGKILL":
        # a killed process leaves no message, so the kernel's numbers are the detail
        return "OOM-killed", _memory_text(root.resources)
    if verdict.category == "node_lost" and text.startswith(_LOST_AGENT_PREFIX):
        return "agent lost", f"it {text.removeprefix(_LOST_AGENT_PREFIX)}"
    if has_reached_end(root):
        return name, text  # the headline has more: where its peers were
    message = find_message(root)
    if name != message.what or not (message.text or message.exception is not None):
        return name, text
    return name, (
        strip_log_prefixes(message.whole, root.rank)
        if root.place.engine == OF_LOGS
        else message.whole
    )


def summarize_failure(failure: WorkerError) -> str:
    """Return what happened to a process in one line, without its name."""
    # a crash while the agent stopped the process is a fault
    if failure.has_unseen_end:
        return failure.sent_signals[0].reason
    if failure.stopped_by_agent and not failure.crashed_while_stopped:
        sent = failure.sent_signals[0]
        signal = failure.signal or sent.signal
        return one_line(f"{signal}: {sent.reason}" if signal else sent.reason, _MAX_LINE_CHARACTERS)
    what = find_message(failure).what
    text = describe_failure(failure)
    if failure.subject is Subject.AGENT and failure.exception is None:
        # its text describes what it is
        what = text or failure.code
        text = ""
    return one_line(f"{what}: {text}" if text and text != what else what, _MAX_LINE_CHARACTERS)


def _memory_text(resources: Resources) -> str:
    """Return what the kernel's OOM killer was after: "15.9 of 16.0 GiB"."""
    peak = resources.memory_peak_bytes or resources.memory_used_bytes
    limit = resources.memory_limit_bytes
    if peak is None or limit is None:
        return "out of memory"
    used = size(peak)
    limit_size = size(limit)
    number, _, unit = used.partition(" ")
    text = (
        f"{number} of {limit_size}"
        if limit_size.endswith(f" {unit}")
        else f"{used} of {limit_size}"
    )
    # the OOM killer also acts if the whole machine is out of memory; then the process is far from
    # its own limit
    return (
        text
        if peak >= _NEAR_LIMIT_SHARE * limit
        else f"its machine had no memory left; it used {text}"
    )
