"""How the agents of a round coordinate: through the round's store, connections between agents,
and the roster.
"""
