"""The elastic agent of one node: it starts and watches the workers, documents failures, and tells the other agents.

It may import `node` and torch elastic, never `worker`.
"""
