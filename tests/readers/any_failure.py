"""Strategies of failures and roster entries with any value in any field,
also in fields that are added later.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from firstfault import model

_BIG = st.integers(0, 2**64 - 1)
_TIME = st.none() | st.integers(1, 2**64 - 1)
_RANKS = 3
_LAST_NS = 253_402_300_800 * 10**9
"""The end of the year 9999."""
_ENUMS = (model.Kind, model.Origin, model.Writer, model.Subject, model.Phase)
_Strategy = st.SearchStrategy[Any]


def _builders(text: _Strategy, number: _Strategy) -> Callable[..., _Strategy]:
    """Return a function from a dataclass to a strategy of its objects."""
    by_type = {
        "str": text,
        "int": number,
        "bool": st.booleans(),
        "float": st.floats(0, 1e6),
        "int | None": st.none() | number,
        "tuple[str, ...]": _some(text),
        "tuple[int, ...]": _some(number),
        "tuple[int, int]": st.tuples(number, number),
        **{kind.__name__: st.sampled_from(kind) for kind in _ENUMS},
    }

    def any_(kind: Any, without: tuple[str, ...] = (), **named: _Strategy) -> _Strategy:
        """Return objects of a dataclass; a field of a type that is not above has to be named,
        so none is forgotten.
        """
        hints = {field.name: field.type for field in fields(kind) if field.name not in without}
        return st.builds(
            kind,
            **{
                name: named[name] if name in named else by_type[hint]
                for name, hint in hints.items()
            },
        )

    return any_


def failures_and_entries(text: _Strategy, number: _Strategy) -> tuple[_Strategy, _Strategy]:
    """Return strategies of failures and of roster entries with these texts,
    and these ranks and other small numbers.
    """
    any_ = _builders(text, number)

    def exceptions(depth: int) -> _Strategy:
        inner = _some(exceptions(depth - 1), 2) if depth else st.just(())
        relation = st.sampled_from(["", "cause", "context"])
        frames = _some(any_(model.FrameInfo))
        return any_(
            model.ExceptionInfo,
            frames=frames,
            text_frames=frames,
            causes=inner,
            members=inner,
            relation=relation,
        )

    place = any_(model.Place, incarnation=_BIG)
    cause = st.none() | any_(model.CausedBy)
    space = dict.fromkeys(("free_bytes", "total_bytes", "free_inodes", "total_inodes"), _BIG)
    progress = any_(
        model.CollectiveProgress,
        enqueued=_BIG,
        completed=st.none() | _BIG,
        last=_some(any_(model.Collective, sequence=_BIG)),
    )
    failures = any_(
        model.WorkerError,
        ("documents", "newer"),
        timestamp_ns=_TIME.filter(lambda stamp: stamp is None or stamp < _LAST_NS),
        place=place,
        exception=st.none() | exceptions(2),
        exit_code=st.none() | st.integers(-(2**31), 2**31 - 1),
        sent_signals=_some(any_(model.SentSignal)),
        resources=any_(
            model.Resources, **{field.name: st.none() | _BIG for field in fields(model.Resources)}
        ),
        monotonic_ns=_TIME,
        upload_delay_ns=_TIME,
        versions=st.dictionaries(text, text, max_size=3).map(
            lambda found: tuple(sorted(found.items()))
        ),
        stack_dumps=_some(any_(model.StackDump)),
        thread_failures=_some(
            any_(model.ThreadFailure, timestamp_ns=_TIME, exception=exceptions(1)), 2
        ),
        handled_exceptions=_some(
            any_(
                model.HandledException,
                timestamp_ns=_TIME,
                exception=exceptions(1),
                times=_BIG,
                calls_since=st.none() | _BIG,
            ),
            2,
        ),
        collectives=_some(progress),
        caused_by=cause,
        expired=st.none() | any_(model.ExpiredDeadline),
        system=any_(
            model.SystemState,
            file_systems=_some(any_(model.FileSystem, **space)),
            limits=_some(st.tuples(text, _BIG)),
        ),
    )
    entries = any_(
        model.NodePresence,
        ("newer",),
        # its ranks' local ranks follow this one
        place=place.filter(lambda at: (at.local_rank or 0) < 2**31 - _RANKS),
        ranks=_some(number, _RANKS),
        receipts=_some(any_(model.Receipt, name=st.text(max_size=20), fault_to_durable_ns=_TIME)),
        timestamp_ns=_TIME,
        first_failure=cause,
        log_tails=_some(any_(model.LogTail)),
        setup=any_(model.NodeSetup),
        progress=any_(model.Progress, collectives=_BIG),
    )
    return failures, entries


def _some(items: _Strategy, most: int = 3) -> _Strategy:
    return st.lists(items, max_size=most).map(tuple)
