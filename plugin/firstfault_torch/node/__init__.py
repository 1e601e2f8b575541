"""What the agent and the workers of one node share: files in the node's folder, messages, stderr, stacks, documents.

It may import the library, never `agent` or `worker`.
"""
