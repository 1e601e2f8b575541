"""The elastic agent of one node: it starts and watches the workers, documents failures, and tells its peers.

It may import `node` and torch elastic, never `worker`.
"""
