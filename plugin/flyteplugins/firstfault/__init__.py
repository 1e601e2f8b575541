"""Flyte 2 (the package ``flyte``): docs/start/flyte2.md.

- `engine`: carries out the verdict on a task; runs in the process that starts the workers.
- `observer`: records the exception of a clustered task; runs in each worker.

There is nothing to import in a task's code: entry points find both modules in an environment with
``FIRSTFAULT=1``.
"""
