"""The elastic agent of one node: starts and watches the workers, documents failures,
and informs the peer agents.

It may import `node` and torch elastic, never `worker`.
"""
