"""The node's recorder: a process that uploads the documents of one node's workers and agent.

It has a storage client open, so a failing worker needs no slow imports. It outlives the agent and
reports its death. Imports `layout`, `model`, `store` and `wire`. A worker needs only `folder`,
which has the recorder's client.
"""
