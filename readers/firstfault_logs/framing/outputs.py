"""Recognize the standard output and the standard error of one job by the names of their files."""

from __future__ import annotations

from firstfault.utils.lazy_pattern import LazyPattern

# "job-77.out" and "job-77.err", "stdout.log" and "stderr.log", "train.o77" and "train.e77"
_OUTPUT_FILE = LazyPattern(
    r"""
            (?P<before>(?:[^\n]*(?:/|[-_.]))?)
            (?:std)?(?:out|err|o(?=\d)|e(?=\d))
            (?P<after>\d*(?:[-_.][^/\n]*)?)
        """
)


def are_outputs_of_one_job(file: str, other: str) -> bool:
    """Whether two files are the standard output and the standard error of one job,
    by their names.
    """
    names = [_OUTPUT_FILE.fullmatch(name) for name in (file, other)]
    if file == other or names[0] is None or names[1] is None:
        return False
    return all(names[0][part] == names[1][part] for part in ("before", "after"))
