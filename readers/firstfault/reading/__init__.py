"""From an output prefix to `JobErrors`: lists, selects, reads and merges documents.

Imports `wire`, `layout`, `store`, `exceptions` and `model`.
"""
