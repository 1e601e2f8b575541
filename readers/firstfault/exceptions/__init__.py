"""Exceptions and stacks as data. Imports `model` and `text`.

- `ending_exception`: the exception that ended a process, raised or printed; `retried_step`: a
  program that tries again.
- `first_cause`: the exception that explains the failure; `exceptions_in_text`: exceptions of other
  processes.
- `fatal_text`: the lines of stderr about the end of a process; `printed_tracebacks`: the tracebacks
  in it.
- `stack_position`: where a stopped process was; `stack_dumps`: faulthandler's text.
- `fingerprint`: equal for the same fault on other ranks.
- `traceback_format`: an exception as Python prints it; `source_files`: the user's code or a
  library's.
"""
