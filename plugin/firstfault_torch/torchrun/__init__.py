"""firstfault for jobs that torchrun starts, or any launcher that ends in torch's elastic agent: docs/torchrun.md.

- `agent`: stands where torch's launcher looks for its agent.
- `script`: records in a worker that is a program.
- `command`: ``firstfault torchrun``.
"""

VARIABLE = "FIRSTFAULT"
"""Set to 1: torch's launchers run under firstfault. `firstfault_start`, which imports nothing, reads it."""
