"""Names a hang within a minute: the straggler for which all remaining ranks wait, and its position.

An optional part: the entry point ``firstfault.hang`` brings it to the agent. `watch` has the
agent's thread, which carries out what `firstfault_torch.protocol.stalls` decides. `observe`,
`procfs` and `ras` have what one agent observes of its workers, `compare` its questions
to the store and its part in elections, `stall_report` the conclusion of one agent for all nodes,
and `records` what stays. The judgment is that of `evidence`, which gets each worker as if it had
missed a deadline.
"""

from firstfault_torch.hang.watch import StallWatch

__all__ = ["StallWatch"]
