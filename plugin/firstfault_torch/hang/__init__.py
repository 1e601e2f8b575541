"""Names a hang within a minute: for which rank the others wait, and where that one is.

An optional part: the entry point ``firstfault.hang`` brings it to the agent. `watch` has the thread of a node, `looks`
what it sees of its workers, `told` what the node that concludes says of all. The judgement is that of `evidence`: each
worker is given to it as at a deadline that it didn't keep.
"""

from firstfault_torch.hang.watch import StallWatch

__all__ = ["StallWatch"]
