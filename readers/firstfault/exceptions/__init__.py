"""Exceptions and stacks as data. Imports `model` and `text`.

- `ending_exception`: the exception that ended a process, raised or printed, perhaps by an earlier
  try of a step.
- `first_cause`: the exception that explains the failure; `exceptions_in_text`: exceptions of other
  processes, and an exception as Python prints it.
- `fatal_text`: the lines of stderr about the end of a process; `printed_tracebacks`: the tracebacks
  in it.
- `stack_position`: where a stopped process was, from faulthandler's text.
- `fingerprint`: equal for the same fault on other ranks.
- `source_files`: the user's code or a library's.
"""
