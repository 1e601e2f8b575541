"""What the agents of a round tell each other, through the round's store, through connections and through the storage.

It may import the library and `node`, never `agent`, `worker` or `verdict`.
"""
