"""Jobs of torchrun, and of other launchers that use torch's elastic agent: docs/start/torchrun.md.

- `agent`: replaces the agent of torch's launcher.
- `script`: records the end of a worker that is a program.
- `command`: ``firstfault torchrun``.

`firstfault_start` is the way in: torch and Python's `site` call it, and it imports this package
when a job needs it.
"""
