"""From a failed launch to a sealed verdict: waits for the other nodes, concludes, seals, and keeps it for a retry.

It may import the library and `node`, never `agent` or `worker`.
"""
