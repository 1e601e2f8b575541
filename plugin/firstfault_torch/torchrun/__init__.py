"""Jobs of torchrun, and of other launchers that use torch's elastic agent: docs/start/torchrun.md;
and ranks that no agent starts.

- `agent`: replaces the agent of torch's launcher.
- `script`: records the end of a worker that is a program.
- `rank`: records the end of a rank that no agent has started.
- `integration`: the base class for launchers that start such ranks and repeat a failed training.
- `command`: ``firstfault torchrun``.

`firstfault_start` is the way in: torch and Python's `site` call it, and it imports this package
when a job needs it.
"""
